"""What Triton makes of the fused kernels, without a GPU: compiled for targets and read as PTX."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import json, re, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from quantkit.kernels.fused.blocks import *
from quantkit.kernels.fused.dense import dequantize
from quantkit.kernels.fused.launch import constants
from quantkit.kernels.fused.layout import geometry
from quantkit.kernels.fused.tilings import shared_memory, skinny_tile, tiled_tile
from quantkit.kernels.fused.skinny import skinny
from quantkit.kernels.fused.tiled import tiled
from quantkit.packing.schemes import scheme

kernel, name, capability, m = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
amd = capability == 942
target = GPUTarget("hip", "gfx942", 64) if amd else GPUTarget("cuda", capability, 32)
shared = {80: 163, 89: 99, 942: 64}.get(capability, 227) << 10
half = 1.0 if kernel == "halves" else None
lane = "fp16" if half else "bf16"
n, k, row = 4096, 4096, scheme(name)
dtype = torch.float16 if half else torch.bfloat16
shape = geometry(n, k, row, dtype)
known = dict(constants(n, k, row, dtype, not amd))
if kernel == "skinny":
    tile, function, warps, stages = skinny_tile(shape, m), skinny, 4, 1
    known |= dict(W=4, NG=tile.columns // shape.dot, R=1, BM=8 if m <= 8 else 16, AHEAD=tile.ahead)
    known |= dict(PDL=capability == 90)
elif kernel == "dense":
    function, warps, stages = dequantize, 4, 1
    known |= dict(C=max(128 // shape.span, 1), W=4)
else:
    tile, function = tiled_tile(shape, m, shared), tiled
    warps, stages = tile.warps, tile.stages
    known |= dict(RT=tile.row_tiles, BM=tile.m, SPLIT=1, WAIT=not amd, STAGES=stages, RASTER=8, HALF=half)
known |= dict(HAS_BIAS=True) if kernel != "dense" else {}
scale = "*i8" if row.scale_dtype.itemsize == 1 and not shape.on_weights else "*bf16"
types = dict(codes="*i16", scale=scale, zero="*bf16", factor="*fp32", lut="*fp32")
types |= dict.fromkeys(("x", "bias", "y", "out"), f"*{lane}") | dict.fromkeys(("M", "first", "N"), "i32")
types = {key: types[key] for key in function.arg_names if key in types} | {key: "constexpr" for key in known}
pointers = [i for i, key in enumerate(function.arg_names) if types[key][0] == "*"]
aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
options = dict(num_warps=warps, num_stages=stages) | (dict(launch_pdl=True) if known.get("PDL") else {})
built = triton.compile(ASTSource(function, types, known, aligned), target=target, options=options)
ptx = built.asm["amdgcn" if amd else "ptx"]
count = lambda pattern: len(re.findall(pattern, ptx))
print(json.dumps(dict(
    loads=sorted(set(re.findall(r"ld\\.global\\.v4|cp\\.async\\.cg", ptx))),
    products=count(r"mma\\.sync|mma_async|tcgen05\\.mma|v_mfma"),
    in_flight=[int(w) for w in re.findall(r"wgmma\\.wait_group\\S* (\\d+)", ptx)],
    shuffles=count(r"shfl\\.sync"), stores=count(r"st\\.shared"),
    sums=sorted(set(re.findall(r"mma\\.sync\\.aligned\\.m16n8k16\\.row\\.col\\.(\\w+)\\.f16\\.f16", ptx))),
    halves=count(r"wgmma.mma_async\\S*\\.f16\\.f16\\.f16"),
    shared=built.metadata.shared,
    bound=shared_memory(tile, shape) if kernel == "tiled" else None,
)))
"""


def compiled(*arguments: object) -> dict[str, object]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, *map(str, arguments)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("name", ["int4", "int7", "nvfp4", "fp8"])
@pytest.mark.parametrize("capability", [80, 90])
def test_few_rows_need_no_shared_memory_before_the_last_sum(name: str, capability: int) -> None:
    found = compiled("skinny", name, capability, 1)
    assert found["loads"] == ["ld.global.v4"]
    # The four warps' sums meet once; everything else stays where it was loaded.
    assert found["stores"] <= 16 and found["shuffles"] <= 16, found
    assert found["products"] > 0


@pytest.mark.parametrize(("name", "m"), [("int4", 64), ("int4", 128), ("int3", 32), ("nvfp4", 128)])
def test_tiles_wait_for_a_product_before_they_decode_the_next(name: str, m: int) -> None:
    """Triton would leave products in flight that read registers which the next weights are decoded into."""
    found = compiled("tiled", name, 90, m)
    assert found["products"] > 0
    assert found["in_flight"] and set(found["in_flight"]) == {0}
    assert found["shared"] <= found["bound"], found


def test_tiles_fit_a_consumer_gpu() -> None:
    found = compiled("tiled", "int7", 89, 128)
    assert found["products"] > 0
    assert found["shared"] <= 99 << 10


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
@pytest.mark.parametrize(("kernel", "capability"), [("skinny", 100), ("tiled", 100), ("dense", 942)])
def test_other_targets_compile(kernel: str, capability: int, name: str) -> None:
    """Blackwell, and AMD's MI300, which looks values up and then uses the library's product."""
    found = compiled(kernel, name, capability, 8)
    assert (found["products"] > 0) == (kernel != "dense")
    assert found["shared"] <= {100: 227, 942: 64}[capability] << 10


@pytest.mark.parametrize("capability", [80, 86, 89])
def test_float16_sums_are_what_consumer_gpus_multiply_at_full_rate(capability: int) -> None:
    assert compiled("halves", "int4", capability, 64)["sums"] == ["f16"]
