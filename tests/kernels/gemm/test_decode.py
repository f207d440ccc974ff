"""`fused-gemv`: integers and digits, what it waits for and says, its tiles, and what it refuses."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.kernels.gemm.decode import decode_launch, decode_tiles
from quantkit.kernels.gemm.decode.decode_tiles import DecodeTile
from quantkit.kernels.gemm.gpu_limits import H200_PROCESSORS, HOPPER_SHARED
from quantkit.kernels.gemm.operands import GemmSpec, Operands
from quantkit.kernels.layouts.dequant_expressions import fragments_per_span, placement
from quantkit.kernels.layouts.dequant_ptx import shared_table
from quantkit.kernels.layouts.fragment_layout import build
from quantkit.kernels.layouts.int8_codes import as_bytes, byte_expression
from quantkit.kernels.layouts.shared_memory import low_fragments, shared_bytes
from quantkit.kernels.ops.norm import (
    NORM_REFERENCES,
    NORMS,
)
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Normed, Problem
from quantkit.kernels.registry import kernel_named
from quantkit.packing.activations import ActivationScheme, activations_named
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor

from ...support.compare import assert_equal
from .. import ptx
from ..conftest import GLUON
from .test_fused import CASES, DEVICE, LIMIT, RUNS, WIDELY, assert_product, error, is_gated, operands

np = pytest.importorskip("numpy")
InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError
RUN = next((run for run in RUNS if {"gluon", "ptx"} <= run[1]), None)
needs_gluon = pytest.mark.skipif(RUN is None, reason="no Gluon here")
KERNEL = "quantkit.kernels.gemm.decode.decode_kernel"
STAGE_X = "quantkit.kernels.gluon.stage_x_per_warp"
X_DIGITS = "quantkit.kernels.gluon.x_digits"
X_ROWS = "quantkit.kernels.gluon.x_rows"
EPILOGUE = "quantkit.kernels.gluon.epilogue"
SCALES = "quantkit.kernels.gluon.scales_registers"
H200 = Gpu("NVIDIA H200", (9, 0), H200_PROCESSORS, HOPPER_SHARED)
FORMATS = {name: scheme(name).format for name in CASES if name in PRESETS}
INTEGERS = [name for name, number_format in FORMATS.items() if as_bytes(number_format) is not None]
#: Cases that run in every shape, which takes the interpreter long: each way to values, scales and zeros.
ALL_SHAPES = WIDELY | {"fp8", "nf4", "ternary"}
#: What is said in the kernel, and what instead.
CHANGES: dict[str, tuple[str, str, str]] = {
    "x is not waited for": (STAGE_X, "async_copy.wait_group(0)", "pass"),
    "lanes keep words of 16 bytes": (X_ROWS, "selp.b32 $0, give0, own0, p1;", "mov.b32 $0, own0;"),
    "eight columns are those after them": (
        STAGE_X,
        "_axis_index(4, SIZES, LAYOUT) * 4",
        "_axis_index(4, SIZES, LAYOUT) * 4 + 4",
    ),
    "x ends after its last column": (STAGE_X, "& (column < S.k // 2)", "& (column < S.k // 2 + 8)"),
    "words are of neighbours": (
        STAGE_X,
        "gl.join(low, high), (0, 1, 3, 2)",
        "gl.join(low, high), (0, 1, 2, 3)",
    ),
    "x of digits ends after it": (STAGE_X, "(column < S.k // 2) & (mma_pair", "(column < S.k) & (mma_pair"),
    "bytes are those of runs next to each other": (STAGE_X, "+ HALF * (DISTANCE // 2)", "+ HALF"),
    "digits have other signs": (X_DIGITS, "xor.b32 $1, $1, 0x80808080;", ""),
    "units are too small": (X_DIGITS, "gl.maximum(most >> 23, 30)", "gl.maximum((most >> 23) - 4, 30)"),
    "codes are those of the unit before": (KERNEL, "k_step + S.prefetch, S)", "k_step, S)"),
    "codes of no unit are read": (KERNEL, "(k_step < S.total_k_steps) & (row_tile < count)", "row_tile >= 0"),
    "scales are those of the first block": (
        KERNEL,
        "(row_tile * S.blocks + block) * 8",
        "row_tile * S.blocks",
    ),
    "rows have each other's scales": (SCALES, "gl.join(gl.join(low, high)", "gl.join(gl.join(high, low)"),
    "weights have them": (SCALES, "gl.join(gl.join(low, low)", "gl.join(gl.join(high, low)"),
    "the last row tile is nobody's": (EPILOGUE, "gl.where(tile < count,", "gl.where(tile < count - 1,"),
    "copies of sums count": (KERNEL, "counts = gl.where(digit == 0, 1.0, 0.0)", "counts = 1.0 + 0.0 * digit"),
}


def problem(m: int = 1, n: int = 4096, k: int = 4096, name: str = "int4") -> Problem:
    return Problem(m, n, k, scheme(name).for_columns(k), torch.bfloat16, "cuda", GPU_FEATURES, None, H200)


def tiles(op: Operands, features: frozenset[str]) -> list[DecodeTile]:
    """Tiles of each kind, and those that fit."""
    m, k = op.x.shape
    asked = Problem(m, op.n, k, op.scheme, op.x.dtype, "cuda", features)
    all_of_them = [
        DecodeTile(8, 2, 1, 4),
        DecodeTile(4, 4, 2, 2),
        *([DecodeTile(16, 1, 2, 7), DecodeTile(8, 1, 1, 1)] if DEVICE == "cuda" else []),
    ]
    kinds = [replace(tile, int8_mma=kind) for kind in (True, False) for tile in all_of_them]
    return [tile for tile in kinds if decode_launch.TILE_SPACE.why_invalid(asked, tile) is None]


SHAPES = [(40, 1400, 1), (17, 2312, 2), (200, 640, 4), (16, 264, 7), (56, 520, 11)]


@needs_gluon
@pytest.mark.parametrize(
    ("case", "n", "k", "m"),
    [
        (case, *shape)
        for case in CASES
        # `test_fused.py` has all cases with 1, 3 and 13 rows of x.
        for shape in (SHAPES if DEVICE == "cuda" or case in ALL_SHAPES else (SHAPES[1], SHAPES[3]))
    ],
)
@pytest.mark.sampled(5)
def test_products_are_those_of_the_dequantized_weight(
    make_packed: Callable[..., PackedTensor], poisoned: None, case: str, n: int, k: int, m: int
) -> None:
    assert RUN is not None
    for dtype, features in [run for run in RUNS if {"gluon", "ptx"} <= run[1]]:
        op, packed = operands(make_packed, case, n, k, m, dtype)
        found = tiles(op, features)
        for tile in found if DEVICE == "cuda" else {tile.int8_mma: tile for tile in found}.values():
            y = decode_launch.run(op, tile, features)
            assert_product(y, op.x, packed, op.bias, LIMIT[dtype], tile)
            if DEVICE == "cuda":
                assert_equal(y, decode_launch.run(op, tile, features), tile)


@needs_gluon
@pytest.mark.parametrize(
    "case", ["int8", "int5", "int4", "int3", "int2", "ternary", "binary", "int4 integer"]
)
@pytest.mark.parametrize("m", [1, 2, 3, 8, 16])
@pytest.mark.sampled(5)
def test_sums_of_powers_of_two_are_exact(
    make_packed: Callable[..., PackedTensor], poisoned: None, case: str, m: int
) -> None:
    assert RUN is not None
    n, k = 24, 1024
    options = {key: value for key, value in CASES[case].items() if key != "scale_dtype"}
    packed = make_packed(case.split(maxsplit=1)[0], (n, k), **options, exact=True).to(DEVICE)
    integers = torch.randint(-4, 5, (m, k), generator=torch.Generator().manual_seed(2))
    for dtype in (RUN[0], torch.float16):
        x = integers.to(DEVICE, dtype)
        op = Operands(x, build(packed, dtype), None, packed.scheme, n)
        expected = (x.double() @ packed.dequantize().double().T).to(dtype)
        for tile in tiles(op, RUN[1]):
            assert_equal(decode_launch.run(op, tile, RUN[1]), expected, tile)


@needs_gluon
@pytest.mark.parametrize("spread", [0, 8, 30, 100])
def test_digits_are_x_to_a_part_of_the_largest(
    make_packed: Callable[..., PackedTensor], poisoned: None, spread: int
) -> None:
    """Exactly where magnitudes differ by up to 2^14, which leaves all eight digits of a bfloat16."""
    assert RUN is not None
    packed = make_packed("int8", (16, 512), exact=True).to(DEVICE)
    generator = torch.Generator().manual_seed(spread)
    x = torch.randn(2, 512, generator=generator) * torch.exp2(torch.randint(-spread, 1, (2, 512)).float())
    op = Operands(x.to(DEVICE, RUN[0]), build(packed, RUN[0]), None, packed.scheme, 16)
    weight = packed.dequantize().double()
    expected = op.x.double() @ weight.T
    y = decode_launch.run(op, DecodeTile(8, int8_mma=True), RUN[1]).double()
    unit = op.x.double().abs().amax(1, keepdim=True) * 2.0**-23
    rounding = expected.abs() * 2.0**-8 + (unit if spread > 14 else 0) * weight.abs().sum(1)
    assert ((y - expected).abs() <= rounding + 1e-30).all()


@needs_gluon
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("integers", [False, True])
def test_what_is_no_number_stays_in_its_row(
    make_packed: Callable[..., PackedTensor], integers: bool, value: float
) -> None:
    assert RUN is not None
    op, _ = operands(make_packed, "int4", 32, 256, 3, RUN[0])
    tile = DecodeTile(8, int8_mma=integers)
    clean = decode_launch.run(op, tile, RUN[1])
    op.x[2, 77] = value
    y = decode_launch.run(op, tile, RUN[1])
    assert not y[2].isfinite().any()
    assert_equal(y[:2], clean[:2])


@needs_gluon
@pytest.mark.parametrize("value", [0.0, 2.0**-126, 2.0**-133, 1e36])
def test_digits_have_units_for_every_float(make_packed: Callable[..., PackedTensor], value: float) -> None:
    """Rows of zeros, of floats without a leading bit, and of those that nearly overflow."""
    assert RUN is not None
    packed = make_packed("int4", (16, 256), exact=True).to(DEVICE)
    x = torch.zeros(1, 256, device=DEVICE, dtype=torch.bfloat16)
    x[0, 3] = value
    op = Operands(x, build(packed, torch.bfloat16), None, packed.scheme, 16)
    y = decode_launch.run(op, DecodeTile(8, int8_mma=True), RUN[1])
    expected = (x.double() @ packed.dequantize().double().T).to(torch.bfloat16)
    # Below 2^-118 x is rounded to multiples of that.
    assert ((y.double() - expected.double()).abs() <= (2.0**-115 if value < 1e-30 else 0.0)).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_bytes_are_codes_in_proportion_to_their_values(name: str) -> None:
    number_format = FORMATS[name]
    way = as_bytes(number_format)
    assert way is not None
    for code, value in enumerate(number_format.numbers):
        assert -128 <= way.of(code) <= 127
        assert way.of(code) * way.byte_scale == value


@pytest.mark.parametrize("distance", [1, 2, 4])
@pytest.mark.parametrize("name", INTEGERS)
def test_expressions_make_bytes_of_every_code_in_every_place(name: str, distance: int) -> None:
    number_format = FORMATS[name]
    count, fields = fragments_per_span(number_format.bits), placement(number_format)
    if 2 * distance > count:
        return
    way, made = as_bytes(number_format), byte_expression(number_format, distance)
    assert way is not None
    parts = 1 + max(field.register for in_fragment in fields for field in in_fragment)
    lows = low_fragments(count, distance)
    generator = np.random.default_rng(0)
    codes = generator.integers(0, len(number_format.numbers), (count, 2, 4096))
    halfwords = np.zeros((parts, 2, 4096), np.uint64)
    for fragment, in_fragment in enumerate(fields):
        for field in in_fragment:
            bits = codes[fragment].astype(np.uint64) >> np.uint64(field.first) & np.uint64(field.mask)
            halfwords[field.register] |= bits << np.uint64(field.at)
    words = [halfword[0] | halfword[1] << np.uint64(16) for halfword in halfwords]
    found = ptx.run(made.asm, words, len(lows), "")
    table = np.array([way.of(code) for code in range(len(number_format.numbers))])
    for low, register in zip(lows, found, strict=True):
        for half, (fragment, byte) in itertools.product((0, 1), ((low, 0), (low + distance, 1))):
            bits = register >> np.uint64(16 * half + 8 * byte) & np.uint64(255)
            assert np.array_equal(bits.astype(np.uint8).view(np.int8), table[codes[fragment][half]])
    assert set(lows) | {low + distance for low in lows} == set(range(count))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("warps", "copies"), [(4, 16), (4, 32), (16, 32)])
@pytest.mark.parametrize("of_fragments", [True, False])
def test_shared_tables_have_the_values_of_every_byte_in_every_place(
    dtype: str, warps: int, copies: int, of_fragments: bool
) -> None:
    made = shared_table(FORMATS["nf4"], dtype, warps, copies, of_fragments=of_fragments)
    assert made is not None and made.table is not None and made.fill is not None
    kind = "bf16x2" if dtype == "bfloat16" else "f16x2"
    values = np.array(FORMATS["nf4"].values)
    lanes = ptx.of_lanes(made.table, ptx.fill(made.fill, values))
    # All of 32 threads of each warp write it, and wait for each other.
    assert f"bar.sync 0, {32 * warps};" in made.fill
    assert made.fill.count("st.shared.v4") * 32 * warps * 16 == shared_bytes(copies)
    # In one bank each, and in two lanes' at most.
    assert set(Counter(lanes // 4 % 32).values()) == {32 // copies}
    rounded = ptx.as_register([values, values], kind) & np.uint64(0xFFFF)
    at = np.arange(256 * 4 * 4)
    # Each byte in each of four places, for registers of four in a halfword.
    words = (at // 16).astype(np.uint64) << np.uint64(8) * (at // 4 % 4).astype(np.uint64)
    found = ptx.run(made.asm, [words], 4, kind, lanes.astype(np.uint64))
    codes = [words >> np.uint64(4 * place) & np.uint64(15) for place in range(8)]
    # Places of codes: those of fragments 0 to 3 of the lower halfword, then of the upper one.
    pairs = (
        [(0, 1), (4, 5), (2, 3), (6, 7)]
        if of_fragments
        else [(fragment, fragment + 4) for fragment in range(4)]
    )
    for (low, high), register in zip(pairs, found, strict=True):
        assert np.array_equal(register, rounded[codes[low]] | rounded[codes[high]] << np.uint64(16))


def test_shared_tables_are_for_values_of_four_bits_that_are_looked_up() -> None:
    assert shared_table(FORMATS["int4"], "bfloat16", 8) is None
    assert shared_table(FORMATS["nf4"], "float32", 8) is None
    assert shared_table(scheme("book4").format, "float16", 8) is not None


def test_formats_without_bytes_are_multiplied_as_floats() -> None:
    assert set(INTEGERS) == {f"int{bits}" for bits in range(2, 9)} | {"ternary", "binary"}
    for name in ("fp8", "nf4", "mxfp4"):
        assert not decode_launch.TILE_SPACE.rule(problem(name=name)).int8_mma
        reason = decode_launch.TILE_SPACE.why_invalid(problem(name=name), DecodeTile(int8_mma=True))
        assert reason is not None and "no bytes in proportion" in reason
    for m, name in ((5, "up to 4 rows"), (1, "zero-points")):
        asked = problem(m)
        if m == 1:
            asked = replace(asked, scheme=scheme("int4", zero_point="integer").for_columns(4096))
        reason = decode_launch.TILE_SPACE.why_invalid(asked, DecodeTile(int8_mma=True))
        assert reason is not None and name in reason


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_in_groups_of_16_are_multiplied_as_floats(name: str) -> None:
    """A product of bytes has 32 columns, and so two scales."""
    of_16 = scheme(name, group_size=16).for_columns(4096)
    for m in (1, 2, 4):
        asked = replace(problem(m), scheme=of_16)
        assert not decode_launch.TILE_SPACE.rule(asked).int8_mma
        reason = decode_launch.TILE_SPACE.why_invalid(asked, DecodeTile(int8_mma=True))
        assert reason == "scales of 16 columns multiply weights, not sums"
        asked = replace(asked, scheme=scheme(name, group_size=32).for_columns(4096))
        assert decode_launch.TILE_SPACE.why_invalid(asked, DecodeTile(int8_mma=True)) is None


def test_values_of_a_shared_table_have_one_scale_per_32_columns() -> None:
    for group_size, expected in (
        (16, "values of nf4 in shared memory have one scale per 32 columns"),
        (32, None),
    ):
        asked = replace(problem(), scheme=scheme("nf4", group_size=group_size).for_columns(4096))
        assert decode_launch.TILE_SPACE.why_invalid(asked, DecodeTile()) == expected
        assert decode_launch.why_no_tile(asked) == expected


@needs_gluon
@pytest.mark.parametrize("warps", decode_launch.VALUES["warps"])
def test_x_is_read_where_it_was_written(warps: int) -> None:
    """The interpreter knows of no layouts."""
    from quantkit.kernels.gluon.smem_layouts import x_smem_layout

    for name, integers in (("int4", True), ("int4", False), ("int8", True), ("nf4", False), ("nvfp4", False)):
        for m, k in ((1, 1024), (1, 4096), (2, 4096), (3, 4096), (8, 1024), (16, 1024)):
            if m > 2 and integers:
                continue
            asked = scheme(name).for_columns(k)
            tile = DecodeTile(warps, 1, 1, 1, integers)
            known = decode_tiles.decode_config(GemmSpec(m, 64, k, asked, torch.bfloat16), tile, False, 4)
            sizes = [known.digit_shape] if integers else [known.float_shape] if m <= 8 else []
            sizes += [] if integers or known.as_vec4 else [known.x_shape]
            bases = x_smem_layout(known.vec4_shape, known).offset_bases
            read = [numbers_of(basis, known.vec4_shape) for basis in bases]
            for written in sizes:
                found = [numbers_of(basis, written) for basis in x_smem_layout(written, known).offset_bases]
                # Numbers of quads follow each other.
                numbers = [1 << bit for bit in range(len(read), len(found))]
                assert found == [*read, *numbers], (name, m, k, written)


def numbers_of(basis: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of an element of a tensor of `sizes`."""
    number = 0
    for at, size in zip(basis, sizes, strict=True):
        number = number * size + at
    return number


@needs_gluon
@pytest.mark.skipif(DEVICE == "cuda", reason="what is copied may be there by chance")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sampled(2)
def test_what_the_kernel_says_is_needed(
    make_packed: Callable[..., PackedTensor], poisoned: None, tmp_path: Path, change: str
) -> None:
    from ..gluon import interpreted, rewritten

    assert RUN is not None
    module, old, new = CHANGES[change]
    modules = interpreted(GLUON | rewritten({module: GLUON[module]}, [(old, new)], tmp_path))
    tile = DecodeTile(4, 1, 2, 2)
    with pytest.MonkeyPatch.context() as patched:
        for name in (STAGE_X, SCALES, KERNEL):
            patched.setitem(sys.modules, name, modules[name])
        decode_launch._launch.cache_clear()
        try:
            for name, kind in (
                ("int4", True),
                ("int3", True),
                ("int4", False),
                ("nvfp4", False),
                ("nf4", False),
            ):
                op, packed = operands(make_packed, name, 100, 1400 if name != "nvfp4" else 1408, 2, RUN[0])
                y = decode_launch.run(op, replace(tile, int8_mma=kind), RUN[1])
                if not error(y, op.x, packed, op.bias) < LIMIT[RUN[0]]:
                    return
        except InterpreterError:
            # Memory of others is read or written.
            return
        finally:
            decode_launch._launch.cache_clear()
    pytest.fail("all products are right")


@needs_gluon
@pytest.mark.parametrize("first", [1, 8])
def test_x_may_begin_anywhere(make_packed: Callable[..., PackedTensor], first: int) -> None:
    assert RUN is not None
    dtype, features = RUN
    op, packed = operands(make_packed, "int4", 40, 256, 2, dtype)
    memory = torch.zeros(2 * 256 + 8, dtype=dtype, device=DEVICE)
    x = memory[first : first + 2 * 256].view(2, 256).copy_(op.x)
    for integers in (True, False):
        y = decode_launch.run(replace(op, x=x), DecodeTile(int8_mma=integers), features)
        assert_product(y, x, packed, op.bias, LIMIT[dtype])


def test_a_turn_has_whole_rings() -> None:
    """Units that are loaded ahead have registers of their own, and row tiles memory."""
    shapes = [(28672, 4096), (4096, 14336), (1024, 4096), (3584, 18944), (57344, 8192), (300, 136)]
    for (n, k), name, m in itertools.product(shapes, ("int8", "int4", "int3", "nvfp4"), (1, 3)):
        asked = problem(m, n, k, name)
        shape = decode_launch.shape_of(asked)
        for values in itertools.product(*decode_launch.VALUES.values()):
            tile = DecodeTile(*values)
            if decode_launch.TILE_SPACE.why_invalid(asked, tile) is not None:
                continue
            found = decode_tiles.decode_config(
                GemmSpec(m, n, k, asked.scheme, asked.dtype), tile, True, H200_PROCESSORS
            )
            assert found.single_iter or found.k_steps_per_warp % found.prefetch == 0
            assert found.prefetch <= min(tile.prefetch, found.k_steps_per_warp)
            mine = decode_tiles.schedule_row_tiles(tile, shape, H200_PROCESSORS)
            assert found.single_iter == (mine.row_tiles <= tile.tiles_per_iter)
            assert found.k_steps_per_warp * tile.warps >= shape.k_steps == found.total_k_steps
            assert mine.row_tiles <= found.padded_row_tiles < 2 * mine.row_tiles
            assert mine.programs <= H200_PROCESSORS * tile.occupancy
            assert mine.programs * mine.per_program + mine.remainder == shape.row_tiles
            assert found.shared_memory * tile.occupancy <= HOPPER_SHARED


def test_rules_take_no_integers_where_they_have_no_room() -> None:
    small = replace(H200, name="small", shared_memory=60 << 10)
    for m in (1, 4):
        asked = replace(problem(m, k=14336), gpu=small)
        reason = decode_launch.why_no_tile(asked)
        assert (reason is None) == (m == 1), reason
    assert decode_launch.TILE_SPACE.rule(problem(1, k=14336)).int8_mma
    assert not decode_launch.TILE_SPACE.rule(replace(problem(1, k=14336), gpu=small)).int8_mma


def test_threads_of_more_warps_have_fewer_registers() -> None:
    tiles = [(4, 1), (8, 2), (16, 1), (8, 3), (8, 4), (16, 2)]
    assert [decode_launch.thread_registers(DecodeTile(*tile)) for tile in tiles] == [
        128,
        128,
        128,
        80,
        64,
        64,
    ]
    for tile in tiles:
        assert 32 * tile[0] * tile[1] * decode_launch.thread_registers(DecodeTile(*tile)) <= 1 << 16
    assert "has 32 such warps at once" in str(
        decode_launch.TILE_SPACE.why_invalid(problem(), DecodeTile(16, 3))
    )
    # Numbers of x of a norm: a quarter of the registers.
    assert decode_launch.why_no_norm(problem(4), DecodeTile(16, 1), "whole") is None
    assert "has registers for 16" in str(decode_launch.why_no_norm(problem(4), DecodeTile(16, 2), "whole"))


def test_refusals_say_what_is_in_the_way() -> None:
    row = kernel_named("fused-gemv")
    said = {
        "up to 16 rows of x, not 17": problem(17),
        "values of nf4 in shared memory are for up to 8 rows of x": problem(9, name="nf4"),
        "4100 columns are no multiple of 8": problem(k=4100),
        "a Triton whose Gluon compiles": replace(problem(), features=GPU_FEATURES - {"gluon"}),
        "bfloat16 or float16": replace(problem(), dtype=torch.float32),
        "x and sums take 278528 bytes of shared memory, of 232448": problem(8, k=14336),
        "sums take 393216 bytes of shared memory, of 232448": problem(16, n=28672),
    }
    for text, one in said.items():
        reason = row.why_unsupported(one)
        assert reason is not None and text in reason, reason
    assert row.why_unsupported(problem()) is None and row.why_unsupported(problem(16)) is None
    assert row.why_slower(problem(8)) is None and "from M=9 on" in str(row.why_slower(problem(9)))
    # Of small weights, which have too few row tiles for `fused-small-m`.
    assert row.why_slower(problem(16, n=1024)) is None and "from M=9 on" in str(
        row.why_slower(problem(16, n=1024, k=9216))
    )
    tile = DecodeTile(16, 1)
    assert "up to 8 rows of x, not for 9" in str(decode_launch.why_no_norm(problem(9, k=512), tile, "whole"))
    assert decode_launch.why_no_norm(problem(8, k=512), tile, "whole") is None


@needs_gluon
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("name", "integers"), [("int4", True), ("int3", True), ("int4", False), ("nf4", False)]
)
@pytest.mark.parametrize(("k", "m", "adds"), [(1400, 1, True), (264, 2, False), (640, 3, True)])
@pytest.mark.sampled(4)
def test_products_of_norms_are_those_of_what_is_normed_first(
    make_packed: Callable[..., PackedTensor],
    poisoned: None,
    name: str,
    integers: bool,
    kind: str,
    k: int,
    m: int,
    adds: bool,
) -> None:
    assert RUN is not None
    dtype, features = RUN
    op, packed = operands(make_packed, name, 100, k, m, dtype)
    other, weight = torch.randn_like(op.x), torch.randn(k, dtype=dtype, device=DEVICE)
    total = torch.full_like(op.x, float("nan"))
    added = op.x + other if adds else op.x
    normed = Normed("whole", kind, 1e-5, weight, other if adds else None, total if adds else None)
    tile = DecodeTile(4, 2, 2, 2, integers)
    y = decode_launch.run(replace(op, normed=normed), tile, features)
    assert_product(y, NORM_REFERENCES[kind](added, weight, 1e-5), packed, op.bias, LIMIT[dtype])
    if DEVICE == "cuda":
        assert_equal(y, decode_launch.run(replace(op, normed=normed), tile, features))
    if adds:
        assert_equal(total, added)


@needs_gluon
@pytest.mark.parametrize(
    ("name", "integers"), [("int4", True), ("int3", True), ("int4", False), ("nf4", False)]
)
@pytest.mark.parametrize(("k", "m", "activations"), [(1400, 1, "fp8"), (264, 2, "int8"), (640, 3, "fp8")])
def test_rows_are_rounded_as_by_torch(
    make_packed: Callable[..., PackedTensor],
    poisoned: None,
    name: str,
    integers: bool,
    k: int,
    m: int,
    activations: str,
) -> None:
    assert RUN is not None
    dtype, features = RUN
    op, _ = operands(make_packed, name, 100, k, m, dtype)
    scheme, tile = activations_named(activations), DecodeTile(4, 2, 2, 2, integers)
    assert scheme is not None
    op.x[0, 5] = 30.0
    expected = decode_launch.run(replace(op, x=scheme.round(op.x)), tile, features)
    rounded = replace(op, activations=scheme)
    assert_equal(decode_launch.run(rounded, tile, features), expected)
    assert not decode_launch.run(op, tile, features).equal(expected)
    for broken in (torch.nan, torch.inf):
        op.x[m - 1, k - 1] = broken
        y = decode_launch.run(rounded, tile, features)
        assert y[m - 1].isnan().all() and y[: m - 1].isfinite().all()


@needs_gluon
def test_norms_are_rounded_after(make_packed: Callable[..., PackedTensor], poisoned: None) -> None:
    assert RUN is not None
    dtype, features = RUN
    op, packed = operands(make_packed, "int4", 100, 640, 2, dtype)
    scheme, weight = activations_named("fp8"), torch.randn(640, dtype=dtype, device=DEVICE)
    assert scheme is not None
    normed = replace(op, normed=Normed("whole", "llama", 1e-5, weight), activations=scheme)
    y = decode_launch.run(normed, DecodeTile(4, 2, 2, 2), features)
    expected = scheme.round(NORM_REFERENCES["llama"](op.x, weight, 1e-5))
    assert_product(y, expected, packed, op.bias, 10 * LIMIT[dtype])


def test_rows_are_rounded_where_a_thread_has_room_for_them() -> None:
    row = kernel_named("fused-gemv")
    fp8 = ActivationScheme("fp8-e4m3")

    def said(m: int, tile: DecodeTile, scheme: ActivationScheme | None, **of: Any) -> str | None:
        return row.why_no_rounding(replace(problem(m, **of), activations=scheme), tile)

    assert said(1, DecodeTile(), fp8) is None and said(4, DecodeTile(), fp8) is None
    assert "has registers for 64" in str(said(5, DecodeTile(), fp8))
    assert said(2, DecodeTile(16, 1), fp8, k=14336) is None
    assert "up to 8 rows" in str(said(9, DecodeTile(), fp8, k=128))
    for one in (replace(fp8, group_size=128), ActivationScheme("fp8-e4m3", static=True, stored=0.1)):
        assert "one scale for each row of x" in str(said(1, DecodeTile(), one))
    assert "multiplies int8 or fp8" in str(said(1, DecodeTile(), ActivationScheme("int4")))
    assert "as they are" in str(said(1, DecodeTile(), None))


def test_norms_are_taken_where_a_thread_has_room_for_them() -> None:
    row = kernel_named("fused-gemv")
    assert row.why_no_norm(problem(1), DecodeTile(), "whole") is None
    assert row.why_no_norm(problem(3), DecodeTile(16, 1), "whole") is None
    reason = row.why_no_norm(problem(3), DecodeTile(), "whole")
    assert reason is not None and "64 numbers of x" in reason
    assert (
        kernel_named("fused-portable-gemv").why_no_norm(problem(1), None, "whole")
        == "it takes x, and gives y, as it is"
    )


@needs_gluon
@pytest.mark.parametrize(
    ("name", "integers"), [("int4", True), ("int3 channel", False), ("nf4", False), ("nvfp4", False)]
)
@pytest.mark.parametrize(("n", "k", "m"), [(96, 264, 3), (544, 128, 1)])
@pytest.mark.sampled(3)
def test_products_that_are_gated_are_those_gated_next(
    make_packed: Callable[..., PackedTensor],
    poisoned: None,
    name: str,
    integers: bool,
    n: int,
    k: int,
    m: int,
) -> None:
    assert RUN is not None
    dtype, features = RUN
    op, _ = operands(make_packed, name, n, k, m, dtype)
    for tile in (DecodeTile(8, 2, 1, 4, integers), DecodeTile(8, 1, 2, 1, integers)):
        assert is_gated(partial(decode_launch.run, tile=tile, features=features), op, "silu", "gelu"), tile


@needs_gluon
def test_norms_and_gates_are_taken_together(make_packed: Callable[..., PackedTensor], poisoned: None) -> None:
    assert RUN is not None
    dtype, features = RUN
    op, _ = operands(make_packed, "int4", 160, 640, 2, dtype)
    normed = replace(op, normed=Normed("whole", "llama", 1e-5, torch.randn(640, dtype=dtype, device=DEVICE)))
    run = partial(decode_launch.run, tile=DecodeTile(4, 2, 1, 2, True), features=features)
    assert is_gated(run, normed, "silu")


def test_y_is_gated_where_that_pays() -> None:
    row, small = kernel_named("fused-gemv"), replace(H200, name="small", shared_memory=4 << 10)
    assert row.why_no_gate(problem(2), DecodeTile()) is None
    for text, one in {
        "halves of 4112 rows": problem(n=4112),
        "as fast from M=3": problem(3),
        "x and sums of gate and up take": replace(problem(), gpu=small),
    }.items():
        reason = row.why_no_gate(one, DecodeTile())
        assert reason is not None and text in reason, reason
    assert kernel_named("fused-portable-gemv").why_no_gate(problem(1), None) == "it gives y as it is"
