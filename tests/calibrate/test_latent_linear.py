"""Latent weights: bit by bit what is packed, and the gradients that straight-through rounding has."""

from typing import Any

import pytest
import torch

from quantkit.calibrate.learned.latent_linear import LatentLinear, row_key
from quantkit.calibrate.methods import quantize_tensor
from quantkit.packing.tensor import PackedTensor, plane_codes

from ..support.compare import assert_equal

#: Zero-points of all kinds, a ragged last group, several planes, factors of columns and of all scales, code
#: books fixed and fitted, scales of blocks of rows and of the whole matrix.
SCHEMES: list[dict[str, Any]] = [
    {"format": "int2", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
    {"format": "int4", "group_size": 12},
    {"format": "int3", "group_size": 16, "zero_point": "integer"},
    {"format": "int2", "group_size": 8, "zero_point": "float"},
    {"format": "ternary", "packing": "radix", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
    {"format": "binary", "group_size": 16},
    {"format": "binary-residual", "group_size": 16},
    {"format": "binary-rank1"},
    {"format": "book4", "group_size": 16},
    {"format": "nvfp4"},
    {"format": "mxfp4"},
    {"format": "fp8", "group_size": "8x16"},
    {"format": "int8", "group_size": "tensor"},
]


def by_name(options: dict[str, Any]) -> str:
    return " ".join(map(str, options.values()))


def problem(options: dict[str, Any]) -> tuple[torch.Tensor, PackedTensor]:
    weight = torch.randn(20, 40, generator=torch.Generator().manual_seed(1))
    # A group of zeros has the scale 0.
    weight[3] = 0
    return weight, quantize_tensor(weight, method="mse", **options)


def test_a_copy_elsewhere_is_the_same_and_shares_nothing() -> None:
    weight, packed = problem({"format": "int4", "group_size": 16, "zero_point": "integer"})
    linear = LatentLinear(weight, packed)
    other = linear.mapped(torch.clone)
    moved(other)
    assert_equal(linear.values(), packed.dequantize())
    assert not torch.equal(other.values(), linear.values())
    for name, numbers in other.numbers.items():
        linear.numbers[name].copy_(numbers)
    assert_equal(linear.values(), other.values())
    assert linear.mapped(lambda one: one.to("meta")).numbers["codes"].device.type == "meta"


@pytest.mark.parametrize("options", SCHEMES, ids=by_name)
def test_joined_rows_are_those_of_each_linear(options: dict[str, Any]) -> None:
    generator, alone = torch.Generator().manual_seed(3), []
    for rows in (20, 7, 1):
        weight = torch.randn(rows, 40, generator=generator) * rows
        alone.append(LatentLinear(weight, quantize_tensor(weight, method="mse", **options)))
    keys = {row_key(one.scheme, one.shape[1]) for one in alone}
    if None in keys:
        assert keys == {None}
        return
    assert len(keys) == 1
    joined, start = LatentLinear.joined(alone), 0
    gradient = torch.randn(28, 40, generator=generator)
    of_all = joined.gradients(gradient)
    moved(joined)
    assert joined.shape == (28, 40) and joined.elements == sum(one.elements for one in alone)
    for one in alone:
        stop = start + one.shape[0]
        for name, found in one.gradients(gradient[start:stop]).items():
            assert_equal(of_all[name][:, start:stop] if name == "codes" else of_all[name][start:stop], found)
        rows_of = joined.rows(start, stop)
        for name, numbers in rows_of.numbers.items():
            one.numbers[name].copy_(numbers)
        assert_equal(joined.values()[start:stop], one.values())
        assert dict(rows_of.packed().parts()).keys() == dict(one.packed().parts()).keys()
        for name, tensor in one.packed().parts():
            assert torch.equal(rows_of.packed().part(name), tensor)
        start = stop


def moved(linear: LatentLinear) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, numbers in linear.numbers.items():
        numbers.add_(torch.randn(numbers.shape, generator=generator), alpha=0.3 * linear.steps[name])
    linear.clamp()


@pytest.mark.parametrize("options", SCHEMES, ids=by_name)
def test_the_weights_are_those_that_are_packed(options: dict[str, Any]) -> None:
    weight, packed = problem(options)
    linear = LatentLinear(weight, packed)
    assert_equal(linear.values(), packed.dequantize())
    for (part, before), (_, after) in zip(packed.parts(), linear.packed().parts(), strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), part
    moved(linear)
    assert not torch.equal(linear.values(), packed.dequantize())
    assert_equal(linear.values(), linear.packed().dequantize())


def twin(linear: LatentLinear, start: PackedTensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weights by autograd alone, one group at a time, and the numbers as leaves."""
    scheme, packed = linear.scheme, linear.packed()
    (rows, columns), size = packed.shape, scheme.group_columns(packed.shape[1])
    numbers = {name: one.clone().requires_grad_() for name, one in linear.numbers.items()}

    def through(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return exact + (rounded.float() - exact).detach()

    divisor = packed.part("global_scale")
    scale = through(numbers["scale"] * start.scale.float(), packed.scale)
    scale = scale if divisor is None else scale / divisor
    zero = packed.zero_points()
    shift = None if zero is None else through(numbers["zero_point"], zero)
    book = packed.part("codebook")
    out = []
    for row in range(rows):
        weights = torch.zeros(columns)
        for plane, codes in enumerate(plane_codes(packed.codes(), scheme)):
            number_format = scheme.format if book is None else scheme.format.bind(book.tolist())
            values = codes[row].float() if shift is not None else number_format.decode(codes[row])
            values = through(numbers["codes"][plane, row], values)
            of_groups = []
            for group, part in enumerate(torch.split(values, size)):
                of_row = scale if scheme.per_tensor else scale[row // scheme.group_rows]
                factor = of_row[0 if scheme.per_tensor else group * scheme.planes + plane]
                of_groups.append(factor * (part if shift is None else part - shift[row, group]))
            weights = weights + torch.cat(of_groups)
        out.append(weights)
    found = torch.stack(out)
    factors = packed.part("column_scale")
    if factors is not None:
        first = start.part("column_scale")
        assert first is not None
        found = found * through(numbers["column_scale"] * first.float(), factors)
    return found, numbers


@pytest.mark.parametrize("options", SCHEMES, ids=by_name)
def test_gradients_are_those_of_autograd(options: dict[str, Any]) -> None:
    weight, packed = problem(options)
    linear = LatentLinear(weight, packed)
    moved(linear)
    weights, numbers = twin(linear, packed)
    torch.testing.assert_close(weights, linear.values())
    gradient = torch.randn(weights.shape, generator=torch.Generator().manual_seed(3))
    expected = torch.autograd.grad(weights, list(numbers.values()), gradient)
    found = linear.gradients(gradient)
    assert found.keys() == numbers.keys()
    for name, one in zip(numbers, expected, strict=True):
        torch.testing.assert_close(found[name], one, msg=lambda text, name=name: f"{name}: {text}")


def test_codes_that_the_method_moved_start_at_their_value() -> None:
    weight, packed = problem({"format": "int4", "group_size": 8})
    codes = packed.codes()
    codes[0, :8] = 3
    changed = PackedTensor.from_parts(
        {**dict(packed.parts()), "packed": packed.scheme.pack(codes)}, packed.scheme, packed.shape
    )
    latents = LatentLinear(weight, changed).numbers["codes"][0]
    away = (weight[0, :8] / packed.group_scale()[0, 0]).round().clamp(-8, 7) != 3 - 8
    assert away.any()
    assert torch.equal(latents[0, :8][away], torch.full((int(away.sum()),), 3.0 - 8))
    assert torch.equal(
        latents[1], (weight[1] / packed.group_scale()[1].repeat_interleave(8)).clamp(-8.5, 7.5)
    )


def test_numbers_stay_in_their_ranges() -> None:
    linear = LatentLinear(*problem({"format": "ternary", "group_size": 16}))
    for numbers in linear.numbers.values():
        numbers.fill_(1e9)
    linear.clamp()
    assert float(linear.numbers["codes"].max()) == 1.5
    assert torch.isfinite(linear.values()).all()
