"""Grids of low-bit sources as schemes: the same values, or the reason why there is none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.gguf.block_types import BLOCK_TYPES
from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.open_source import exactly
from quantkit.errors import FormatError
from quantkit.packing.formats import FORMATS
from quantkit.quantization.nesting import kept_rows, nested_rows, nested_scheme, why_not_nested

from ..checkpoint.low_bit.makers import CASES, opened
from ..checkpoint.test_gguf import rows_of
from ..support.compare import assert_equal

GRIDS = [kind for kind in BLOCK_TYPES.values() if kind.grid is not None]
INT4 = GridSpec(FORMATS["int4"], (6, 70), 32, scale_dtype=torch.float16)
NVFP4 = GridSpec(FORMATS["fp4-e2m1"], (6, 70), 16, scale_dtype=torch.float8_e4m3fn, global_scale=True)
FP8 = GridSpec(FORMATS["fp8-e4m3"], (6, 70), 70, 6)


def grid_of(spec: GridSpec) -> StoredGrid:
    """Random codes, all numbers of few digits."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = spec.shape
    groups = -(-columns // spec.group_size)
    shape = (rows, groups)
    blocks = (-(-rows // spec.group_rows), groups)
    scales = torch.randint(1, 64, blocks, generator=generator) / 128
    scales = scales.repeat_interleave(spec.group_rows, 0)[:rows].to(spec.scale_dtype)
    numbers = [code for code, value in enumerate(spec.format.values) if value == value]
    codes = torch.tensor(numbers, dtype=torch.uint8)[
        torch.randint(0, len(numbers), spec.shape, generator=generator)
    ]
    integers = torch.randint(0, 2**spec.format.bits, shape, generator=generator).float()
    return StoredGrid(
        spec,
        codes,
        scales,
        integers if spec.affine == "zeros" else None,
        integers / 256 if spec.affine == "biases" else None,
        torch.full((rows,), 3.0) if spec.global_scale else None,
    )


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_a_block_type_nests_in_a_scheme_with_its_values(kind: Any) -> None:
    tensor, read, expected = rows_of(kind, 33, 4)
    spec, grid = tensor.grid_spec, tensor.grid(read, 0, 33)
    assert spec is not None
    assert grid is not None
    chosen = nested_scheme(spec)
    packed = nested_rows(grid, chosen)
    assert_equal(packed.dequantize(), torch.from_numpy(expected))
    # No bit more than the file has, but for the shape.
    assert packed.nbytes - 16 == 33 * tensor.row_bytes


@pytest.mark.parametrize(
    ("spec", "scheme"),
    [
        (INT4, "int4 g32 float16"),
        (replace(INT4, group_size=70), "int4 channel float16"),
        (replace(INT4, affine="zeros"), "int4 g32 asym float16"),
        (replace(INT4, affine="biases", scale_dtype=torch.float32), "int4 g32 asym-min float32"),
        (NVFP4, "fp4-e2m1 g16 e4m3"),
        (FP8, "fp8-e4m3 tensor float32"),
        (replace(FP8, group_rows=4, group_size=32), "fp8-e4m3 4x32 float32"),
        (replace(FP8, group_rows=4, group_size=128), "fp8-e4m3 4x128 float32"),
        # Each row then has the scale of its block.
        (replace(NVFP4, group_rows=4, group_size=32), "fp4-e2m1 g32 e4m3"),
        (replace(FP8, group_rows=1), "fp8-e4m3 channel float32"),
        (replace(INT4, format=FORMATS["ternary"], group_rows=6, group_size=70), "ternary tensor float16"),
        (replace(INT4, format=FORMATS["binary"]), "binary g32 float16"),
        (replace(INT4, format=FORMATS["nf4"]), "nf4 g32 float16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_grid_nests_in_the_scheme_of_its_granularity(spec: GridSpec, scheme: str) -> None:
    chosen, grid = nested_scheme(spec), grid_of(spec)
    assert str(chosen) == scheme
    packed = nested_rows(grid, chosen)
    assert packed.shape == spec.shape
    assert_equal(packed.dequantize(), grid.values())


#: The scheme of a weight of each format, or why it has none.
OF_FORMATS = {
    "fp8 blocks": "fp8-e4m3 128x128 float32",
    "fp8 e5m2 blocks": "fp8-e5m2 128x128 float32",
    "fp8 blocks of deepseek v4": "fp8-e4m3 128x60 float32",
    "fp8 tensor": "fp8-e4m3 tensor float32",
    "fp8 tensor of one": "fp8-e4m3 tensor float32",
    "fp8 channel": "fp8-e4m3 channel bfloat16",
    "fp8 channel flat": "fp8-e4m3 channel float32",
    "mxfp8": "fp8-e4m3 g32 e8m0",
    "mxfp8 e8m0": "fp8-e4m3 g32 e8m0",
    "mxfp4": "fp4-e2m1 g32 e8m0",
    "fp4 of deepseek v4": "fp4-e2m1 g32 e8m0",
    "nvfp4": "fp4-e2m1 g16 e4m3",
    "nvfp4 modelopt": "fp4-e2m1 g16 float32",
    "int8": "int8 channel asym float32",
    "pack-quantized 1": "its codes have zeros",
    **{f"pack-quantized {bits}": f"int{bits} g32 asym bfloat16" for bits in range(2, 9)},
    "pack-quantized g_idx": "groups are not consecutive columns",
    "pack-quantized fields 3": "int3 channel asym bfloat16",
    "pack-quantized fields 6": "int6 g32 asym bfloat16",
    **{f"gptq {bits}": f"int{bits} g32 asym float16" for bits in (2, 3, 4, 8)},
    "gptq v2": "int4 g16 asym float16",
    "gptq desc_act": "groups are not consecutive columns",
    "gptq 3 desc_act": "groups are not consecutive columns",
    "awq": "int4 g16 asym float16",
    "bitsandbytes int8": "multiplied by 0.00787402 last",
    "bitsandbytes nf4": "nf4 channel float32",
    "bitsandbytes nf4 odd": "blocks that do not end where rows do",
    "bitsandbytes nf4 stored as bfloat16": "nf4 g32 float32",
    "bitsandbytes fp4": "bitsandbytes-fp4 g32 float32",
    "bitnet": "ternary tensor bfloat16",
    "bitnet divides": "ternary channel float32",
    "mlx 1": "its codes have biases",
    **{f"mlx {bits}": f"int{bits} g64 asym-min float16" for bits in (2, 3, 4, 5, 6, 8)},
    "bonsai": "binary g128 float16",
}


@pytest.mark.parametrize("name", CASES)
def test_a_stored_format_keeps_its_values_or_has_a_reason(name: str, tmp_path: Path) -> None:
    """Against the obvious reading of its parts, one weight at a time."""
    torch.manual_seed(0)
    made = CASES[name]()
    checkpoint = exactly(opened(tmp_path / "a", made.parts, made.section))
    tensor = checkpoint.tensors[made.name]
    spec = tensor.grid_spec
    assert spec is not None
    reason = why_not_nested(spec)
    if reason is not None:
        assert OF_FORMATS[name] in reason
        return
    chosen = nested_scheme(spec)
    assert str(chosen) == OF_FORMATS[name]
    packed, norm = kept_rows(checkpoint, tensor, chosen, 0, spec.shape[0])
    expected = made.expected()
    assert_equal(packed.dequantize(), expected)
    assert norm == pytest.approx(float(expected.double().square().sum()))


def test_a_weight_that_would_change_is_named(tmp_path: Path) -> None:
    made = CASES["awq"]()
    checkpoint = exactly(opened(tmp_path / "a", made.parts, made.section))
    tensor = checkpoint.tensors[made.name]
    assert tensor.grid_spec is not None
    chosen = nested_scheme(replace(tensor.grid_spec, scale_dtype=torch.bfloat16))
    with pytest.raises(
        FormatError, match=r"weight \[8, 0\] is .* in the source; expected the same\. `quantkit quan"
    ):
        kept_rows(checkpoint, tensor, chosen, 8, 16)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(INT4, permuted=True), r"groups are not consecutive columns \(desc_act\)"),
        (replace(INT4, factor=1 / 127), "multiplied by 0.00787402 last"),
        (replace(INT4, transposed=True), r"stored \[K, N\], and groups would be of rows"),
        (replace(INT4, matrices=8), "8 matrices in one tensor"),
        (replace(INT4, scale_dtype=torch.float64), "its scales are torch.float64"),
        (
            replace(INT4, format=FORMATS["nf4"], affine="zeros"),
            "its codes have zeros, which is for int formats",
        ),
        (replace(INT4, group_size=3), "blocks that do not end where rows do"),
    ],
)
def test_what_does_not_nest_is_told_why(spec: GridSpec, reason: str) -> None:
    assert why_not_nested(INT4) is None
    with pytest.raises(FormatError, match=f"no scheme has its values: .*{reason}"):
        nested_scheme(spec)


def test_constant_groups_of_a_grid_with_biases_keep_their_value() -> None:
    """llama.cpp gives a group of equal weights the scale 0, which would be zeros."""
    spec = replace(INT4, affine="biases")
    grid = grid_of(spec)
    grid.scales[2, 1:] = 0
    packed = nested_rows(grid, nested_scheme(spec))
    assert packed.dequantize()[2, 32:].unique().numel() == 2
    assert_equal(packed.dequantize(), grid.values())


@pytest.mark.parametrize(
    ("affine", "value", "expected"),
    [
        ("zeros", 16.0, "the zero-point 16 cannot be stored with int4 g32 asym float16; expected a code"),
        ("zeros", -1.0, "the zero-point -1 cannot be stored"),
        ("zeros", 2.5, "the zero-point 2.5 cannot be stored"),
        ("biases", 1e-9, "the zero-point 1e-09 cannot be stored with int4 g32 asym-min float16"),
    ],
)
def test_zero_points_that_a_scheme_cannot_store_are_refused(affine: Any, value: float, expected: str) -> None:
    spec = replace(INT4, affine=affine)
    grid = grid_of(spec)
    other = grid.zeros if affine == "zeros" else grid.biases
    assert other is not None
    other[1, 1] = value
    with pytest.raises(FormatError, match=expected):
        nested_rows(grid, nested_scheme(spec))
