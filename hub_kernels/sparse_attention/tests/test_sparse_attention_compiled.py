"""What the compiler makes of the kernels for Hopper; no GPU is needed for that."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: in this one Triton may be interpreting.
COMPILE = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from sparse_attention import attention, backward, backward_hopper, forward, forward_hopper

name = sys.argv[1]
T, N, L, V, k = 1000, 96, 576, 512, 2048
q = torch.empty(T, N, L, dtype=torch.bfloat16, device="meta")
index = torch.empty(T, k, dtype=torch.int32, device="meta")
launch = attention.Launch(q, index, V, N + L)
no_sink = dict(HAS_SINK=False, sink=None)
values = dict(launch.product, V=V, BV=launch.BV, **no_sink)
fused = dict(N=N, L=L, V=V, KS=k, **no_sink)
registers = dict(L=L, V=V, KS=k, KP=k)
kernel, constants, options = {
    "probabilities": (forward.probabilities_kernel, launch.scores, attention.PROBABILITIES),
    "values of 64": (forward.values_kernel, dict(values, FIRST=0, BN=64), attention.PRODUCT),
    "values of 32": (forward.values_kernel, dict(values, FIRST=64, BN=32), attention.PRODUCT),
    "shares": (backward.shares_kernel, dict(launch.scores, V=V), attention.SHARES),
    "query gradients": (
        backward.query_gradients_kernel, dict(launch.product, **launch.heads, V=V, BV=launch.BV, BR=64),
        attention.PRODUCT,
    ),
    "fused of 96": (forward_hopper.attention_kernel, dict(fused, GROUP=96), attention.FUSED),
    "fused of 64": (forward_hopper.attention_kernel, dict(fused, GROUP=64), attention.FUSED),
    "shares in registers, 96": (backward_hopper.shares_kernel, dict(registers, N=96), attention.FUSED),
    "shares in registers, 72": (backward_hopper.shares_kernel, dict(registers, N=72), attention.FUSED),
    "shares in registers, 64": (backward_hopper.shares_kernel, dict(registers, N=64), attention.FUSED),
}[name]
floats = ("maxima", "sums", "sink", "lse", "delta")
types = dict.fromkeys(floats, "*fp32") | dict(index="*i32", count="*i32", place="*i32", scale="fp32")
signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if signature[n].startswith("*")}
source = GluonASTSource if kernel.is_gluon() else triton.compiler.ASTSource
compiled = triton.compile(
    source(kernel, signature=signature, constexprs=constants, attrs=aligned), target=GPUTarget("cuda", 90, 32),
    options=options,
)
print(compiled.metadata.shared)
print(compiled.asm["sass"])
"""
KERNELS = (
    "probabilities",
    "values of 64",
    "values of 32",
    "shares",
    "query gradients",
    "fused of 96",
    "fused of 64",
    "shares in registers, 96",
    "shares in registers, 72",
    "shares in registers, 64",
)
# Kernels whose registers are all in use, which a descriptor computed too early drives into memory.
FULL = {"fused of 96"}
SHARED_BYTES = 227 * 1024
# Steps of products that hide the way of keys from memory into registers.
STEPS_AHEAD = 2


def undefined_registers(sass: str) -> dict[int, str]:
    """Uniform registers that an instruction reads before any defines them, with the first such instruction."""
    defined: set[int] = set()
    found: dict[int, str] = {}
    for line in sass.splitlines():
        instruction = re.search(r"(?:@!?U?P\w+ )?\b([A-Z][A-Z0-9_.x]+) (.*);", line)
        if instruction is None:
            continue
        name, operands = instruction.groups()
        written = None if name.startswith("UISETP") else re.match(r"UR(\d+)\b", operands.strip())
        rest = operands[written.end() :] if written else operands
        read = [int(r) for r in re.findall(r"(?<!gdesc\[)UR(\d+)", rest)]
        # A pair of descriptors is four registers; registers as the left operand take the place of the first descriptor.
        if pair := re.search(r"(R\d+, R\d+, )?gdesc\[UR(\d+)\]", rest):
            read += [int(pair[2]) + i for i in range(2 if pair[1] else 0, 4)]
        for register in read:
            if register not in defined:
                found.setdefault(register, line.strip())
        if written:
            first = int(written[1])
            defined |= {first, first + 1} if ".64" in name or ".WIDE" in name else {first}
    return found


def products_ahead(sass: str) -> list[int]:
    """For each load of 16 bytes in the only loop, products between it and what first reads its registers."""
    before, body = re.split(r"^\.?L\w+:$", sass, maxsplit=1, flags=re.MULTILINE)
    assert "HGMMA" in body and "HGMMA" not in before
    code = [found[1] for line in body.splitlines() if (found := re.search(r"\t(.*);", line))]
    ahead = []
    for i, instruction in enumerate(code):
        if load := re.match(r"LDG\.E\.128 R(\d+)", instruction):
            loaded = {f"R{int(load[1]) + j}" for j in range(4)}
            read = (j for j, x in enumerate(code[i + 1 :]) if loaded & set(re.findall(r"(?<!U)R\d+", x)))
            ahead.append(sum("HGMMA" in x for x in code[i : i + 1 + next(read)]))
    return ahead


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_products_read_what_was_computed(name):
    """The tensor cores are used, shared memory suffices, and no descriptor is made of a register that nothing set."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "torch-ext")
    run = subprocess.run([sys.executable, "-c", COMPILE, name], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    shared, sass = run.stdout.split("\n", 1)
    assert int(shared) <= SHARED_BYTES
    assert "HGMMA" in sass and not re.search(r"\bHMMA\b", sass)
    assert undefined_registers(sass) == {}
    assert name not in FULL or len(re.findall(r"\bLDL\b", sass)) <= 16
    if name.startswith("shares in registers"):
        per_step = 8 if name.endswith("64") else 16
        assert min(products_ahead(sass)) >= STEPS_AHEAD * per_step
        assert not re.findall(r"\bLDL\b", sass)
