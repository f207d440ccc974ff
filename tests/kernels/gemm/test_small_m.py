"""`fused-small-m`: what it waits for is needed, its tiles, and what it refuses."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from quantkit.kernels.gemm.gpu_limits import H200_PROCESSORS, HOPPER_SHARED
from quantkit.kernels.gemm.small_m import small_m_launch, small_m_tiles
from quantkit.kernels.gemm.small_m.small_m_tiles import SmallMTile
from quantkit.kernels.layouts.fragment_layout import build
from quantkit.kernels.layouts.geometry import geometry
from quantkit.kernels.layouts.shared_memory import USUAL_SHARED, shared_bytes
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem
from quantkit.kernels.registry import kernel_named
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.packing.zero_points import ZeroPoint

from ..conftest import GLUON
from ..gluon import interpreted, rewritten
from .test_fused import DEVICE, LIMIT, RUNS, assert_product, error, is_gated, operands

InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError
RUN = next((run for run in RUNS if {"gluon", "ptx"} <= run[1]), None)
pytestmark = pytest.mark.skipif(RUN is None, reason="no Gluon here")
KERNEL = "quantkit.kernels.gemm.small_m.small_m_kernel"
PRODUCT = "quantkit.kernels.gemm.small_m.small_m_product"
WITH_X = "quantkit.kernels.gluon.stage_x_shared"
H200 = Gpu("NVIDIA H200", (9, 0), H200_PROCESSORS, HOPPER_SHARED)
#: What is said in the kernel, or of x in shared memory, and what instead.
CHANGES = {
    "products wait for no copy": [("async_copy.wait_group(LATER)", "pass")],
    "products wait for the chunk before": [(" wait_for_x(CHUNKS - 1 - chunk", " wait_for_x(CHUNKS - chunk")],
    "rows of x are those of another block": [("row // BM * WIDE", "row // (2 * BM) * WIDE")],
    "who multiplies does not see what was copied": [("fence_async_shared()", "pass")],
    "the second half is the first again": [("x_smem.index(2 * at + 1)", "x_smem.index(2 * at)")],
    "the last product is not ended": [
        ("    if WGMMA:\n        total = wait_mma", "    if False:\n        total = wait_mma")
    ],
    "scales are held of two blocks too few": [
        ("block, BLOCKS, STAGED_BLOCKS, V, W", "block, BLOCKS, STAGED_BLOCKS - 2, V, W")
    ],
    "warps without rows write": [
        ("gl.expand_dims((local < 16 * ROW_TILES) & (number <= last), 1) & (rows < N)", "rows < N + 999")
    ],
    "codes are those of the unit before": [
        ("number + k_step + PREFETCH, end", "number + k_step + PREFETCH - 1, end")
    ],
    "scales are those of this chunk": [("gl.minimum(number + CHUNK, K_STEPS - CHUNK)", "number")],
    "x ends after its last column": [("chunk * (BLOCKS * WIDE) < K", "chunk * (BLOCKS * WIDE) < K + 64")],
}


def problem(m: int = 16, n: int = 4096, k: int = 4096, name: str = "int4") -> Problem:
    return Problem(m, n, k, scheme(name).for_columns(k), torch.bfloat16, "cuda", GPU_FEATURES, None, H200)


def multiply(
    make_packed: Callable[..., PackedTensor],
    name: str,
    tile: SmallMTile,
    k: int = 1400,
    m: int = 13,
    gpu: Gpu | None = None,
) -> float:
    assert RUN is not None
    dtype, features = RUN
    op, packed = operands(make_packed, name, 100, k, m, dtype)
    return error(small_m_launch.run(replace(op, gpu=gpu), tile, features), op.x, packed, op.bias)


@pytest.mark.skipif(DEVICE == "cuda", reason="what is copied may be there by chance")
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_kernel_says_is_needed(
    make_packed: Callable[..., PackedTensor], poisoned: None, tmp_path: Path, change: str
) -> None:
    assert RUN is not None
    paths = rewritten({name: GLUON[name] for name in (WITH_X, PRODUCT, KERNEL)}, CHANGES[change], tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, KERNEL, interpreted(GLUON | paths)[KERNEL])
        small_m_launch._launches.cache_clear()
        try:
            errors = [
                multiply(make_packed, name, tile, k)
                for name, tile, k in (
                    ("int4", SmallMTile(8), 1400),
                    ("nvfp4", SmallMTile(8, 2), 1408),
                    ("int4", SmallMTile(8, wgmma=True), 1400),
                )
            ]
        except InterpreterError:
            # Memory of others is written.
            return
        finally:
            small_m_launch._launches.cache_clear()
    assert not all(one < LIMIT[RUN[0]] for one in errors)


@pytest.mark.parametrize("wgmma", [False, True])
@pytest.mark.parametrize("tile", [SmallMTile(8), SmallMTile(16, 2, 4), SmallMTile(8, 7, 4)], ids=str)
@pytest.mark.parametrize(("k", "m"), [(2560, 9), (2184, 8)])
@pytest.mark.sampled(3)
def test_chunks_of_a_loop_are_those_of_a_line(
    make_packed: Callable[..., PackedTensor],
    poisoned: None,
    tile: SmallMTile,
    wgmma: bool,
    k: int,
    m: int,
) -> None:
    assert RUN is not None
    if wgmma and "wgmma" not in RUN[1]:
        pytest.skip("no `wgmma` here")
    tile = replace(tile, wgmma=wgmma)
    for name in ("int4", "int3", "nvfp4", "int4 float"):
        assert multiply(make_packed, name, tile, k, m) < LIMIT[RUN[0]], name


@pytest.mark.parametrize("tile", [SmallMTile(8), SmallMTile(16, 2, 4), SmallMTile(8, 2, wgmma=True)], ids=str)
def test_a_loop_without_room_for_scales_loads_them(
    make_packed: Callable[..., PackedTensor], poisoned: None, tile: SmallMTile
) -> None:
    assert RUN is not None
    if tile.wgmma and "wgmma" not in RUN[1]:
        pytest.skip("no `wgmma` here")
    for name in ("int4", "nvfp4", "int4 float"):
        row, k = scheme(name.split()[0]), 2 * 1056
        shape = geometry(100, k, row, RUN[0])
        found = small_m_tiles.plan_shared_memory(tile, shape, 9, row, HOPPER_SHARED)
        assert small_m_tiles.is_rolled(tile, shape) and found.stages_scales
        x = found.nbytes - small_m_tiles.staged_scale_bytes(tile, shape, row)
        small = replace(H200, shared_memory=(x + 512) * small_m_tiles.RESIDENT_WARPS // tile.warps)
        assert not small_m_tiles.plan_shared_memory(tile, shape, 9, row, small.shared_memory).stages_scales
        assert multiply(make_packed, name, tile, k, 9, small) < LIMIT[RUN[0]], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [None, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("zero", ["none", "integer", "float"])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_bytes_of_scales_are_those_of_the_layout(
    make_packed: Callable[..., PackedTensor],
    dtype: torch.dtype,
    stored: torch.dtype | None,
    zero: ZeroPoint,
    group: int,
) -> None:
    for name in ("int4", "fp4"):
        if name == "fp4" and zero != "none":
            continue
        packed = make_packed(name, (16, 2048), group_size=group, zero_point=zero, scale_dtype=stored)
        _, scales, zeros, *_ = build(packed, dtype)
        shape, tile = geometry(16, 2048, packed.scheme, dtype), SmallMTile(8)
        # All blocks of its one row tile.
        assert small_m_tiles.staged_scale_bytes(tile, shape, packed.scheme) == 8 * (
            scales.nbytes + zeros.nbytes
        )


@pytest.mark.parametrize("first", [1, 8])
def test_x_may_begin_anywhere(make_packed: Callable[..., PackedTensor], first: int) -> None:
    assert RUN is not None
    dtype, features = RUN
    op, packed = operands(make_packed, "int4", 40, 256, 12, dtype)
    memory = torch.zeros(12 * 256 + 8, dtype=dtype, device=DEVICE)
    x = memory[first : first + 12 * 256].view(12, 256).copy_(op.x)
    y = small_m_launch.run(replace(op, x=x), SmallMTile(8), features)
    assert_product(y, x, packed, op.bias, LIMIT[dtype])


@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize(("name", "warps"), [("int4", 16), ("int3 channel", 8), ("nvfp4", 8)])
@pytest.mark.parametrize(("n", "k", "m"), [(96, 264, 9), (1056, 128, 8)])
def test_products_that_are_gated_are_those_gated_next(
    make_packed: Callable[..., PackedTensor],
    poisoned: None,
    name: str,
    warps: int,
    kind: str,
    n: int,
    k: int,
    m: int,
) -> None:
    assert RUN is not None
    dtype, features = RUN
    op, _ = operands(make_packed, name, n, k, m, dtype)
    assert is_gated(partial(small_m_launch.run, tile=SmallMTile(warps), features=features), op, kind)


def test_y_is_gated_where_that_pays() -> None:
    row = kernel_named("fused-small-m")
    assert row.why_no_gate(problem(), SmallMTile()) is None
    for text, (one, tile) in {
        "halves of 4112 rows": (problem(n=4112), SmallMTile()),
        "below M=9": (problem(8), SmallMTile()),
        "split-K adds sums up in a launch of its own": (problem(), SmallMTile(8, 8)),
    }.items():
        reason = row.why_no_gate(one, tile)
        assert reason is not None and text in reason, reason


def test_programs_run_at_once_where_each_warp_has_rows_at_most() -> None:
    sizes = {"int4": (28672, 1), "int8": (4096, 8), "mxfp4": (6144, 4)}
    for name, (n, parts) in sizes.items():
        shape = geometry(n, 4096, scheme(name), torch.bfloat16)
        for warps in small_m_launch.VALUES["warps"]:
            tile = SmallMTile(warps, parts)
            mine = small_m_tiles.row_tiles(tile, shape, H200_PROCESSORS)
            programs = -(-shape.row_tiles // mine) * parts
            assert mine == warps or programs * warps <= H200_PROCESSORS * small_m_tiles.RESIDENT_WARPS
            count, chunk = small_m_tiles.k_steps(tile, shape)
            assert count % chunk == 0 and count * parts >= shape.k_steps


def test_rules_divide_the_columns_where_x_has_no_room() -> None:
    small = replace(H200, name="small", shared_memory=99 << 10)
    tile = small_m_launch.TILE_SPACE.rule(replace(problem(n=28672), gpu=small))
    assert small_m_launch.TILE_SPACE.why_invalid(replace(problem(n=28672), gpu=small), tile) is None
    assert tile.split_k > 1


def test_refusals_say_what_is_in_the_way() -> None:
    row = kernel_named("fused-small-m")
    said = {
        "up to 32 rows of x, not 33": problem(m=33),
        "4100 columns are no multiple of 8": problem(k=4100),
        "a Triton whose Gluon compiles": replace(problem(), features=GPU_FEATURES - {"gluon"}),
        "bfloat16 or float16": replace(problem(), dtype=torch.float32),
        "x takes 458752 bytes of shared memory with split-K 8": problem(m=32, k=8 * 7168),
    }
    for text, one in said.items():
        reason = row.why_unsupported(one)
        assert reason is not None and text in reason, reason
    assert row.why_unsupported(problem()) is None
    assert "one of 4, 8, 16, not 2" in str(small_m_launch.TILE_SPACE.why_invalid(problem(), SmallMTile(2)))
    assert "there are no 8 splits of 5 k_steps" in str(
        small_m_launch.TILE_SPACE.why_invalid(problem(k=640), SmallMTile(8, 8))
    )
    reason = str(small_m_launch.TILE_SPACE.why_invalid(problem(name="nf4"), SmallMTile(8)))
    assert "x and the values of codes take 163840 bytes of shared memory with split-K 1" in reason
    assert small_m_launch.TILE_SPACE.why_invalid(problem(name="nf4"), SmallMTile(16)) is None


def test_codes_of_many_bits_have_straight_code() -> None:
    shapes = {name: geometry(4096, 2048, scheme(name), torch.bfloat16) for name in ("int4", "int7")}
    assert {name: small_m_tiles.is_rolled(SmallMTile(), shape) for name, shape in shapes.items()} == {
        "int4": True,
        "int7": False,
    }


def test_without_wgmma_products_wait_for_each_other() -> None:
    """And few rows of x are too few for it to pay."""
    before = replace(problem(), features=GPU_FEATURES - {"wgmma"})
    assert (
        not small_m_launch.TILE_SPACE.rule(before).wgmma
        and not small_m_launch.TILE_SPACE.rule(problem(8)).wgmma
    )
    assert small_m_launch.TILE_SPACE.rule(problem(9)).wgmma
    assert "compute capability 9" in str(
        small_m_launch.TILE_SPACE.why_invalid(before, SmallMTile(wgmma=True))
    )


def test_scales_are_held_where_there_is_room() -> None:
    shape, tile = geometry(37888, 3584, scheme("nvfp4"), torch.bfloat16), SmallMTile(8)
    assert not small_m_tiles.plan_shared_memory(tile, shape, 16, scheme("nvfp4"), HOPPER_SHARED).stages_scales
    assert small_m_tiles.plan_shared_memory(tile, shape, 8, scheme("nvfp4"), HOPPER_SHARED).stages_scales
    small = small_m_tiles.plan_shared_memory(SmallMTile(16, 4), shape, 8, scheme("nvfp4"), HOPPER_SHARED)
    assert not small.stages_scales and not small_m_tiles.is_rolled(SmallMTile(16, 4), shape)


@pytest.mark.parametrize("name", ["nf4", "book4"])
@pytest.mark.parametrize(("k", "chunks", "spare"), [(512, 1, 0), (1024, 2, 2), (2040, 4, 0)])
def test_a_table_of_values_has_room_that_is_asked_for(
    make_packed: Callable[..., PackedTensor], poisoned: None, name: str, k: int, chunks: int, spare: int
) -> None:
    """Triton asks for more than 48 KB where it counts more, and does not count the table."""
    assert RUN is not None
    table, shape = shared_bytes(), geometry(100, k, scheme(name), RUN[0])
    room, tile = (
        partial(
            small_m_tiles.plan_shared_memory,
            SmallMTile(8),
            shape,
            16,
            scheme(name),
            HOPPER_SHARED,
            table=table,
        ),
        SmallMTile(8),
    )
    has, values = room(), small_m_tiles.staged_scale_bytes(tile, shape, scheme(name))
    assert has == small_m_tiles.SharedMemoryPlan(
        spare, k > 1024, (chunks + spare) * 512 * 16 * 2 + (values if k > 1024 else 0)
    )
    assert has.nbytes + table <= USUAL_SHARED or has.nbytes > USUAL_SHARED
    norm_bytes = small_m_tiles.rstd_bytes(16)
    with_norm = room(norm_bytes=norm_bytes).nbytes + norm_bytes
    assert with_norm + table <= USUAL_SHARED or with_norm > USUAL_SHARED
    assert multiply(make_packed, name, SmallMTile(8), k) < LIMIT[RUN[0]]
