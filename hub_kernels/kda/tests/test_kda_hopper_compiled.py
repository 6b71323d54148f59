"""What the compilers make of the serial part and the value gradients for Hopper; no GPU is needed for that.

Their values are checked by the tests of test_kda_chunk.py that are marked gpu.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: in this one Triton may be interpreting.
COMPILE = """
import subprocess
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from kda import hopper_recurrence, hopper_values

element, name, backward = sys.argv[1], sys.argv[2], sys.argv[3] == "backward"
kernel = getattr(hopper_values if name == "value_gradients_kernel" else hopper_recurrence, name)

def rows(element, width, height=64):
    return f"tensordesc<{element}[{height}, {width}],{hopper_recurrence.TILE.value}>"

types = dict.fromkeys(("v", "do"), rows(element, 128)) | dict.fromkeys(("k_in", "k_out", "q_in"), rows("fp16", 128))
types |= dict.fromkeys(("solve", "attend", "inverse"), rows("fp16", 64)) | dict(documents="*i32", chunks="*i32")
types |= dict.fromkeys(("values", "dvalues", "factors"), "*fp16") | dict.fromkeys(("o", "dv", "dbeta"), f"*{element}")
types |= dict.fromkeys(("states", "dstates"), rows("fp16", 128)) | dict(M="i32", H="i32", dscores="*bf16")
if name == "value_gradients_kernel":
    types |= dict.fromkeys(("states", "dstates"), rows("fp16", 128, 128))
    types |= dict.fromkeys(("values", "dvalues"), rows("fp16", 128))
    types |= dict.fromkeys(("attend", "keys", "dq_in", "dk_in", "dk_out"), "*fp16")
    constants = {}
else:
    constants = dict(HAS_INITIAL=True, HAS_FINAL=True)
    if name == "forward_kernel":
        unused = ("o", "q_in", "attend") if backward else ("states", "states_scale", "values", "values_scale")
        constants |= dict(BACKWARD=backward, **dict.fromkeys(unused))
signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if signature[n].startswith("*")}
source = GluonASTSource(kernel, signature, constants, aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
ptx = Path(sys.argv[4]) / "kernel.ptx"
ptx.write_text(compiled.asm["ptx"])
subprocess.run([triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", "/dev/null"], check=True)
print(compiled.metadata.shared)
"""
# Programs of a multiprocessor; bytes per thread that go to memory for lack of registers, as it is now.
KERNELS = {
    ("forward_kernel", "forward"): (1, 128),
    ("forward_kernel", "backward"): (1, 128),
    ("backward_kernel", "backward"): (1, 448),
    ("value_gradients_kernel", "backward"): (2, 128),
}


@pytest.mark.parametrize("element", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", KERNELS, ids=" ".join)
def test_fits_a_multiprocessor(kernel, element, tmp_path):
    """By shared memory; the assembler does not wait for every single product."""
    programs, spilled = KERNELS[kernel]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "torch-ext")
    command = [sys.executable, "-c", COMPILE, element, *kernel, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "serialized" not in run.stderr
    # A multiprocessor has 228 KiB, of which it keeps 1 KiB per program; a program has 227 at most.
    assert programs * (int(run.stdout.split()[-1]) + 1024) <= 228 * 1024
    stores = [line for line in run.stderr.splitlines() if "spill stores" in line]
    assert int(stores[0].split(",")[1].split()[0]) <= spilled
