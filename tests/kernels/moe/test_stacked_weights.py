"""The layouts of many weights that are built as one are those of each."""

from collections.abc import Callable

import pytest
import torch

from quantkit import quantize_tensor
from quantkit.errors import FormatError
from quantkit.kernels.layouts.fragment_layout import build
from quantkit.kernels.moe import stacked_weights
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor

from ...support.compare import assert_equal
from ..gemm.test_fused import CASES as FUSED_CASES
from ..gemm.test_fused import DEVICE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Zero-points of so many bits are words in different ways.
CASES = FUSED_CASES | {f"int{b} integer": {"zero_point": "integer", "group_size": 64} for b in (2, 5, 6, 7)}


def assert_those_of_each(weights: list[PackedTensor], dtype: torch.dtype) -> None:
    expected = [torch.stack(parts) for parts in zip(*(build(one, dtype) for one in weights), strict=True)]
    for found, stack in zip(stacked_weights.stacked(weights, dtype), expected, strict=True):
        assert (found.shape, found.dtype) == (stack.shape, stack.dtype)
        assert_equal(found.flatten().view(torch.uint8), stack.flatten().view(torch.uint8))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [32, 48, 24])
def test_they_are_those_of_each(make_packed: Callable[..., PackedTensor], case: str, rows: int) -> None:
    name, options = case.split(maxsplit=1)[0], CASES[case]
    weights = [make_packed(name, (rows, 200), seed=seed, **options).to(DEVICE) for seed in range(3)]
    for dtype in DTYPES:
        assert_those_of_each(weights, dtype)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8", "int4"])
def test_each_has_scales_of_its_own_size(name: str) -> None:
    """Exponents of scales with a folded factor are counted from the largest, and some have a divisor."""
    generator = torch.Generator().manual_seed(5)
    weights = [
        quantize_tensor(size * torch.randn(32, 256, generator=generator), name).to(DEVICE)
        for size in (1e-3, 1.0, 0.0, 100.0)
    ]
    for dtype in DTYPES:
        assert_those_of_each(weights, dtype)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_some_are_built_at_a_time(
    make_packed: Callable[..., PackedTensor], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    weights = [make_packed("nvfp4", (16, 128), seed=seed).to(DEVICE) for seed in range(5)]
    built: list[int] = []
    whole = stacked_weights.build_fragments

    def counted(weight: PackedTensor, dtype: torch.dtype, count: int = 1) -> tuple[torch.Tensor, ...]:
        built.append(count)
        return whole(weight, dtype, count)

    monkeypatch.setattr(stacked_weights, "build_fragments", counted)
    monkeypatch.setattr(stacked_weights, "BYTES_AT_ONCE", at_once * weights[0].words.nbytes)
    assert_those_of_each(weights, torch.bfloat16)
    assert built == {1: [1] * 5, 2: [2, 2, 1], 3: [3, 2]}[at_once]


@pytest.mark.parametrize(
    ("case", "rows"),
    [("int4", 24), ("int3 integer", 16), ("int6 integer", 48), ("book4", 32), ("fp8 tensor", 32)],
)
def test_those_that_cannot_be_one_are_built_alone(
    make_packed: Callable[..., PackedTensor], case: str, rows: int
) -> None:
    name, options = case.split(maxsplit=1)[0], CASES.get(case, {})
    weights = [make_packed(name, (rows, 128), seed=seed, **options).to(DEVICE) for seed in range(2)]
    assert not stacked_weights.can_be_one(weights[0])
    assert_those_of_each(weights, torch.bfloat16)


def test_columns_with_scales_of_their_own_cannot_be_one(make_packed: Callable[..., PackedTensor]) -> None:
    name = next(name for name in PRESETS if scheme(name).column_scale)
    assert not stacked_weights.can_be_one(make_packed(name, (32, 128)))


def test_one_that_is_no_number_is_refused_among_many() -> None:
    weights = [quantize_tensor(torch.randn(32, 128), "fp8") for _ in range(3)]
    weights[1].words[5, 3] = 0x7F
    with pytest.raises(FormatError, match="weight has codes that stand for no number"):
        stacked_weights.stacked([weight.to(DEVICE) for weight in weights], torch.bfloat16)
