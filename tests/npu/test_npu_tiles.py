"""What kernels for Ascend hold at a time fits into a core, by Triton's own IR; and Triton-Ascend lowers them.

The second needs Triton-Ascend, which takes the place of triton: a folder of its own, and no card, and not CANN.

    pip install --no-deps --target /tmp/triton-ascend triton-ascend==3.2.0 pybind11
    LATENTMOE_TRITON_ASCEND_DIR=/tmp/triton-ascend pytest -m slow tests/npu/test_npu_tiles.py

That is its own half of the way, to operations on whole tiles and copies of them; CANN's compiler does the other half.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HUB_KERNELS = Path(__file__).resolve().parents[2] / "hub_kernels"
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ASCEND = os.environ.get("LATENTMOE_TRITON_ASCEND_DIR", "")
# Half of what a core of A2 and A3 holds: copies run ahead, for which Triton-Ascend takes every tile twice.
BUFFER = 192 * 1024 // 2

# In a process of its own: in this one Triton interprets, and has no IR. `lowered` is one of the two below.
COMPILE = """
import json, os, sys
import torch
torch._C._get_privateuse1_backend_name = lambda: "npu"
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from latent_moe import glu
from residual import gated_norm, mixture_ascend
from residual import gated_norm_kernels as norms, mixture_ascend_kernels as mixtures

FP32 = {"weight", "score", "stats_T2J", "factors_T3J", "dscore_PD", "dweight_P"}
NUMBERS = dict.fromkeys(["T", "F", "stride_g", "stride_u"], "i32")
NUMBERS |= dict.fromkeys(["eps", "beta", "linear_beta"], "fp32")

def compiled(kernel, constants, dtype):
    types = {n: NUMBERS.get(n, "*fp32" if n in FP32 else "*" + dtype) for n in kernel.arg_names}
    constants = {n: x for n, x in constants.items() if n in types}
    context = ir.context()
    ir.load_dialects(context)
    text = lowered(kernel, types, constants, context)
    print(json.dumps([kernel.__name__, dtype, constants, text]))

def compile_all(mixture_sizes):
    for dtype, J in mixture_sizes:
        size = 4 if dtype == "fp32" else 2
        constants = {"J": J, "BJ": 1 << (J - 1).bit_length(), "D": 7168, "BD": mixture_ascend.tile(J, 7168, size)}
        for name in ("fwd_cores", "factors", "bwd_cores"):
            compiled(getattr(mixtures, f"mixture_{name}_kernel"), constants, dtype)
    for dtype in ("fp32", "bf16"):
        for name, size in (("fwd_cores", gated_norm.FORWARD_BLOCK), ("bwd", gated_norm.BACKWARD_BLOCK)):
            BT, BK, _ = gated_norm._block(128, size)
            constants = {"K": 128, "BT": BT, "BK": BK, "STAGES": gated_norm.COPIES + 1}
            compiled(getattr(norms, f"gated_norm_{name}_kernel"), constants, dtype)
        constants = {"ACTIVATION": 2, "FAST": False, "BT": glu.BLOCK // glu.BLOCK_COLUMNS, "BF": glu.BLOCK_COLUMNS}
        for kernel in (glu.FORWARD, glu.BACKWARD):
            compiled(kernel, constants, dtype)
"""
TRITON = """
def lowered(kernel, types, constants, context):
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    options = backend.parse_options({})
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(backend.target, options, functions, backend.get_module_map(), context)
    return backend.make_ttir(module, {}, options, 90).str_nodebug()
"""
TRITON_ASCEND = """
from triton.backends.ascend import compiler

def lowered(kernel, types, constants, context):
    source = ASTSource(kernel, {n: x for n, x in types.items() if n not in constants}, constants)
    backend = make_backend(GPUTarget("npu", "Ascend910B3", 0))
    options = backend.parse_options({})
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": "", "target": backend.target, **options.__dict__}
    return compiler.ttir_to_linalg(compiler.make_ttir(module, metadata, options), metadata, options, named_ops=True)
"""


def compiled(lowered: str, mixtures: list[tuple[str, int]], folder: Path, cache: Path) -> dict[tuple[str, ...], str]:
    """Kernel, dtype and sizes -> IR of every kernel, as the variants for Ascend launch it."""
    packages = [str(HUB_KERNELS / name / "torch-ext") for name in ("residual", "latent_moe")]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder), *packages]), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", f"{COMPILE}{lowered}\ncompile_all(json.loads(sys.argv[1]))", json.dumps(mixtures)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = {tuple(map(str, kernel)): text for *kernel, text in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 3 * len(mixtures) + 8
    return found


BYTES = {"f32": 4, "bf16": 2, "i1": 1}
VALUE = re.compile(r'\s*%(\w+)(?::\d+)? = "?([\w.]+)')
TILE = re.compile(r"tensor<((?:\d+x)+)(!tt\.ptr<)?(\w+)")


def size_of(line: str, operation: str) -> int:
    """Bytes of the tile that a line of IR makes. Addresses are no tiles on Ascend, and neither are places in a row."""
    tiles = TILE.findall(line)
    if not tiles or (tiles[-1][1] and operation != "tt.load"):
        return 0
    dimensions, _, kind = tiles[-1]
    return torch.Size(map(int, dimensions[:-1].split("x"))).numel() * BYTES.get(kind, 0)


def alive(text: str) -> int:
    """The largest sum of bytes of tiles that are alive at a time: each from where it is made to where it is used last,
    through the whole of a loop that it enters, and loaded ones as long as the innermost loop around them lasts."""
    lines = text.splitlines()
    size, first, last, loads = {}, {}, {}, {}
    loops, scopes = [], []
    for at, line in enumerate(lines):
        last |= dict.fromkeys(re.findall(r"%(\w+)", line), at)
        if found := VALUE.match(line):
            name, operation = found.groups()
            if operation != "scf.for":
                size[name], first[name] = size_of(line, operation), at
            if operation == "tt.load":
                loads[name] = at
        if carried := re.search(r"iter_args\((.*?)\) -> \((.*?)\)", line):
            for name, kind in zip(re.findall(r"%(\w+) = ", carried[1]), carried[2].split(", "), strict=True):
                size[name], first[name] = size_of(kind, ""), at
        if line.rstrip().endswith(("{", "({")):
            scopes.append((at, "scf.for" in line))
        elif line.strip().startswith("}"):
            start, loop = scopes.pop()
            loops += [(start, at)] if loop else []
    for name, born in first.items():
        last[name] = max([last[name]] + [end for start, end in loops if born <= start <= last[name] <= end])
    for name, at in loads.items():
        if around := [(start, end) for start, end in loops if start < at < end]:
            first[name], last[name] = max(around)
    return max(sum(size[name] for name in size if first[name] <= at <= last[name]) for at in range(len(lines)))


# Those with the fullest buffers, and all.
MIXTURES = [("bf16", 2), ("bf16", 10)]
EVERY_MIXTURE = [(dtype, J) for dtype in ("fp32", "bf16") for J in range(1, 17)]
SLOW = pytest.param(EVERY_MIXTURE, marks=pytest.mark.slow)


@NEEDS_TRITON
@pytest.mark.parametrize("mixtures", [MIXTURES, SLOW], ids=["some", "all"])
def test_tiles_fit_into_a_core(mixtures: list[tuple[str, int]], tmp_path: Path) -> None:
    found = {kernel: alive(text) for kernel, text in compiled(TRITON, mixtures, tmp_path, tmp_path).items()}
    # The measure sees them: no kernel leaves much of it free.
    assert max(found.values()) > 0.9 * BUFFER
    assert not {kernel: used for kernel, used in found.items() if used > BUFFER}


@pytest.mark.slow
@pytest.mark.skipif(not ASCEND, reason="LATENTMOE_TRITON_ASCEND_DIR names no Triton-Ascend")
def test_triton_ascend_lowers_them(tmp_path: Path) -> None:
    """To copies of whole tiles, on vector cores, without arithmetic on addresses of single elements."""
    mixtures = [("fp32", 9), ("bf16", 1), ("bf16", 9), ("bf16", 16)]
    for kernel, text in compiled(TRITON_ASCEND, mixtures, Path(ASCEND), tmp_path).items():
        assert 'mix_mode = "aiv"' in text and "memref.copy" in text, kernel
        assert not re.search(r"tensor<(\d+x)+i(32|64)>", re.sub(r"tensor<(1|2|4|8|16)xi32>", "", text)), kernel


def test_bytes_that_are_alive() -> None:
    """What the test above counts with: here two tiles of 4 KB at most, three where the first is used once more."""
    text = """tt.func @f(%p: !tt.ptr<f32>) {
  %0 = tt.load %p : tensor<1024x!tt.ptr<f32>>
  %1 = arith.mulf %0, %0 : tensor<1024xf32>
  %2 = arith.addf %1, %1 : tensor<1024xf32>
  tt.store %p, %2 : tensor<1024x!tt.ptr<f32>>
}"""
    assert alive(text) == 2 * 4096
    assert alive(text.replace("tt.store %p, %2", "tt.store %0, %2")) == 3 * 4096
