"""Gradients of keys, queries and the gate on Hopper: what the compiler makes of them, and against their definition in
float64.

Legend: M tokens, N chunks of 64, H heads, K = 128 channels.
"""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

K = 128
LOWER_BOUND = -5.0
# Of a bfloat16 or float16 result, which is rounded once, and of sums in fp32, whose terms have parts of 16 bits.
ROUNDING, SUMS = 1.05, 1e-5

COMPILE = """
import subprocess
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from kda.hopper_keys import SETTINGS, key_gradients_kernel

constants = dict(H=96, K=128)
types = dict(chunks="*i32", M="i32", lower_bound="fp32", **dict.fromkeys(("dq_in", "dk_in", "dk_out"), "*fp16"))
types |= dict.fromkeys(("q", "k", "f", "beta", "dq", "dk", "df"), "*" + sys.argv[1]) | dict(dscores="*bf16")
signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in key_gradients_kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if signature[n].startswith("*")}
source = GluonASTSource(key_gradients_kernel, signature, constants, aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=SETTINGS)
ptx, cubin = Path(sys.argv[2]) / "keys.ptx", Path(sys.argv[2]) / "keys.cubin"
ptx.write_text(compiled.asm["ptx"])
command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(cubin)]
subprocess.run(command, check=True)
print(compiled.metadata.shared)
print(subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)], capture_output=True, text=True).stdout)
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_warps_fit(dtype, tmp_path):
    """Four programs on a multiprocessor, whose products run beside the rest."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "torch-ext")
    command = [sys.executable, "-c", COMPILE, dtype, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "serialized" not in run.stderr
    assert int(re.search(r"Used (\d+) registers", run.stderr)[1]) <= 128
    assert int(re.search(r"(\d+) bytes stack frame", run.stderr)[1]) <= 96
    shared, _, sass = run.stdout.partition("\n")
    assert int(shared) <= 32 * 1024
    # Two copies, of which that for the ends of documents also masks.
    places = [line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/ .*;", line) and "NOP" not in line]
    assert len(places) <= 6300


def chunk_table(bounds):
    """[N, 2]: first token and tokens, and some without any."""
    rows = [[t, min(64, end - t)] for start, end in pairwise(bounds) for t in range(start, end, 64)]
    return [*rows, [0, 0], [0, 0]]


def given(bounds, H, dtype, device, f_mean=0.0, seed=0):
    """What the kernel gets, by name, of any size that is usual."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    def power(*shape):
        return torch.exp2(torch.randint(-3, 3, shape, generator=generator, device=device).float())

    M, chunks = bounds[-1], chunk_table(bounds)
    N = len(chunks)
    x = {name: draw(1, M, H, K).to(dtype) for name in ("q", "k")}
    x["f"] = (draw(1, M, H, K) + f_mean).to(dtype)
    x["beta"] = draw(1, M, H).to(dtype)
    x["A_log"], x["dt_bias"] = draw(H) / 4, draw(H, K) / 2 - 2
    z = x["f"][0].float() + x["dt_bias"]
    g = LOWER_BOUND * torch.sigmoid(x["A_log"].exp()[:, None] * z) / torch.tensor(2.0).log().item()
    x["sums"], x["quarters"] = torch.zeros(H, M, K, device=device), torch.ones(N, H, 4, K, device=device)
    x["dscores"] = torch.zeros(2, H, M, 64, device=device, dtype=torch.bfloat16)
    for n, (t, length) in enumerate(chunks):
        for start in range(0, length, 32):
            half = g[t + start : t + min(start + 32, length)].transpose(0, 1)
            running = half.cumsum(1)
            x["sums"][:, t + start : t + start + half.shape[1]] = running - half[:, :16].sum(1, keepdim=True)
            for i in range(2):
                x["quarters"][n, :, start // 16 + i] = half[:, 16 * i : 16 * i + 16].sum(1).exp2()
        x["dscores"][:, :, t : t + length] = draw(2, H, length, 64).tril(-1).bfloat16()
    for name in ("dq_in", "dk_in", "dk_out"):
        x[name] = draw(H, M, K).half()
    for name in ("q", "k"):
        x[f"{name}_rstds"] = torch.rsqrt(x[name][0].float().square().sum(-1) + 1e-6).T.contiguous()
    for name in ("own_scores", "q_dots", "k_dots"):
        x[name] = draw(H, M)
    x["dtotal"], x["ratios"] = draw(N, H, K), power(N, H, 4)
    x["chunks"] = torch.tensor(chunks, device=device, dtype=torch.int32)
    return x


def definition(x):
    """dq, dk, df [M, H, K] and shares of ddt_bias [N, H, K] and dA_log [N, H] in float64."""
    chunks, x = x["chunks"].tolist(), {name: value.double() for name, value in x.items()}
    N, H = len(chunks), x["q"].shape[2]
    dq, dk, df = (torch.zeros_like(x["q"][0]) for _ in range(3))
    ddt_bias, dA_log = dq.new_zeros(N, H, K), dq.new_zeros(N, H)
    rate, scale = x["A_log"].exp()[:, None, None], K**-0.5
    for n, (t, length) in enumerate(chunks):
        if length == 0:
            continue
        here = slice(t, t + length)
        q, k, f, beta = (x[name][0, here].transpose(0, 1) for name in ("q", "k", "f", "beta"))
        q_rstd, k_rstd, own, q_dot, k_dot = (
            x[name][:, here, None] for name in ("q_rstds", "k_rstds", "own_scores", "q_dots", "k_dots")
        )
        q, k, beta = q * q_rstd * scale, k * k_rstd, beta.sigmoid()[..., None]
        unit, q_ratio, in_ratio, out_ratio = (ratio[:, None, None] for ratio in x["ratios"][n].unbind(-1))
        # Sums of the log decay from the chunk's start.
        into1, out1, into2, out2 = (decay[:, None] for decay in x["quarters"][n].log2().unbind(1))
        first_half = (torch.arange(length, device=q.device) < 32)[:, None]
        G = x["sums"][:, here] + torch.where(first_half, into1, into1 + out1 + into2)
        decay = (G[:, :, None] - G[:, None]).clamp_max(0).exp2()
        dqk, dkk = (scores[:, here, :length, None] * decay for scores in x["dscores"])

        b_dq = (dqk * k[:, None]).sum(2) + G.exp2() * x["dq_in"][:, here] * q_ratio
        b_drow = beta * ((dkk * k[:, None]).sum(2) - G.exp2() * x["dk_in"][:, here] * in_ratio)
        b_dcolumn = (dqk * q[:, :, None]).sum(1) + (dkk * (k * beta)[:, :, None]).sum(1)
        b_dwrite = (into1 + out1 + into2 + out2 - G).exp2() * x["dk_out"][:, here] * out_ratio
        later, earlier = q * b_dq + k * (b_drow - b_dcolumn), k * b_dwrite
        b_dq = unit * scale * q_rstd * b_dq + own * scale * q_rstd * k - q * q_dot * q_rstd / scale
        b_dk = unit * k_rstd * (b_drow + b_dcolumn + b_dwrite) + own * k_rstd * q - k * k_dot * k_rstd
        dg = unit * (later.flip(1).cumsum(1).flip(1) + earlier.cumsum(1) - earlier) + x["dtotal"][n][:, None]
        z = f + x["dt_bias"][:, None]
        s = torch.sigmoid(rate * z)
        dz = dg * LOWER_BOUND * rate * s * (1 - s)
        dq[here], dk[here], df[here] = (y.transpose(0, 1) for y in (b_dq, b_dk, dz))
        ddt_bias[n], dA_log[n] = dz.sum(1), (dz * z).sum((1, 2))
    return dq, dk, df, ddt_bias, dA_log


def run(x):
    # Not at the top: without a GPU nothing else here needs what Gluon does.
    from kda.hopper_keys import key_gradients_on_hopper

    dq, dk, df = (torch.zeros_like(x["q"]) for _ in range(3))
    ddt_bias, dA_log = key_gradients_on_hopper(**x, dq=dq, dk=dk, df=df, lower_bound=LOWER_BOUND)
    return dq[0], dk[0], df[0], ddt_bias, dA_log.sum(2)


def relative(x, truth):
    return ((x.double() - truth).norm() / truth.norm()).item()


def check(results, truth, dtype):
    for name, result, true in zip(("dq", "dk", "df", "ddt_bias", "dA_log"), results, truth, strict=True):
        bound = ROUNDING * relative(true.to(dtype), true) if result.dtype == dtype else SUMS
        assert relative(result, true) <= bound, name


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
DOCUMENTS = [0, 0, 1, 65, 65, 128, 192, 300, 331]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 63, 64, 65, 130])
def test_lengths(T, dtype, device):
    x = given([0, T], 3, dtype, device)
    check(run(x), definition(x), dtype)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("f_mean", [-12.0, 0.0, 12.0])
def test_documents(f_mean, device):
    x = given(DOCUMENTS, 3, torch.bfloat16, device, f_mean)
    check(run(x), definition(x), torch.bfloat16)


@pytest.mark.gpu
@hopper
def test_what_is_not_a_number_stays_in_its_document(device):
    x = given(DOCUMENTS, 3, torch.bfloat16, device)
    clean = run(x)
    first, end = 65, 128
    for name in ("q", "k", "f", "beta", "sums", "dq_in", "dk_in", "dk_out", "q_rstds", "k_rstds"):
        x[name][:, first:end] = torch.nan
    x["dscores"][:, :, first:end] = torch.nan
    tokens = torch.ones(DOCUMENTS[-1], dtype=torch.bool, device=device)
    tokens[first:end] = False
    chunks = (x["chunks"][:, 0] != first) | (x["chunks"][:, 1] == 0)
    for i, (result, expected) in enumerate(zip(run(x), clean, strict=True)):
        others = tokens if i < 3 else chunks
        assert torch.equal(result[others], expected[others])
        assert result[~others].isnan().any()


@pytest.mark.gpu
@hopper
def test_runs_are_the_same_to_the_bit(device):
    x = given([0, 1000], 8, torch.bfloat16, device)
    for first, second in zip(run(x), run(x), strict=True):
        assert torch.equal(first, second)
