"""What the compilers make of the products for Hopper; no GPU is needed for that."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: in this one Triton may be interpreting.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from latent_moe import expert_kernels, mlp

name = sys.argv[1]
kernel = getattr(expert_kernels, f"{name}_kernel")
tiles = dict(mlp._PACKED[name])
L, F, E = 3584, 3072, 56
sizes = {
    "gate_up": dict(S=16, L=L, F=F, ACTIVATION=0, FAST=True, ORDERED=True),
    "forward": dict(N=L, K=F),
    "backward": dict(S=16, N=L, K=F),
}[name]
options = {key: tiles.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in tiles}
constants = dict(E=E, BE=64, RANK=2, BR=16, PACKED=True, PTX=True, PRECISION="tf32", LOW_PRECISION="tf32")
constants |= sizes | tiles
words = "*i16" if name == "backward" else "*i32"
types = dict(
    weight=words, scale="*u8", slots="*i32", offsets="*i32", low="*fp32", factor="*fp32", R="i32", stride="i32",
    scaling="fp32", beta="fp32", linear_beta="fp32",
)
signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in kernel.arg_names}
aligned = {
    (i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if signature[n].startswith("*") or n == "stride"
}
source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


HOPPER = """
import subprocess
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from latent_moe import hopper
from latent_moe.hopper_kernels import product_kernel

forward, packed = sys.argv[1] == "forward", sys.argv[2] == "packed"

def described(element, block, swizzle, bits):
    return f"tensordesc<{element}{block},{gl.NVMMASharedLayout(swizzle, bits, len(block))}>"

if packed:
    element, bits, swizzle, block = ("i32", 32, 32, [1, 4, 2, 8, 8]) if forward else ("i16", 16, 32, [1, 64, 16])
else:
    element, bits, swizzle, block = "bf16", 16, 128, [1, 4, 2, 8, 64] if forward else [1, 64, 64]
constants = dict(
    N=3584, K=3072, FORWARD=forward, PACKED=packed, GATED=False, ORDERED=False, ACTIVATION=0, LOW=2, BM=64,
    STAGES=hopper.STAGES[packed], h=None, **({} if packed else {"scale": None}),
)
types = dict(
    x=described("bf16", [64, 64], 128, 16), weight=described(element, block, swizzle, bits),
    scale="*u8" if forward else "*i32", low=described("fp32", [64, 32], 128, 32), factor="*fp32", rank="i32", y="*bf16",
    tiles="*i32", stride="i32", scaling="fp32", beta="fp32", linear_beta="fp32",
)
signature = {n: "constexpr" if n in constants else types[n] for n in product_kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if signature[n].startswith("*")}
source = GluonASTSource(product_kernel, signature, constants, aligned)
ptx = Path(sys.argv[3]) / "product.ptx"
ptx.write_text(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])
subprocess.run([triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", "/dev/null"], check=True)
"""


@pytest.mark.parametrize("weights", ["packed", "float"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_products_for_hopper_run_beside_the_rest(direction, weights, tmp_path):
    """The assembler waits for every single product where it cannot tell that its registers are left alone."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "torch-ext")
    command = [sys.executable, "-c", HOPPER, direction, weights, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "registers" in run.stderr and "serialized" not in run.stderr
    assert " 0 bytes spill stores" in run.stderr


@pytest.mark.parametrize("name", ["gate_up", "forward", "backward"])
def test_products_end_before_their_registers_are_used_again(name):
    """Public report triton-lang/triton#9433: the words of the next tile came into registers that a product still read.

    So every turn of the loop waits for all products before it decodes.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "torch-ext")
    run = subprocess.run([sys.executable, "-c", COMPILE, name], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, product, _ = run.stdout.partition("wgmma.mma_async")
    assert product
    turn = re.split(r"^\$L__BB\d+_\d+:", before, flags=re.MULTILINE)[-1]
    # Four bits are moved into a bfloat16's places: the decoding.
    waits, decoding = turn.find("wgmma.wait_group.sync.aligned 0;"), turn.find("0x80008000")
    assert -1 < waits < decoding
