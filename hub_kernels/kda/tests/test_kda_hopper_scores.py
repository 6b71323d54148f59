"""Gate and scores in one kernel for Hopper: what the compilers make of it, and its outputs against their definition and
the kernels of other devices.

Legend: B batch, T tokens, H heads, K key width, M = B * T tokens of all documents, N chunks.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kda.documents import chunk_tables
from kda.gate import gate_kernel
from kda.hopper_scores import LAUNCH, gate_and_scores_kernel
from kda.passes import GATE, SCORES
from kda.prepare import scores_kernel

K, BT, LIFT, LOWER_BOUND = 128, 64, 4096.0, -5.0
# In a process of its own: in this one Triton may be interpreting.
COMPILE = """
import re
import subprocess
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from kda.hopper_scores import LAUNCH, gate_and_scores_kernel

element, backward = sys.argv[1], sys.argv[2] == "backward"
constants = dict(H=96, K=128, BACKWARD=backward, **({} if backward else {"sums": None, "quarters": None}))
types = dict.fromkeys(("q", "k", "f"), f"*{element}") | dict.fromkeys(("q_in", "k_in", "k_out"), "*fp16")
types |= dict(attend="*fp16", keys="*fp16", chunks="*i32", lower_bound="fp32", M="i32")
signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in gate_and_scores_kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if signature[n].startswith("*")}
source = GluonASTSource(gate_and_scores_kernel, signature, constants, aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH)
ptx = Path(sys.argv[3]) / "scores.ptx"
ptx.write_text(compiled.asm["ptx"])
subprocess.run([triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", "/dev/null"], check=True)
print("shared", compiled.metadata.shared)
# Whole chunks come first, up to the first exit behind their products.
whole = []
for instruction in re.findall(r"^\\s+(?:@!?U?P\\w+ )?([A-Z][A-Z0-9_.]+)\\b.*;", compiled.asm["sass"], re.MULTILINE):
    whole.append(instruction)
    if instruction == "EXIT" and any(x.startswith("HGMMA") for x in whole):
        break
print("instructions", len(whole))
print("spilled", sum(x.split(".")[0] in ("STL", "LDL") for x in whole))
"""


@pytest.mark.parametrize("use", ["forward", "backward"])
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_three_programs_fit_a_multiprocessor(element, use, tmp_path):
    """By registers and shared memory; whole chunks store no registers away, and take few instructions."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "torch-ext")
    command = [sys.executable, "-c", COMPILE, element, use, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Used 168 registers" in run.stderr and "serialized" not in run.stderr
    found = dict(line.split() for line in run.stdout.splitlines())
    # A multiprocessor has 228 KiB, of which it keeps 1 KiB per program.
    assert 3 * (int(found["shared"]) + 1024) <= 228 * 1024
    assert int(found["spilled"]) == 0
    assert int(found["instructions"]) < 3200


def inputs(T, H, dtype, f_mean=0.0, device="cuda"):
    """q, k and f [1, T, H, K], A_log and dt_bias."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    q, k, f = draw(1, T, H, K).to(dtype), draw(1, T, H, K).to(dtype), (draw(1, T, H, K) + f_mean).to(dtype)
    return q, k, f, torch.rand(H, generator=generator, device=device).add(0.1).log(), draw(H, K) / 2 - 2


def run(given, chunks, hopper, backward=True):
    """Outputs by name, of the kernel for Hopper or of the others; what is not written is NaN."""
    q, k, f, A_log, dt_bias = given
    (_, M, H, _), N = q.shape, len(chunks)

    def new(*shape, dtype=torch.float32):
        return torch.full(shape, torch.nan, dtype=dtype, device=q.device)

    gates = {"sums": new(H, M, K), "quarters": new(N, H, 4, K)} if backward else {"sums": None, "quarters": None}
    scores = {name: new(H, M, K, dtype=torch.float16) for name in ("q_in", "k_in", "k_out")}
    scores |= {name: new(H, M, BT, dtype=torch.float16) for name in ("attend", "keys")}
    scores |= {"decay": new(N, H, K), "q_rstds": new(H, M), "k_rstds": new(H, M)}
    if hopper:
        gate_and_scores_kernel[(N * H,)](
            *given, chunks, *gates.values(), *scores.values(), LOWER_BOUND, M, H, K, BACKWARD=backward, **LAUNCH
        )
    else:
        gate_kernel[(N * H,)](
            f, A_log, dt_bias, chunks, *gates.values(), LOWER_BOUND, M, H, K, BOUNDED=True, NARROW=True, **GATE
        )
        scores_kernel[(N * H,)](
            q, k, *gates.values(), chunks, *scores.values(), M, H, K, 64, NARROW=True, EXACT=False, **SCORES
        )
    return gates | scores


def chunks_of(bounds, T, device):
    return chunk_tables(1, T, torch.tensor(bounds, dtype=torch.int32, device=device), torch.device(device))[1]


def definition(given, chunks):
    """The same in float64 for chunks [N, 2]; NaN where nothing is written."""
    q, k, f, A_log, dt_bias = given
    (_, M, H, _), N, device = q.shape, len(chunks), q.device
    q, k, f = (x[0].double().transpose(0, 1) for x in (q, k, f))
    new = {"q_in": K, "k_in": K, "k_out": K, "sums": K, "attend": BT, "keys": BT}
    y = {name: torch.full((H, M, D), torch.nan, dtype=torch.float64, device=device) for name, D in new.items()}
    y["q_rstds"], y["k_rstds"] = (x.square().sum(-1).add(1e-6).rsqrt() for x in (q, k))
    y["decay"] = torch.full((N, H, K), torch.nan, dtype=torch.float64, device=device)
    y["quarters"] = torch.full((N, H, 4, K), torch.nan, dtype=torch.float64, device=device)
    q, k = q * y["q_rstds"].unsqueeze(-1) * K**-0.5, k * y["k_rstds"].unsqueeze(-1)
    rate = A_log.double().exp().view(H, 1, 1)
    for n, (start, length) in enumerate(chunks.tolist()):
        if length == 0:
            continue
        here = slice(start, start + length)
        g = q.new_zeros(H, BT, K)
        g[:, :length] = LOWER_BOUND * torch.sigmoid(rate * (f[:, here] + dt_bias.double().unsqueeze(1)))
        G = torch.nn.functional.pad(g.cumsum(1), (0, 0, 1, 0))
        y["sums"][:, here] = torch.cat([G[:, 1:33] - G[:, 16:17], G[:, 33:] - G[:, 48:49]], 1)[:, :length]
        y["quarters"][n] = g.view(H, 4, 16, K).sum(2).exp()
        y["decay"][n] = G[:, -1].exp()
        G = G[:, 1 : length + 1]
        y["q_in"][:, here] = LIFT * q[:, here] * G.exp()
        y["k_in"][:, here] = LIFT * k[:, here] * G.exp()
        y["k_out"][:, here] = LIFT * k[:, here] * (G[:, -1:] - G).exp()
        for name, x, diagonal in (("attend", q, 0), ("keys", k, -1)):
            y[name][:, here] = 0
            # A row after the other: the decays of all pairs take much memory.
            for i in range(length):
                fade = (G[:, i : i + 1] - G[:, : i + 1 + diagonal]).exp()
                row = (x[:, start + i].unsqueeze(1) * fade * k[:, start : start + i + 1 + diagonal]).sum(-1)
                y[name][:, start + i, : i + 1 + diagonal] = row
    y["sums"] /= math.log(2)
    return y


CASES = {
    "one token": ([0, 1], 0.0),
    "less than a half": ([0, 31], 0.0),
    "a half and a token": ([0, 33], 0.0),
    "less than a chunk": ([0, 63], 0.0),
    "chunks": ([0, 192], 0.0),
    "packed": ([0, 0, 1, 65, 129, 129, 130, 177, 301, 301], 0.0),
    "fast": ([0, 200], 12.0),
    "slow": ([0, 200], -12.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_outputs(case, dtype):
    """Tokens of no document, which have NaN here, are left alone and reach no one."""
    bounds, f_mean = CASES[case]
    T, H = bounds[-1] + 9, 3
    given = inputs(T, H, dtype, f_mean)
    for x in given[:3]:
        x[:, bounds[-1] :] = torch.nan
    chunks = chunks_of(bounds, T, "cuda")
    ours, again, others = run(given, chunks, True), run(given, chunks, True), run(given, chunks, False)
    forward = run(given, chunks, True, backward=False)
    truth = definition(given, chunks)
    for name, true in truth.items():
        # Places in no document, and columns behind the end of a chunk, may hold anything.
        written = true.isfinite()
        if name not in ("decay", "quarters"):
            assert ours[name][:, bounds[-1] :].isnan().all(), name
        x, y, true = ours[name][written], others[name][written], true[written]
        assert x.isfinite().all(), name
        # Sums of log decays, of which each is about 1, may be zero.
        size = true.norm().clamp_min(1.0 if name == "sums" else 1e-30)
        error, other = ((z.double() - true).norm() / size for z in (x, y))
        assert error <= max(1.1 * other, 2e-5), f"{name}: {error:.1e}, the other kernels {other:.1e}"
        assert torch.equal(x, again[name][written]), name
        if forward[name] is not None:
            assert torch.equal(x, forward[name][written]), name


@pytest.mark.gpu
def test_other_documents_do_not_matter():
    """A document's outputs are the same bits whatever its neighbours hold, NaN included."""
    bounds = [0, 40, 140, 141, 300]
    chunks = chunks_of(bounds, 300, "cuda")
    given = inputs(300, 3, torch.bfloat16)
    ours = run(given, chunks, True)
    for x in given[:3]:
        x[:, :40] = torch.nan
        x[:, 140:] = torch.nan
    beside = run(given, chunks, True)
    for name in ("sums", "q_in", "k_in", "k_out", "attend", "keys", "q_rstds", "k_rstds"):
        assert torch.equal(beside[name][:, 40:140], ours[name][:, 40:140]), name
