"""The passes on Hopper, for 16-bit inputs and K = V = 128.

Legend: M tokens of all documents, N chunks, H heads, K key width, V value width.
"""

import logging

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import hopper_recurrence, hopper_values
from .hopper_keys import SETTINGS as KEYS
from .hopper_keys import key_gradients_on_hopper
from .hopper_recurrence import TILE, D
from .hopper_scores import LAUNCH as SCORES
from .hopper_scores import gate_and_scores_kernel
from .passes import Chunks, Passes
from .tiles import BT

# Launch settings. The solve: with no more registers 16 warps reside on a multiprocessor.
SOLVE = {"num_warps": 2, "maxnreg": 128}
SERIAL = {"num_warps": 4}
FACTORS, VALUES = {"num_warps": 1}, {"num_warps": 4}
logging.getLogger(__name__).info(
    "launch settings on Hopper: gate and scores %s, solve %s, serial %s, factors %s, values %s, keys %s",
    SCORES, SOLVE, SERIAL, FACTORS, VALUES, KEYS,
)  # fmt: skip


def rows(x: torch.Tensor, width: int, height: int = 64) -> TensorDescriptor:
    """Of x, as rows of `width`, tiles of 128 columns at most. An input that is not aligned to 16 bytes is copied."""
    if x.data_ptr() % 16:
        x = x.clone()
    count = x.numel() // width
    return TensorDescriptor(x, [count, width], [width, 1], [height, min(width, D.value)], TILE.value)


class HopperPasses(Passes):
    """Passes with kernels for Hopper."""

    solve_settings = SOLVE

    @staticmethod
    def take(q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> bool:
        """Whether they have kernels for these inputs, [B, T, H, K] and [B, T, H, V]."""
        B, T, H, K = q.shape
        chunks = B * triton.cdiv(T, BT.value) + (0 if cu_seqlens is None else len(cu_seqlens))
        return (
            q.dtype != torch.float32
            and K == v.shape[-1] == D.value
            # The copy engine counts rows, also those of states, in 32 bits.
            and max(chunks * K, B * T) * H < 2**31
            and not triton.knobs.runtime.interpret
            and torch.cuda.get_device_capability(q.device)[0] == 9
        )

    def scores(self, q, k, f, A_log, dt_bias, backward: bool) -> Chunks:
        if not self.narrow:
            return super().scores(q, k, f, A_log, dt_bias, backward)
        work = self.new_chunks(backward)
        gate_and_scores_kernel[(self.N * self.H,)](
            q, k, f, A_log, dt_bias, self.chunks, work.sums, work.quarters, work.q_in, work.k_in, work.k_out,
            work.attend, work.keys, work.decay, work.q_rstds, work.k_rstds, self.lower_bound,
            self.M, self.H, self.K, BACKWARD=backward, **SCORES,
        )  # fmt: skip
        return work

    def forward(self, work, v, initial, final, o, states=None, states_scale=None, values=None, values_scale=None):
        K, V, backward = self.K, self.V, states is not None
        hopper_recurrence.forward_kernel[(self.X * self.H,)](
            rows(v, self.H * V), rows(work.k_in, K), rows(work.solve, BT.value), rows(work.k_out, K),
            None if backward else rows(work.q_in, K), None if backward else rows(work.attend, BT.value),
            work.decay, self.documents, initial, final, o,
            rows(states, K) if backward else None, states_scale, values, values_scale, self.M, self.H,
            HAS_INITIAL=initial is not None, HAS_FINAL=final is not None, BACKWARD=backward, **SERIAL,
        )  # fmt: skip

    def backward(self, work, do, beta, dfinal, dinitial, do_scale, dstates, dstates_scale, dvalues, dvalues_scale):
        K, V = self.K, self.V
        hopper_recurrence.backward_kernel[(self.X * self.H,)](
            rows(do, self.H * V), rows(work.attend, BT.value), rows(work.k_out, K), rows(work.q_in, K),
            rows(work.inverse, BT.value), rows(work.k_in, K), beta, work.decay, self.documents, dfinal, dinitial,
            do_scale, rows(dstates, K), dstates_scale, dvalues, dvalues_scale, self.M, self.H,
            HAS_INITIAL=dinitial is not None, HAS_FINAL=dfinal is not None, **SERIAL,
        )  # fmt: skip

    def value_gradients(
        self, work, do, v, beta, do_scale, states, states_scale, dstates, dstates_scale, values, values_scale,
        dvalues, dvalues_scale, dv, dbeta, dtotal, dscores, dots, ratios,
    ):  # fmt: skip
        N, H, K, V = self.N, self.H, self.K, self.V
        factors, largest = self.empty(N, H, 6, V, dtype=self.work), self.empty(N, H, 8)
        hopper_values.factors_kernel[(N * H,)](
            do_scale, states_scale, dstates_scale, values_scale, dvalues_scale, factors, largest, ratios, V, **FACTORS
        )
        hopper_values.value_gradients_kernel[(N * H,)](
            rows(do, H * V), rows(v, H * V), rows(states, K, V), rows(dstates, K, V), rows(values, V),
            rows(dvalues, V), rows(work.q_in, K), beta, self.chunks, work.attend, work.keys,
            work.decay, dvalues_scale, factors, largest,
            work.q_in, work.k_in, work.k_out, dv, dbeta, dtotal, dscores, *dots, self.M, H,
            **VALUES,
        )  # fmt: skip

    def key_gradients(self, work, q, k, f, A_log, dt_bias, beta, dscores, ratios, dots, dtotal, dq, dk, df):
        if not self.narrow:
            return super().key_gradients(
                work, q, k, f, A_log, dt_bias, beta, dscores, ratios, dots, dtotal, dq, dk, df
            )  # fmt: skip
        ddt_bias, dA_log = key_gradients_on_hopper(
            q, k, f, work.sums, work.quarters, A_log, dt_bias, work.q_in, work.k_in, work.k_out, dscores, beta,
            self.chunks, ratios, work.q_rstds, work.k_rstds, *dots, dtotal, dq, dk, df, self.lower_bound,
        )  # fmt: skip
        return dA_log, ddt_bias
