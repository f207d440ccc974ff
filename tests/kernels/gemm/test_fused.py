"""The fused kernels against the dequantized weight: in Triton's interpreter on a CPU, for real on a GPU."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from quantkit.errors import FormatError
from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.decode.decode_tiles import DecodeTile
from quantkit.kernels.gemm.dequantize import dequantize_launch
from quantkit.kernels.gemm.operands import Operands
from quantkit.kernels.gemm.portable import portable_gemm_launch, portable_gemv_launch
from quantkit.kernels.gemm.portable.portable_gemm_launch import (
    PortableGemmTile,
    portable_gemm_tile,
    shared_memory,
)
from quantkit.kernels.gemm.portable.portable_gemv_launch import PortableGemvTile, portable_gemv_tile
from quantkit.kernels.gemm.small_m import small_m_launch, small_m_tiles
from quantkit.kernels.gemm.small_m.small_m_tiles import SmallMTile
from quantkit.kernels.gemm.wgmma import wgmma_launch, wgmma_tiles
from quantkit.kernels.gemm.wgmma.wgmma_tiles import WgmmaTile
from quantkit.kernels.jit.building import building
from quantkit.kernels.layouts import fragment_layout
from quantkit.kernels.layouts.fragment_layout import (
    build,
    join,
    place_codes,
    place_words,
    repack_codes_reference,
    restore,
)
from quantkit.kernels.layouts.fragment_scales import fold_scales, lowered
from quantkit.kernels.layouts.geometry import geometry
from quantkit.kernels.ops import activation
from quantkit.kernels.problem import GPU_FEATURES, Outline, Problem, device_features
from quantkit.kernels.registry import choose, explain, grad_kernel, kernel_named, warn_unfused
from quantkit.packing.packings import PackingName
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.packing.zero_points import ZERO_POINTS, plain_storage

from ...support.compare import assert_close, assert_equal

tl = pytest.importorskip("triton.language")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Activations, and what kernels may use.
RUNS = [(torch.float32, frozenset[str]()), (torch.bfloat16, GPU_FEATURES)]
if DEVICE == "cuda":
    found = device_features("cuda")
    RUNS = [(d, some) for some in (found, found - {"ptx"}) for d in (torch.bfloat16, torch.float16)]
DTYPE, FEATURES = RUNS[0]
#: What `fused-wgmma` runs with.
HOPPER = next((run for run in RUNS if {"gluon", "wgmma"} <= run[1]), None)
needs_hopper = pytest.mark.skipif(HOPPER is None, reason="this GPU is not of compute capability 9.0")
#: Errors against the sum of magnitudes: roundings of the output, and of weights where they take the scales.
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}

e4m3 = torch.float8_e4m3fn
# A column scale is in x before any kernel sees it.
CASES = {
    **{name: {} for name in PRESETS if scheme(name).planes == 1 and not scheme(name).column_scale},
    **{
        f"int{bits} {zero}": {"zero_point": zero, "group_size": 64}
        for bits in (8, 4, 3)
        for zero in ("integer", "float")
    },
    "int4 e4m3": {"group_size": 32, "scale_dtype": e4m3},
    "int2 g16 e4m3": {"group_size": 16, "scale_dtype": e4m3},
    "int4 g16 fp32": {"group_size": 16, "scale_dtype": torch.float32},
    "nf4 g16": {"group_size": 16},
    "int4 g16 integer": {"group_size": 16, "zero_point": "integer"},
    "fp4 g64 e4m3": {"group_size": 64, "scale_dtype": e4m3},
    "fp6 g128 e4m3": {"group_size": 128, "scale_dtype": e4m3},
    "int3 channel": {"group_size": "channel"},
    "fp8 blocks": {"group_size": "16x32", "scale_dtype": torch.float32},
    "fp8 tensor": {"group_size": "tensor"},
    "int4 tensor": {"group_size": "tensor", "scale_dtype": torch.float16},
    "ternary tensor": {"group_size": "tensor", "scale_dtype": torch.float32},
    "ternary fp16": {"group_size": 96, "scale_dtype": torch.float16},
    "int4 g160 float": {"group_size": 160, "zero_point": "float"},
    "int5 fp32": {"group_size": 256, "scale_dtype": torch.float32},
}
HOPPER_TILES = (
    WgmmaTile(),
    WgmmaTile(64, stream_k=True, block_k=256),
    WgmmaTile(128, prefetch=2, stream_k=True),
    WgmmaTile(128, block_n=192, prefetch=2, stream_k=True),
    WgmmaTile(256, prefetch=2, stream_k=True),
    WgmmaTile(16, prefetch=2, stream_k=True),
    WgmmaTile(32, prefetch=2, block_k=256),
)
NARROW_TILES = (
    SmallMTile(8, split_k=2),
    SmallMTile(16, prefetch=4),
    SmallMTile(8, split_k=7, prefetch=4),
    SmallMTile(16, split_k=4),
    SmallMTile(8, split_k=2, wgmma=True),
    SmallMTile(16, prefetch=4, wgmma=True),
    SmallMTile(8, split_k=7, wgmma=True),
)
STREAM_TILES = (
    DecodeTile(8, prefetch=2, int8_mma=True),
    DecodeTile(8, prefetch=2),
    DecodeTile(4, occupancy=4, tiles_per_iter=2, prefetch=4, int8_mma=True),
    DecodeTile(16, occupancy=1, tiles_per_iter=2, prefetch=8),
)
each_case = pytest.mark.parametrize("case", CASES)
#: Cases that run in every tile, which takes the interpreter long and the compiler longer: each kind of codes,
#: scales and zeros.
WIDELY = {
    *("int8", "int4", "int3", "fp6", "binary", "nvfp4", "mxfp4", "int8 float", "int3 channel"),
    *("int4 g16 integer", "int4 e4m3"),
}


def operands(
    make: Callable[..., PackedTensor], case: str, n: int, k: int, m: int, dtype: torch.dtype
) -> tuple[Operands, PackedTensor]:
    packed = make(case.split(maxsplit=1)[0], (n, k), **CASES[case]).to(DEVICE)
    generator = torch.Generator().manual_seed(1)
    x, bias = (torch.randn(*size, generator=generator).to(DEVICE, dtype) for size in ((m, k), (n,)))
    return Operands(x, build(packed, dtype), bias, packed.scheme, n), packed


def is_gated(run: Callable[[Operands], torch.Tensor], op: Operands, *kinds: str) -> bool:
    """Whether `run` gives for gates, bit for bit, what each makes of its y."""
    halves = run(op).chunk(2, dim=1)
    return all(torch.equal(run(replace(op, gate=kind)), activation.gate(*halves, kind)) for kind in kinds)


def error(y: torch.Tensor, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor) -> float:
    """The largest error of an output against the sum of the magnitudes that it is the sum of."""
    weight, x, bias = packed.dequantize().double(), x.double(), bias.double()
    size = x.abs() @ weight.abs().T + bias.abs()
    return float(((y.double() - (x @ weight.T + bias)).abs() / size).max())


def assert_product(
    y: torch.Tensor,
    x: torch.Tensor,
    packed: PackedTensor,
    bias: torch.Tensor,
    limit: float,
    name: object = "",
) -> None:
    """Fail unless `error` is at most `limit`, and say where it is not."""
    weight, x, bias = packed.dequantize().double(), x.double(), bias.double()
    size = x.abs() @ weight.abs().T + bias.abs()
    assert_close(y.double(), x @ weight.T + bias, rtol=0, atol=limit * size, name=name)


def kernels(op: Operands, features: frozenset[str]) -> dict[str, Callable[[], torch.Tensor]]:
    """Every kernel that computes `op`, with the tile it would get and with others."""
    shape, m = op.shape, op.x.shape[0]
    least = max(shape.span, 128)
    found: dict[str, Callable[[], torch.Tensor]] = {
        "portable-gemm": lambda: portable_gemm_launch.run(op, portable_gemm_tile(shape, m), features),
        "portable-gemm small": lambda: portable_gemm_launch.run(
            op, PortableGemmTile(4, 16, stages=2), features
        ),
    }
    if shape.k_steps % 2 == 0:
        found["portable-gemm split"] = lambda: portable_gemm_launch.run(
            op, PortableGemmTile(4, 32, split_k=2, stages=2), features
        )
    if shape.span <= 128:
        found["portable-gemm chains"] = lambda: portable_gemm_launch.run(
            op, PortableGemmTile(4, 16, stages=2, accumulators=2), features
        )
    if {"gluon", "wgmma", "ptx"} <= features:
        problem = Problem(m, op.n, op.x.shape[1], op.scheme, op.x.dtype, "cuda", features)
        for tile in HOPPER_TILES if DEVICE == "cuda" or m > 16 else HOPPER_TILES[:1]:
            if wgmma_launch.TILE_SPACE.why_invalid(problem, tile) is None:
                found[f"wgmma {tile}"] = partial(wgmma_launch.run, op, tile, features)
        if m <= decode_launch.MOST_ROWS and op.x.shape[1] % 8 == 0:
            for streamed in STREAM_TILES:
                if decode_launch.TILE_SPACE.why_invalid(problem, streamed) is None:
                    found[f"decode {streamed}"] = partial(decode_launch.run, op, streamed, features)
        if m <= small_m_tiles.MOST_ROWS and op.x.shape[1] % 8 == 0:
            # Those of 16 warps take the interpreter twice as long; `test_small_m.py` has them too.
            for one in NARROW_TILES if DEVICE == "cuda" else NARROW_TILES[::2]:
                if small_m_launch.TILE_SPACE.why_invalid(problem, one) is None:
                    found[f"small-m {one}"] = partial(small_m_launch.run, op, one, features)
    if m <= 32:
        found["portable-gemv"] = lambda: portable_gemv_launch.run(op, portable_gemv_tile(shape, m), features)
        if op.x.itemsize == 2:
            present = PortableGemvTile(4, least, 1, predicate_x=True)
            found["portable-gemv present"] = lambda: portable_gemv_launch.run(op, present, features)
        together = PortableGemvTile(2, least, 1, one_accumulator=True)
        found["portable-gemv together"] = lambda: portable_gemv_launch.run(op, together, features)
        found["portable-gemv rows"] = lambda: portable_gemv_launch.run(
            op, PortableGemvTile(2, least, 2), features
        )
    # The interpreter takes long, and how steps follow each other is the same for any M.
    if m <= (8 if DEVICE == "cpu" else 32):
        found["portable-gemv ahead"] = lambda: portable_gemv_launch.run(
            op, PortableGemvTile(1, least, 1, True), features
        )
        found["portable-gemv loops"] = lambda: portable_gemv_launch.run(
            op, PortableGemvTile(1, least, 1, False, 2), features
        )
        found["portable-gemv ahead loops"] = lambda: portable_gemv_launch.run(
            op, PortableGemvTile(1, least, 1, True, 1), features
        )
    return found


def tried(case: str, found: dict[str, Callable[[], torch.Tensor]]) -> dict[str, Callable[[], torch.Tensor]]:
    """What of `kernels` runs: all, or only the tiles of the rules."""
    if case in WIDELY:
        return found
    return {
        name: run
        for name, run in found.items()
        if name
        in ("portable-gemm", "portable-gemv", f"wgmma {HOPPER_TILES[0]}", f"small-m {NARROW_TILES[0]}")
        or name in [f"decode {tile}" for tile in STREAM_TILES[:2]]
    }


@each_case
@pytest.mark.parametrize(
    "shape", [(40, 384, 3), (16, 200, 13), (1, 32, 1), (17, 288, 18), (17, 512, 18)], ids=str
)
@pytest.mark.sampled(5)
def test_kernels_multiply_with_the_dequantized_weight(
    make_packed: Callable[..., PackedTensor], poisoned: None, case: str, shape: tuple[int, int, int]
) -> None:
    n, k, m = shape
    for dtype, features in RUNS:
        op, packed = operands(make_packed, case, n, k, m, dtype)
        for name, run in tried(case, kernels(op, features)).items():
            y = run()
            assert_product(y, op.x, packed, op.bias, LIMIT[dtype], name)
            # On a CPU there is nothing that could run in another order.
            if DEVICE == "cuda":
                assert_equal(y, run(), name)


def test_kernels_read_a_kind_of_zero_point_that_is_only_a_row(
    make_packed: Callable[..., PackedTensor], poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One made up here: bytes, not packed. Kernels see its `kernel_dtype` alone."""
    storage = plain_storage(lambda scale_dtype: torch.int8)
    for dtype in (torch.float32, torch.bfloat16):
        kind = replace(ZERO_POINTS["integer"], suffix=" asym-byte", storage=storage, kernel_dtype=dtype)
        monkeypatch.setitem(ZERO_POINTS, "byte", kind)
        monkeypatch.setitem(CASES, "int4 byte", {"group_size": 64, "zero_point": "byte"})
        for x_dtype, features in RUNS:
            op, packed = operands(make_packed, "int4 byte", 17, 200, 3, x_dtype)
            zero = packed.part("zero_point")
            assert zero is not None and zero.dtype == torch.int8 and op.layout[2].dtype == dtype
            for name, run in tried("int4 byte", kernels(op, features)).items():
                assert_product(run(), op.x, packed, op.bias, LIMIT[x_dtype], name)


@pytest.mark.parametrize("m", [3, 21])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int4", {"group_size": 128}),
        ("int4", {"group_size": 384, "zero_point": "integer"}),
        ("int8", {"group_size": 128, "zero_point": "float"}),
        ("int4", {"group_size": 128, "scale_dtype": e4m3}),
        # Steps of 256 columns.
        ("int5", {"group_size": 256}),
        ("binary", {"group_size": 512}),
    ],
    ids=str,
)
def test_scales_of_whole_steps_multiply_sums(
    make_packed: Callable[..., PackedTensor],
    poisoned: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    m: int,
) -> None:
    """Where programs wait for each product, which the interpreter need not."""
    monkeypatch.setitem(CASES, f"{name} of sums", options)
    for dtype, features in RUNS:
        op, packed = operands(make_packed, f"{name} of sums", 40, 1030, m, dtype)
        for tile in (PortableGemmTile(4, 16, stages=2), PortableGemmTile(2, 32, stages=2)):
            y = portable_gemm_launch.run(op, tile, features | {"wgmma"} if DEVICE == "cpu" else features)
            assert_product(y, op.x, packed, op.bias, LIMIT[dtype], tile)


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("k", [5, 37, 256, 260, 391])
@pytest.mark.sampled(2)
def test_x_may_begin_and_end_anywhere(
    make_packed: Callable[..., PackedTensor], poisoned: None, k: int, first: int
) -> None:
    """Kernels copy 16 bytes of a row of x at a time, and blocks of it."""

    def x_at(op: Operands) -> Operands:
        memory = torch.full((op.x.numel() + first + 300,), math.nan, dtype=op.x.dtype, device=DEVICE)
        return replace(op, x=memory[first : first + op.x.numel()].view(op.x.shape).copy_(op.x))

    for name in ("int3 channel", "int4 tensor"):
        for dtype, features in RUNS:
            op, packed = operands(make_packed, name, 40, k, 7, dtype)
            op, steps = x_at(op), op.shape.k_steps
            found = [
                portable_gemv_launch.run(
                    op, PortableGemvTile(2, max(op.shape.span, 128), 1, predicate_x=True), features
                )
            ]
            for split in (one for one in (1, 2, 4) if steps % one == 0):
                found.append(
                    portable_gemm_launch.run(op, PortableGemmTile(4, 16, split_k=split, stages=2), features)
                )
            for y in found:
                assert_product(y, op.x, packed, op.bias, LIMIT[dtype])
        if HOPPER is not None:
            op, packed = operands(make_packed, name, 40, k, 19, HOPPER[0])
            y = wgmma_launch.run(x_at(op), WgmmaTile(64, prefetch=2, stream_k=True), HOPPER[1])
            assert_product(y, op.x, packed, op.bias, LIMIT[HOPPER[0]])


@each_case
@pytest.mark.sampled(2)
def test_dequantize_writes_the_weight(
    make_packed: Callable[..., PackedTensor], poisoned: None, case: str
) -> None:
    for n, k in ((40, 384), (1, 33), (130, 96)):
        for dtype, features in dict.fromkeys([*RUNS, *((torch.float32, some) for _, some in RUNS)]):
            op, packed = operands(make_packed, case, n, k, 1, dtype)
            blocks = [
                dequantize_launch.dequantize(op, k, at, min(at + 64, n), features) for at in range(0, n, 64)
            ]
            # A float zero-point is moved by the lowest value once, in float32.
            assert_close(
                torch.cat(blocks),
                packed.dequantize(dtype),
                rtol=2e-2 if dtype != torch.float32 else 1e-5,
                atol=1e-5,
            )


@pytest.mark.parametrize(
    "case", ["int8", "int4", "int3", "int7", "ternary", "binary", "fp6", "int4 integer", "mxfp4", "nvfp4"]
)
@pytest.mark.sampled(2)
def test_sums_of_powers_of_two_are_exact(make_packed: Callable[..., PackedTensor], case: str) -> None:
    """With integers and power-of-two scales every order of the additions gives the same float32."""
    n, k, m = 24, 512, 9 if DEVICE == "cuda" else 17
    options = {key: value for key, value in CASES[case].items() if key != "scale_dtype"}
    packed = make_packed(case.split(maxsplit=1)[0], (n, k), **options, exact=True).to(DEVICE)
    generator = torch.Generator().manual_seed(2)
    integers = torch.randint(-4, 5, (m, k), generator=generator)
    for dtype, features in dict.fromkeys([*RUNS, (torch.float16, RUNS[-1][1])]):
        x = integers.to(DEVICE, dtype)
        reference = (x.double() @ packed.dequantize().double().T).to(dtype)
        op = Operands(x, build(packed, dtype), None, packed.scheme, n)
        for name, run in kernels(op, features).items():
            assert_equal(run(), reference, name)


@needs_hopper
@pytest.mark.parametrize(
    "tile",
    [
        WgmmaTile(64, 128, 1, True, 256),
        WgmmaTile(128, 192, 2, True),
        WgmmaTile(128),
        WgmmaTile(16, prefetch=2),
    ],
    ids=str,
)
def test_programs_without_work_read_what_is_there(
    make_packed: Callable[..., PackedTensor], poisoned: None, tile: WgmmaTile
) -> None:
    """Eight tiles of rows of x, after which a program without work would begin with row -8 of the tiles."""
    assert HOPPER is not None
    dtype, features = HOPPER
    n, k = (256, 2048) if DEVICE == "cuda" else (128, 512)
    op, packed = operands(make_packed, "int4", n, k, 8 * tile.block_m, dtype)
    y = wgmma_launch.run(op, tile, features)
    assert_product(y, op.x, packed, op.bias, LIMIT[dtype])
    assert_equal(y, wgmma_launch.run(op, tile, features))


SHARED_OUT = (
    [(1024, 8192, 300), (128, 20480, 64), (2002, 3000, 600), (300, 1400, 200)]
    if DEVICE == "cuda"
    else [(256, 700, 250), (128, 1400, 64)]
)


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles are divided among as many programs as there are, as if it took no time to add parts up."""
    monkeypatch.setattr(wgmma_tiles, "FIXUP_US", dict.fromkeys(wgmma_tiles.FIXUP_US, 0.0))
    wgmma_launch._launches.cache_clear()
    yield
    wgmma_launch._launches.cache_clear()


@needs_hopper
@pytest.mark.usefixtures("many_parts")
@pytest.mark.parametrize(("n", "k", "m"), SHARED_OUT)
@pytest.mark.parametrize(
    "tile",
    [
        *(WgmmaTile(64, stream_k=True), WgmmaTile(128, 192, 2, True), WgmmaTile(256, stream_k=True)),
        *(WgmmaTile(16, stream_k=True), WgmmaTile(32, prefetch=2, stream_k=True)),
    ],
    ids=str,
)
@pytest.mark.sampled(5)
def test_parts_of_tiles_are_added_up_in_every_replay(
    make_packed: Callable[..., PackedTensor],
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    k: int,
    m: int,
    tile: WgmmaTile,
) -> None:
    """Replays follow each other with one token and memory, and another x. On a GPU up to 80 programs have a
    tile.
    """
    assert HOPPER is not None
    dtype, features = HOPPER
    if DEVICE == "cpu":
        # Of small tiles as many as of those of 64 rows of x, the last of which is not whole.
        m = min(m, 4 * tile.block_m - 6)
    op, packed = operands(make_packed, "int4", n, k, m, dtype)
    xs = op.x.clone(), op.x.flip(0)
    empty, sums = wgmma_launch.empty, []
    behind = 4 * tile.block_n * tile.block_m

    def filled(op: Operands, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if dtype is None:
            # Room for y.
            return empty(op, *sizes)
        (size,) = sizes
        sums.append(empty(op, size + behind, dtype=dtype).fill_(1.0))
        return sums[-1][:size]

    with monkeypatch.context() as patched:
        patched.setattr(wgmma_launch, "empty", filled)
        expected = [wgmma_launch.run(replace(op, x=x), tile, features) for x in xs]
    for x, y in zip(xs, expected, strict=True):
        assert_product(y, x, packed, op.bias, LIMIT[dtype])
    assert all(bool((one[-behind:] == 1.0).all()) for one in sums)
    mine = sums[0][:-behind]
    programs = mine.numel() // (tile.block_n * tile.block_m)
    said = mine[programs * tile.block_n * tile.block_m :].view(torch.int64)
    # Who had a part to leave had a word, which is taken back; the others' are as they were.
    assert said.numel() == programs * tile.block_n // 64
    assert bool((said == 0).any()) and bool((said < 1 << 62).all())
    for turn, y in enumerate(replays(monkeypatch, op, xs, tile, features)):
        assert_equal(y, expected[turn % 2])


def replays(
    monkeypatch: pytest.MonkeyPatch,
    op: Operands,
    xs: tuple[torch.Tensor, torch.Tensor],
    tile: WgmmaTile,
    features: frozenset[str],
) -> Iterator[torch.Tensor]:
    """What a graph with a launch gives for one x and the other, by turns; without a GPU what it would."""
    if DEVICE == "cpu":
        token, empty = wgmma_launch.launch_token(), wgmma_launch.empty
        memory = empty(op, 3 * 4 * tile.block_n * tile.block_m, dtype=torch.float32)

        def reused(op: Operands, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return empty(op, *sizes) if dtype is None else memory[: sizes[0]]

        monkeypatch.setattr(wgmma_launch, "launch_token", lambda: token)
        for turn in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(wgmma_launch, "empty", reused)
                yield wgmma_launch.run(replace(op, x=xs[turn % 2]), tile, features)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = wgmma_launch.run(op, tile, features)
    for turn in range(50):
        op.x.copy_(xs[turn % 2])
        captured.fill_(math.nan)
        graph.replay()
        graph.replay()
        yield captured.clone()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("case", ["int4", "nvfp4"])
def test_what_is_no_number_stays_in_its_row(
    make_packed: Callable[..., PackedTensor], case: str, value: float
) -> None:
    """As in the dense model, where also a weight of zero times infinity is none."""
    op, _ = operands(make_packed, case, 32, 256 if case == "int4" else 128, 5, DTYPE)
    clean = {name: run() for name, run in kernels(op, FEATURES).items()}
    op.x[2, 77] = value
    for name, run in kernels(op, FEATURES).items():
        y = run()
        assert not y[2].isfinite().any(), name
        others = [0, 1, 3, 4]
        assert_equal(y[others], clean[name][others], name)


@pytest.mark.parametrize("group_size", [16, 64])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_where_the_layout_says(bits: int, group_size: int) -> None:
    """The slow twin of both builders: one code at a time, from the module's description."""
    name = "binary" if bits == 1 else f"int{bits}"
    n, k = 20, 300
    shape = geometry(n, k, scheme(name, group_size=group_size), torch.bfloat16)
    codes = torch.randint(0, 2**bits, (n, k), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed, by_torch = (
        torch.full((3, shape.spans, shape.registers, 256), -1, dtype=torch.int16) for _ in "ab"
    )
    repack_codes_reference(by_torch, 1, codes, scheme(name).format, shape)
    packed = packed.to(DEVICE)
    place_codes(packed, 1, codes.to(DEVICE), scheme(name).format, shape)
    assert_equal(packed.cpu(), by_torch)
    assert (by_torch[0] == -1).all()
    packed = by_torch[1:]
    found = torch.zeros(n, k, dtype=torch.int64)
    for row in range(n):
        for column in range(k):
            span, within = divmod(column, shape.span)
            run, place = divmod(within, 32)
            p0, e1, t, e0 = place // 16, place // 8 % 2, place // 2 % 4, place % 2
            fragment, place = 2 * run + p0, (((row % 8 * 4 + t) * 2 + e1) * 2 + row % 16 // 8) * 2 + e0
            whole, words = 16 // bits, packed[row // 16, span, :, place].tolist()
            if fragment < whole * shape.registers:
                found[row, column] = words[fragment // whole] >> fragment % whole * bits & 2**bits - 1
                continue
            # What halfwords have left over, one after the other.
            left = [word >> at & 1 for word in words for at in range(whole * bits, 16)]
            start = (fragment - whole * shape.registers) * bits
            found[row, column] = sum(bit << i for i, bit in enumerate(left[start : start + bits]))
    assert_equal(found, codes.long())


#: Formats of every placement, of groups of 16 and not.
PLACED = {
    "binary": 64,
    **{f"int{bits}": 64 if bits % 3 else 16 for bits in range(2, 9)},
    "fp4": 32,
    "fp6": 128,
    "nvfp4": 16,
    "book4": 32,
}


@pytest.mark.parametrize("k", [333, 31])
@pytest.mark.parametrize("name", PLACED)
def test_all_builders_agree(name: str, k: int) -> None:
    """From codes by torch, from codes, and from the words that hold them; all in a tile of their own."""
    row = scheme(name, group_size=PLACED[name])
    shape = geometry(40, k, row, torch.bfloat16)
    codes = torch.randint(0, 2**row.format.bits, (40, k), dtype=torch.uint8)
    found = [
        torch.full((4, shape.spans, shape.registers, 256), -1, dtype=torch.int16, device=d)
        for d in ("cpu", DEVICE, DEVICE)
    ]
    repack_codes_reference(found[0], 1, codes, row.format, shape)
    place_codes(found[1], 1, codes.to(DEVICE), row.format, shape)
    place_words(found[2], 1, row.pack(codes).to(DEVICE), row.format, shape)
    assert_equal(found[0], found[1].cpu())
    assert_equal(found[0], found[2].cpu())
    assert (found[0][0] == -1).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [(40, 333), (1, 1), (16, 512), (130, 96)], ids=str)
def test_the_words_come_back(
    make_packed: Callable[..., PackedTensor],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    size: tuple[int, int],
) -> None:
    monkeypatch.setattr(fragment_layout, "WEIGHTS_AT_ONCE", 48 * 512)
    packed = make_packed(case.split(maxsplit=1)[0], size, **CASES[case]).to(DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        built = build(packed, dtype)
        words = restore(built, packed.scheme, packed.shape, packed.scale)
        assert words.is_contiguous()
        assert_equal(words, packed.words)


@pytest.mark.parametrize("k", [320, 333])
@pytest.mark.parametrize(("name", "packing"), [("ternary", "radix"), ("int3", "stream")])
def test_words_of_other_packings_come_back(name: str, packing: PackingName, k: int) -> None:
    row = scheme(name, packing=packing)
    codes = torch.randint(0, 3, (40, k), dtype=torch.uint8)
    scale = torch.rand(40, row.groups(k))
    packed = PackedTensor.from_codes(codes, scale, None, row).to(DEVICE)
    assert_equal(restore(build(packed, torch.bfloat16), row, packed.shape, packed.scale), packed.words)


def test_what_is_joined_can_be_restored_apart(make_packed: Callable[..., PackedTensor]) -> None:
    sizes = ((32, 256), (16, 256), (24, 256))
    packed = [make_packed("int3", size, seed=size[0]).to(DEVICE) for size in sizes]
    whole, parts = join(
        [build(one, torch.bfloat16) for one in packed],
        [n for n, _ in sizes],
        packed[0].scheme,
        256,
        torch.bfloat16,
    )
    for one, part in zip(packed, parts, strict=True):
        assert_equal(restore(part, one.scheme, one.shape, one.scale), one.words)
    together = restore(whole, packed[0].scheme, (72, 256), torch.cat([one.scale for one in packed]))
    assert_equal(together, torch.cat([one.words for one in packed]))


@pytest.mark.parametrize(
    "case", ["int4", "int3 integer", "int4 float", "fp8 tensor", "mxfp4", "nvfp4", "nf4"]
)
@pytest.mark.parametrize("k", [256, 144])
def test_joined_weights_multiply_as_each_does(
    make_packed: Callable[..., PackedTensor], case: str, k: int
) -> None:
    rows, m = (32, 16, 24), 3
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)
    name, options = case.split(maxsplit=1)[0], dict(CASES[case])
    packed = [make_packed(name, (n, k), **options, seed=n).to(DEVICE) for n in rows]
    # Factors that lie powers of two apart: those that are stored, or of the largest scales.
    for one, factor in zip(packed, (1.0, 4.0, 2.0), strict=True):
        if (part := one.part("global_scale")) is not None:
            part.mul_(factor)
        elif case == "mxfp4":
            one.scale.copy_((one.scale.float() / factor).to(one.scale.dtype))
    built = [build(one, x.dtype) for one in packed]
    if case in ("mxfp4", "nvfp4"):
        assert len({float(parts[3]) for parts in built}) == 3
    whole, parts = join(built, rows, packed[0].scheme, k, x.dtype)
    for n, one, part in zip(rows, packed, parts, strict=True):
        assert part[0].untyped_storage().data_ptr() == whole[0].untyped_storage().data_ptr()
        op = Operands(x, part, None, one.scheme, n)
        y = portable_gemv_launch.run(op, portable_gemv_tile(op.shape, m), FEATURES)
        assert_product(y, x, one, torch.zeros(n, device=DEVICE), LIMIT[x.dtype])
    op = Operands(x, whole, None, packed[0].scheme, sum(rows))
    y = portable_gemv_launch.run(op, portable_gemv_tile(op.shape, m), FEATURES)
    for one, part in zip(packed, torch.split(y, rows, dim=1), strict=True):
        assert_product(part, x, one, torch.zeros(one.shape[0], device=DEVICE), LIMIT[x.dtype])


def test_what_does_not_join(make_packed: Callable[..., PackedTensor]) -> None:
    def built(name: str, n: int, factor: float = 1.0) -> tuple[torch.Tensor, ...]:
        packed = make_packed(name, (n, 128))
        part = packed.part("global_scale")
        if part is not None:
            part.mul_(factor)
        return build(packed, torch.bfloat16)

    def joins(name: str, *weights: tuple[torch.Tensor, ...], rows: tuple[int, int] = (16, 16)) -> bool:
        return join(weights, rows, scheme(name), 128, torch.bfloat16) is not None

    assert not joins("int4", built("int4", 24), built("int4", 16), rows=(24, 16))
    assert joins("int4", built("int4", 16), built("int4", 24), rows=(16, 24))
    # A code book of its own; factors that are no powers of two apart, or too many of them.
    other = built("book4", 16)
    assert not joins("book4", built("book4", 16), (*other[:4], other[4] * 2))
    assert joins("nvfp4", built("nvfp4", 16), built("nvfp4", 16, 4.0))
    assert not joins("nvfp4", built("nvfp4", 16), built("nvfp4", 16, 1.5))
    assert joins("nvfp4", built("nvfp4", 16), built("nvfp4", 16, 2.0**10))
    assert not joins("nvfp4", built("nvfp4", 16), built("nvfp4", 16, 2.0**11))


def test_tiles_fit_every_weight() -> None:
    for name in PRESETS:
        for n in (1, 100, 5000, 30000):
            for k in (32, 1000, 4096, 28672):
                shape = geometry(n, k, scheme(name), torch.bfloat16)
                assert shape.spans * shape.span >= k
                for m in (1, 8, 9, 32, 33, 64, 128, 500):
                    for shared in (64 << 10, 99 << 10, 163 << 10, 227 << 10):
                        features = frozenset({"triton"}) if shared == 64 << 10 else GPU_FEATURES
                        chosen = portable_gemm_tile(shape, m, shared, features=features)
                        assert shape.k_steps % chosen.split_k == 0
                        assert shared_memory(chosen, shape, features) <= shared
                    tile = portable_gemv_tile(shape, m)
                    assert tile.columns % max(shape.span, 128) == 0


def test_a_group_longer_than_the_row_is_the_row() -> None:
    row = Scheme(scheme("int4").format, 128)
    dtype = torch.bfloat16
    assert geometry(16, 96, row, dtype) == geometry(16, 96, Scheme(scheme("int4").format, None), dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_every_scale_of_8_bits_is_read_as_stored(dtype: torch.dtype) -> None:
    fragment_layout = scheme("int4", group_size=32, scale_dtype=dtype).for_columns(32)
    stored = torch.arange(256, dtype=torch.uint8).view(dtype).view(256, 1)
    parts = {
        "packed": torch.full((256, 4), -1, dtype=torch.int32),  # int4 codes 15, value 7
        "scale": stored,
        "global_scale": torch.ones(1) if fragment_layout.global_scale else None,
    }
    packed = PackedTensor.from_parts(parts, fragment_layout, (256, 32)).to(DEVICE)
    with pytest.raises(FormatError, match="has scales that are NaN"):
        build(packed, DTYPE)
    numbers = stored.float()[:, 0].nan_to_num(0.0)
    stored.view(torch.uint8)[stored.float().isnan()] = 0
    packed = PackedTensor.from_parts(parts, fragment_layout, (256, 32)).to(DEVICE)
    if dtype == torch.float8_e8m0fnu:
        numbers[[0, 255]] = 0.0
    op = Operands(torch.zeros(1, 32, device=DEVICE), build(packed, DTYPE), None, fragment_layout, 256)
    for _, features in RUNS:
        weight = dequantize_launch.dequantize(op, 32, 0, 256, features)
        assert_equal(weight[:, 0].cpu(), numbers * 7)


@pytest.mark.parametrize(("name", "first"), [("nvfp4", 0), ("mxfp4", 0), ("mxfp4", 127), ("mxfp8", 100)])
def test_every_scale_of_weights_is_read_as_stored(poisoned: None, name: str, first: int) -> None:
    """Row m of x is 1 in group m, where all weights are 1 but for their scales."""
    row = scheme(name)
    assert row.group_size is not None
    bits = first + torch.arange(256, dtype=torch.uint8).view(16, 16) % (127 if name == "nvfp4" else 128)
    scale = bits.view(row.scale_dtype)
    codes = torch.full((16, 16 * row.group_size), row.format.values.index(1.0), dtype=torch.uint8)
    factor = torch.tensor([0.25]) if row.global_scale else None
    packed = PackedTensor.from_codes(codes, scale.float(), None, row, factor).to(DEVICE)
    for dtype, features in RUNS:
        if dtype == torch.float16:
            continue
        x = torch.eye(16, device=DEVICE).repeat_interleave(row.group_size, dim=1)
        x[:, torch.arange(x.shape[1]) % row.group_size != 3] = 0
        op = Operands(x.to(dtype), build(packed, dtype), None, row, 16)
        expected = packed.dequantize()[:, 3 :: row.group_size].T
        for kernel, run in kernels(op, features).items():
            assert_equal(run().float(), expected, (kernel, dtype))


def folded_values(stored: torch.Tensor, kind: str) -> torch.Tensor:
    """What bytes of a kind with a folded factor stand for, by `kernels/layouts/fragment_scales.py`."""
    number = stored.view(torch.uint8).int()
    bits = 0x7010 + (number << 4) if kind == "e5m3" else number << 7
    # 16 bits, of which those above 0x7FFF are negative.
    return ((bits + 0x8000) % 0x10000 - 0x8000).to(torch.int16).view(torch.bfloat16).double()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("binades", [1, 3, 10])
def test_scales_are_lowered_by_powers_of_two(name: str, binades: int) -> None:
    row = scheme(name)
    # 2^-127 of e8m0 is zero where the largest are as large as they may be.
    numbers = torch.arange(*((0, 127) if name == "nvfp4" else (1, 255)), dtype=torch.uint8)
    kind = geometry(16, 256, row, torch.bfloat16).scale_kind
    found = fold_scales(numbers.view(row.scale_dtype)[None, :, None])
    less = lowered(found.scale, kind, binades)
    assert less is not None
    values = numbers.view(row.scale_dtype).float()[None, :, None]
    assert_equal(folded_values(found.scale, kind), values.double() * found.unit)
    # The least of 255 binades are zero then.
    expected = torch.where(values.log2() >= binades - 126, values, 0.0) if name == "mxfp4" else values
    assert_equal(folded_values(less, kind), expected.double() * found.unit * 2.0**-binades)


def test_negative_scales_become_signs_of_codes(make_packed: Callable[..., PackedTensor]) -> None:
    packed = make_packed("nvfp4", (40, 200))
    packed.scale[3:30:2, 1] = -packed.scale[3:30:2, 1].float()
    stored = [part.clone() for part in packed.tensors]
    for dtype, features in RUNS:
        x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        op = Operands(x, build(packed.to(DEVICE), dtype), None, packed.scheme, 40)
        for name, run in kernels(op, features).items():
            bias = torch.zeros(40, device=DEVICE)
            assert_product(run(), x, packed.to(DEVICE), bias, LIMIT[dtype], name)
        words = restore(op.layout, packed.scheme, packed.shape, packed.scale.to(DEVICE))
        assert_equal(words.cpu(), packed.words)
    assert_equal(packed.tensors, stored)


def test_codes_that_are_no_numbers_are_refused(make_packed: Callable[..., PackedTensor]) -> None:
    packed = make_packed("ternary", (16, 128))
    packed.words[3, 2] |= 3
    with pytest.raises(FormatError, match="codes that stand for no number"):
        build(packed.to(DEVICE), DTYPE)


@pytest.mark.parametrize("name", ["ternary", "fp8-e4m3", "fp8-e5m2"])
def test_the_kernel_finds_codes_that_are_no_numbers(name: str) -> None:
    row = scheme(name)
    shape = geometry(40, 333, row, torch.bfloat16)
    values = row.format.values
    number = values.index(0.0)
    reserved = [code for code, value in enumerate(values) if math.isnan(value)]
    words = torch.empty(3, shape.spans, shape.registers, 256, dtype=torch.int16, device=DEVICE)
    for bad, at in ((None, 0), (reserved[0], 0), (reserved[-1], 40 * 333 - 1)):
        codes = torch.full((40, 333), number, dtype=torch.uint8)
        if bad is not None:
            codes.view(-1)[at] = bad
        for place, stored in ((place_codes, codes), (place_words, row.pack(codes))):
            found = torch.zeros(1, dtype=torch.int32, device=DEVICE)
            place(words, 0, stored.to(DEVICE), row.format, shape, found)
            assert int(found) == (bad is not None)


def test_weights_are_checked_together(make_packed: Callable[..., PackedTensor]) -> None:
    sound, bad = make_packed("ternary", (16, 128)).to(DEVICE), make_packed("mxfp4", (16, 128)).to(DEVICE)
    bad.scale.view(torch.uint8)[3, 1] = 255
    done = []
    with pytest.raises(FormatError, match="fp4-e2m1 g32 e8m0 weight has scales that are NaN"), building():
        build(bad, DTYPE)
        with building():
            build(sound, DTYPE)
        done.append("inner")
    assert done == ["inner"]
    # What failed once is forgotten, as is what never came to its end.
    with pytest.raises(ZeroDivisionError), building():
        build(bad, DTYPE)
        _ = 1 / 0
    with building():
        build(sound, DTYPE)


def test_refusals_name_the_reason() -> None:
    def reason(row: str, name: str = "int4", **given: Any) -> str | None:
        asked = {"m": 1, "k": 4096, "dtype": torch.bfloat16, "features": frozenset({"triton", "ptx"})} | given
        size = {"group_size": asked.pop("group_size")} if "group_size" in asked else {}
        found = Problem(scheme=scheme(name, **size), device="cuda", **{"n": 4096, **asked})
        return dict(explain(found))[row]

    assert reason("fused-portable-gemv") is None
    assert "up to 32 rows of x, not 33" in str(reason("fused-portable-gemv", m=33))
    assert "bfloat16 or float16 activations" in str(reason("fused-portable", dtype=torch.float32))
    assert reason("dequantize", dtype=torch.float32) is None
    assert "Triton is not installed" in str(reason("dequantize", features=frozenset()))
    assert "multiples of 32 columns, not of 48" in str(reason("dequantize", group_size=48))
    portable = frozenset({"triton"})
    for name in ("int4", "int8", "ternary", "fp6", "mxfp4", "nvfp4"):
        assert reason("fused-portable-gemv", name, features=portable) is None
        assert reason("fused-portable", name, m=64, features=portable) is None
    assert "tensor cores are busier in tiles from M=17 on" in str(
        reason("fused-portable-gemv", m=20, features=portable)
    )
    for name in ("nf4", "book4"):
        assert "look up every value" in str(reason("fused-portable-gemv", name, features=portable))
        assert "look up every value" in str(reason("fused-portable", name, m=64, features=portable))
        assert reason("dequantize", name, features=portable) is None
        assert reason("fused-portable-gemv", name) is None and reason("fused-portable", name, m=64) is None
    assert "sums of 2" in str(reason("fused-portable-gemv", "binary-residual"))
    assert "faster from M=257 on" in str(reason("fused-portable", m=300))
    assert reason("fused-portable-gemv", k=1 << 20) is None


@pytest.mark.parametrize(
    ("row", "m", "dtype"),
    [("fused-portable-gemv", 3, DTYPE), ("fused-portable", 20, DTYPE), ("dequantize", 5, torch.float32)],
)
def test_rows_launch_what_they_say(
    make_packed: Callable[..., PackedTensor],
    monkeypatch: pytest.MonkeyPatch,
    row: str,
    m: int,
    dtype: torch.dtype,
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    # Blocks of 16 rows, of which the last is not whole.
    monkeypatch.setattr(dequantize_launch, "AT_ONCE", 16 * 256)
    op, packed = operands(make_packed, "int4 integer", 40, 256, m, dtype)
    chosen = kernel_named(row)
    assert chosen.layout is not None
    asked = Problem(m, 40, 256, packed.scheme, dtype, "cuda", device_features("cuda"))
    tile = {} if chosen.tile_space is None else {"tile": chosen.tile_space.rule(asked)}
    assert op.bias is not None
    for bias in (op.bias, None, op.bias.repeat_interleave(2)[::2]):
        y = chosen.launch(op.x, packed, chosen.layout.build(packed, dtype), bias, **tile)
        assert_product(y, op.x, packed, torch.zeros_like(op.bias) if bias is None else bias, LIMIT[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "at_once"), [(1, 1 << 27), (19, 1 << 27), (19, 16 * 96)])
def test_the_gradient_of_x_is_g_times_the_weight(
    make_packed: Callable[..., PackedTensor],
    poisoned: None,
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    at_once: int,
    dtype: torch.dtype,
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    # Blocks of 16 rows, of which the last is not whole.
    monkeypatch.setattr(dequantize_launch, "AT_ONCE", at_once)
    _, packed = operands(make_packed, "int4 integer", 40, 96, m, dtype)
    problem = Problem(m, 40, 96, packed.scheme, dtype, "cuda", device_features("cuda"))
    kernel = grad_kernel(problem)
    assert kernel is not None and kernel.name == "dequantize" and kernel.grad_x is not None
    grad = torch.randn(m, 40, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)
    found = kernel.grad_x(grad, Outline(packed.scheme, (40, 96)), build(packed, dtype))
    weight = packed.dequantize().to(dtype).double()
    # Each product of a block of rows is rounded to `dtype`, and so is their sum.
    most = 2 * torch.finfo(dtype).eps * (grad.double().abs() @ weight.abs())
    assert (found.double() - grad.double() @ weight).abs().le(most + 1e-6).all()


@pytest.mark.fault(70)
def test_a_gpu_that_falls_back_says_so_once(
    make_packed: Callable[..., PackedTensor], caplog: pytest.LogCaptureFixture
) -> None:
    problem = Problem(
        1, 40, 960, scheme("int4", group_size=48), torch.bfloat16, "cuda", frozenset({"triton", "ptx"})
    )
    for _ in range(2):
        warn_unfused(problem, choose(problem).kernel)
    (record,) = caplog.records
    assert (
        "unpack; not fused-gemv: it takes groups of 16 or of multiples of 32 columns, not of 48"
        in record.message
    )
    warn_unfused(replace(problem, device="cpu"), kernel_named("unpack"))
    assert len(caplog.records) == 1
