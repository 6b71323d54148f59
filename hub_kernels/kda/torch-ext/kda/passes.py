"""The passes over the chunks that make up the operation: their sizes, launch settings and launches.

Legend: M tokens of all documents, X documents, N chunks, H heads, K key width, V value width.
"""

import logging
from typing import NamedTuple

import torch

from .documents import chunk_tables
from .gate import gate_kernel
from .gradients import key_gradients_kernel, value_gradients_kernel
from .prepare import scores_kernel, solve_kernel
from .recurrence import backward_kernel, forward_kernel
from .tiles import BQ, BT

WIDTHS = (16, 32, 64, 128)
# Launch settings, and channels of a step or program of the kernels that take them in parts.
GATE = {"num_warps": 1}
SCORES, SCORE_CHANNELS = {"num_warps": 4, "num_stages": 1}, 64
SOLVE = {"num_warps": 2}
SERIAL, VALUES_AT_A_TIME = {"num_warps": 8, "num_stages": 1}, 128
VALUES = {"num_warps": 4}
KEYS, KEY_CHANNELS = {"num_warps": 2, "num_stages": 1}, 32
logging.getLogger(__name__).info(
    "launch settings, fixed on all devices: gate %s, scores %s, solve %s, serial %s, values %s, keys %s",
    GATE, SCORES, SOLVE, SERIAL, VALUES, KEYS,
)  # fmt: skip
# With decays of at most exp(-5) per token one reference serves 32 tokens: see scores.py.
NARROWEST_BOUND = -5.0


class Chunks(NamedTuple):
    """What the first passes leave for the others, as prepare.py says."""

    sums: torch.Tensor | None
    quarters: torch.Tensor | None
    q_in: torch.Tensor
    k_in: torch.Tensor
    k_out: torch.Tensor
    attend: torch.Tensor
    keys: torch.Tensor
    decay: torch.Tensor
    q_rstds: torch.Tensor
    k_rstds: torch.Tensor
    solve: torch.Tensor | None = None
    inverse: torch.Tensor | None = None


class Passes:
    """Those of one call. Arguments that are results are written to."""

    solve_settings = SOLVE

    def __init__(self, q, v, cu_seqlens, lower_bound):
        B, T, self.H, self.K = q.shape
        self.V, self.M, self.device = v.shape[-1], B * T, q.device
        self.documents, self.chunks = chunk_tables(B, T, cu_seqlens, q.device)
        self.X, self.N = self.documents.shape[0], self.chunks.shape[0]
        self.exact = q.dtype == torch.float32
        self.work = torch.float32 if self.exact else torch.float16
        self.bounded, self.lower_bound = lower_bound is not None, lower_bound or 0.0
        self.narrow = self.bounded and lower_bound >= NARROWEST_BOUND
        # Exact products hold their operands in registers: small tiles.
        self.BV = 16 if self.exact else min(self.V, VALUES_AT_A_TIME)

    def empty(self, *shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.device)

    def channels(self, most: int) -> int:
        """Of a step or program; exact products and decays without one reference take more registers."""
        return min(self.K, most if self.narrow and not self.exact else 16)

    def prepare(self, q, k, f, beta, A_log, dt_bias, backward: bool) -> Chunks:
        """All that needs no state."""
        work = self.scores(q, k, f, A_log, dt_bias, backward)
        solve, inverse = torch.empty_like(work.keys), torch.empty_like(work.keys) if backward else None
        solve_kernel[(self.N * self.H,)](
            beta, self.chunks, work.keys, solve, inverse,
            self.M, self.H, BACKWARD=backward, EXACT=self.exact, **self.solve_settings,
        )  # fmt: skip
        return work._replace(solve=solve, inverse=inverse)

    def new_chunks(self, decays: bool) -> Chunks:
        """Room for all but the solve; for sums and quarters if `decays`."""
        M, N, H, K = self.M, self.N, self.H, self.K
        return Chunks(
            self.empty(H, M, K) if decays else None,
            self.empty(N, H, BT.value // BQ.value, K) if decays else None,
            *(self.empty(H, M, K, dtype=self.work) for _ in range(3)),
            *(self.empty(H, M, BT.value, dtype=self.work) for _ in range(2)),
            self.empty(N, H, K),
            *(self.empty(H, M) for _ in range(2)),
        )

    def gate(self, f, A_log, dt_bias, sums, quarters) -> None:
        gate_kernel[(self.N * self.H,)](
            f, A_log, dt_bias, self.chunks, sums, quarters, self.lower_bound,
            self.M, self.H, self.K, BOUNDED=self.bounded, NARROW=self.narrow, **GATE,
        )  # fmt: skip

    def scores(self, q, k, f, A_log, dt_bias, backward: bool) -> Chunks:
        """Everything but the solve; sums and quarters are only for the backward passes."""
        work = self.new_chunks(True)
        self.gate(f, A_log, dt_bias, work.sums, work.quarters)
        scores_kernel[(self.N * self.H,)](
            q, k, work.sums, work.quarters, self.chunks, work.q_in, work.k_in, work.k_out, work.attend, work.keys,
            work.decay, work.q_rstds, work.k_rstds,
            self.M, self.H, self.K, self.channels(SCORE_CHANNELS), NARROW=self.narrow, EXACT=self.exact, **SCORES,
        )  # fmt: skip
        return work

    def forward(self, work, v, initial, final, o, states=None, states_scale=None, values=None, values_scale=None):
        """Outputs and final states; or, for the backward passes, states and values."""
        forward_kernel[(self.X * self.H * self.V // self.BV,)](
            work.q_in, work.k_in, work.k_out, v, work.solve, work.attend, work.decay, self.documents,
            initial, final, o, states, states_scale, values, values_scale,
            self.M, self.H, self.K, self.V, self.BV, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
            BACKWARD=states is not None, EXACT=self.exact, **SERIAL,
        )  # fmt: skip

    def backward(self, work, do, beta, dfinal, dinitial, do_scale, dstates, dstates_scale, dvalues, dvalues_scale):
        backward_kernel[(self.X * self.H * self.V // self.BV,)](
            do, work.q_in, work.k_in, work.k_out, work.inverse, beta, work.attend, work.decay, self.documents,
            dfinal, dinitial, do_scale, dstates, dstates_scale, dvalues, dvalues_scale,
            self.M, self.H, self.K, self.V, self.BV, HAS_INITIAL=dinitial is not None, HAS_FINAL=dfinal is not None,
            EXACT=self.exact, **SERIAL,
        )  # fmt: skip

    def value_gradients(
        self, work, do, v, beta, do_scale, states, states_scale, dstates, dstates_scale, values, values_scale,
        dvalues, dvalues_scale, dv, dbeta, dtotal, dscores, dots, ratios,
    ):  # fmt: skip
        """dots: own_scores, q_dots and k_dots."""
        value_gradients_kernel[(self.N * self.H,)](
            do, v, beta, self.chunks, work.q_in, work.k_in, work.k_out, work.attend, work.keys, work.decay,
            do_scale, states, states_scale, dstates, dstates_scale, values, values_scale, dvalues, dvalues_scale,
            dv, dbeta, dtotal, dscores, *dots, ratios, self.M, self.H, self.K, self.V, EXACT=self.exact, **VALUES,
        )  # fmt: skip

    def key_gradients(self, work, q, k, f, A_log, dt_bias, beta, dscores, ratios, dots, dtotal, dq, dk, df):
        """(shares of dA_log [N, H, ...], of ddt_bias [N, H, K])."""
        N, H, K, BK = self.N, self.H, self.K, self.channels(KEY_CHANNELS)
        ddt_bias, dA_log = self.empty(N, H, K), self.empty(N, H, K // BK)
        key_gradients_kernel[(N * H * K // BK,)](
            q, k, f, work.sums, work.quarters, A_log, dt_bias, work.q_in, work.k_in, work.k_out, dscores, beta,
            self.chunks, ratios, work.q_rstds, work.k_rstds, *dots, dtotal, dq, dk, df, ddt_bias, dA_log,
            self.lower_bound, self.M, H, K, BK, BOUNDED=self.bounded, NARROW=self.narrow, EXACT=self.exact, **KEYS,
        )  # fmt: skip
        return dA_log, ddt_bias
