"""One token of KDA per sequence at the released model's width: errors, then times of CUDA graph replays.

Every replay works on the same states. Those of one sequence take 6 MB and stay in the L2 cache; the floor counts them
as read from and written to device memory. Ours includes the convolutions, the gated norm and the output gate; of fla,
once the recurrent step alone is timed and once with its own kernels for the rest.
"""

from collections.abc import Callable
from typing import Any

import torch
from kda import decode_kda, decode_kda_reference
from measure import captured, floor_ms, relative_error, row, samples_ms

H, K, V, W = 96, 128, 128, 4
LOWER_BOUND, EPS = -5.0, 1e-5
# Errors over those of the torch definition: ours may reach the first, another implementation the second.
OURS, OTHERS = 2.0, 4.0
# An fp32 error below this is rounding, whichever way it fell.
EXACT = 5e-7
OPTIONS = {"lower_bound": LOWER_BOUND, "eps": EPS}


def inputs(B: int) -> dict[str, Any]:
    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    widths = (H * K, H * K, H * V)
    return {
        "xs": [draw(B, P) for P in widths],
        "weights": [draw(P, W, dtype=torch.float32) for P in widths],
        "conv_states": [draw(B, W - 1, P) for P in widths],
        "f": draw(B, H, K),
        "beta": draw(B, H),
        "A_log": torch.empty(H, device="cuda").uniform_(0, 1),
        "dt_bias": draw(H, K, dtype=torch.float32),
        "state": draw(B, H, K, V, dtype=torch.float32),
        "gate": draw(B, H, V),
        "norm_weight": draw(V, dtype=torch.float32),
    }


def ours(given: dict[str, Any]) -> Callable[[], torch.Tensor]:
    return lambda: decode_kda(**given, **OPTIONS)


def definition(given: dict[str, Any]) -> Callable[[], torch.Tensor]:
    return lambda: decode_kda_reference(**given, **OPTIONS)[0]


def fla(given: dict[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    """The whole mixer between its projections, and the recurrent step alone on inputs of the same shape."""
    from fla.modules.causal_conv1d import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda import fused_recurrent_kda

    B = len(given["f"])
    # fla keeps the last W inputs per channel, the oldest of which it drops unread.
    caches = [torch.nn.functional.pad(pool.transpose(1, 2), (1, 0)).contiguous() for pool in given["conv_states"]]
    f, beta, gate = (given[name].unsqueeze(1) for name in ("f", "beta", "gate"))
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fused_recurrent_kda(
            *(x.view(B, 1, H, -1) for x in (q, k, v)), f, beta, A_log=given["A_log"], dt_bias=given["dt_bias"],
            initial_state=given["state"], output_final_state=True, lower_bound=LOWER_BOUND, **options,
        )[0]  # fmt: skip

    def whole() -> torch.Tensor:
        streams = zip(given["xs"], caches, given["weights"], strict=True)
        qkv = [causal_conv1d_update(x, cache, weight=w, activation="silu")[0] for x, cache, w in streams]
        return rms_norm_gated(step(*qkv), gate, given["norm_weight"], None, activation="sigmoid", eps=EPS).view(B, -1)

    return {
        "fla conv, step, norm": torch.no_grad()(whole),
        "fla step alone": torch.no_grad()(lambda: step(*given["xs"])),
    }


def verified(given: dict[str, Any], functions: dict[str, Callable[[], torch.Tensor]]) -> tuple[set[str], float]:
    """Names of the functions whose first token is right, and our error over that of torch."""
    y, _, state = decode_kda_reference(**given, **OPTIONS)
    # Two sequences in float64: they are independent.
    per_sequence = ("f", "beta", "state", "gate")
    some = {name: [p[:2].double() for p in x] for name, x in given.items() if name in ("xs", "conv_states")}
    some |= {name: given[name][:2].double() for name in per_sequence}
    some["weights"] = [w.double() for w in given["weights"]]
    some |= {name: given[name].double() for name in ("A_log", "dt_bias", "norm_weight")}
    true_y, _, true_state = decode_kda_reference(**some, **OPTIONS)
    plain_error, state_error = relative_error(y[:2], true_y), relative_error(state[:2], true_state)
    right = {"torch"}
    for name, function in functions.items():
        # The step alone is the other one's without its surroundings.
        if name not in ("ours", "torch", "fla step alone"):
            error = relative_error(function()[:2], true_y) / plain_error
            if error <= OTHERS:
                right |= {name, "fla step alone"}
            else:
                print(f"KDA decode: {name} is left out, error {error:.2f} times that of torch")
    error = relative_error(functions["ours"]()[:2], true_y) / plain_error
    error = max(error, relative_error(given["state"][:2], true_state) / max(state_error, EXACT))
    if not error <= OURS:
        raise SystemExit(f"KDA decode: error {error:.2f} times that of torch")
    return right | {"ours"}, error


def rows(quick: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    found = []
    for B in (1, 32) if quick else (1, 8, 32, 128):
        given = inputs(B)
        functions = {"ours": ours(given), "torch": definition(given)}
        try:
            functions |= fla(given)
        except ImportError:
            print("KDA decode: flash-linear-attention is not installed")
        right, error = verified(given, functions)
        replays = {name: captured(function) for name, function in functions.items() if name in right}
        state_bytes, stream_bytes = 2 * given["state"].nbytes, 2 * B * H * (3 * K + 3 * V + 2 * (W - 1) * (2 * K + V))
        weight_bytes = sum(w.nbytes for w in given["weights"])
        floor = floor_ms(0, state_bytes + stream_bytes + weight_bytes)
        times = samples_ms(replays, 12 if quick else 30)
        found.append(row("KDA decode step", f"B={B}", times, floor, None, error))
    return found
