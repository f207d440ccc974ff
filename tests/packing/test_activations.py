"""Inputs are rounded to what their scheme says: a slow twin, compressed-tensors' own function, every code."""

import math
from fractions import Fraction

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)

from quantkit.checkpoint.compressed_tensors import input_arguments
from quantkit.errors import FormatError, UsageError
from quantkit.packing.activations import ActivationScheme, activations_named
from quantkit.packing.formats import FORMATS
from quantkit.packing.presets import ACTIVATIONS, PRESETS, SCHEMES
from quantkit.packing.schemes import Scheme, parse_token, scheme

from .references import encode

NAMES = tuple(ACTIVATIONS)
STATIC = "static is {} with {} scales of inputs and group size {}; "
RULE = "e4m3 scales of groups are static, e8m0 scales are not, and a static float32 scale has no groups."
GROUPS = "use 1 to 1048576, or null for one scale per token."


def named(name: str, largest: float = 3.0) -> ActivationScheme:
    """The scheme of a name; a static one is for inputs up to `largest`."""
    found = activations_named(name)
    assert found is not None
    return found.fit(largest) if found.static else found


def twin(x: torch.Tensor, rounds: ActivationScheme) -> torch.Tensor:
    """Round each element of `x` [T, K] by exact distances; scales are float32 quotients."""
    form, rows = rounds.number_format, []
    for row in x.float():
        out: list[float] = []
        for group in row.split(rounds.group_size or len(row)):
            largest = group.abs().max().item()
            if rounds.static:
                scale = rounds.stored
                if rounds.scale == "e4m3":
                    e4m3 = FORMATS["fp8-e4m3"]
                    local = torch.tensor(largest) / form.absmax * torch.tensor(rounds.stored)
                    code = encode(e4m3, min(local.item(), e4m3.absmax))
                    scale = (torch.tensor(e4m3.values[code] or 0.125) / torch.tensor(rounds.stored)).item()
            elif rounds.scale == "float32":
                scale = max(torch.tensor(largest) / form.absmax, torch.tensor(2.0**-126)).item()
            else:
                significand, exponent = math.frexp(largest)
                up = significand >= 0.875
                scale = 2.0 ** max(exponent - 1 + up - math.floor(math.log2(form.absmax)), -126)
            for value in group:
                unit = (value / scale).item()
                rounded = float(encode(form, unit) if math.isfinite(unit) else 0)
                out.append(float(torch.tensor(form.values[int(rounded)]) * scale))
        rows.append(out)
    return torch.tensor(rows).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_it_rounds_as_the_slow_twin(name, dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 128) * torch.logspace(-3, 2, 128)
    x[1, ::3] = 0
    x[2] = torch.arange(128) / 16 - 4
    x = x.to(dtype)
    assert torch.equal(named(name).round(x), twin(x, named(name)))


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_the_format_times_a_power_of_two_stays(name):
    rounds = named(name)
    form = rounds.number_format
    # From a significand of 1.75 on, e8m0 scales are twice as large.
    most = 1.74 * 2.0 ** math.floor(math.log2(form.absmax)) if rounds.scale == "e8m0" else form.absmax
    values = torch.tensor([value for value in form.numbers if abs(value) <= most])
    size = rounds.group_size or 256
    rows = list(values.split(size - 1))
    for power in (-6, 0, 3):
        if rounds.static:
            rounds = rounds.bind(1.0 if rounds.group_size else 2.0**power)
        for part in rows:
            # The largest value is in each group, so that its scale is that power.
            x = torch.zeros(size)
            x[: len(part)], x[-1] = part, values.max()
            assert torch.equal(rounds.round(x * 2.0**power), x * 2.0**power)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_or_group_without_a_scale_becomes_nan_and_no_other(name, bad):
    rounds = named(name)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    clean = rounds.round(x)
    x[1, 5] = bad
    y = rounds.round(x)
    size = rounds.group_size or 256
    assert y[1, :size].isnan().all()
    assert torch.equal(y[0], clean[0]) and torch.equal(y[1, size:], clean[1, size:])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_the_smallest_numbers_are_finite(name):
    x = torch.zeros(2, 128)
    x[1] = torch.finfo(torch.float32).smallest_normal
    y = named(name).round(x)
    assert torch.equal(y[0], x[0]) and y.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_inputs_of_float16_stay_finite(name):
    x = torch.full((1, 128), 65504.0, dtype=torch.float16)
    x[0, ::2] = -60000
    assert named(name).round(x).isfinite().all()


def test_no_tokens_and_other_shapes():
    rounds = named("fp8-g128")
    assert rounds.round(torch.empty(0, 128)).shape == (0, 128)
    x = torch.randn(2, 3, 256)
    assert torch.equal(rounds.round(x), rounds.round(x.view(6, 256)).view(2, 3, 256))


def test_gradients_pass():
    x = torch.randn(4, 128, requires_grad=True)
    y = named("int8").round(x)
    (y * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
    assert (y - x).abs().max() > 0


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("int8", "int4")])
def test_floats_and_static_scales_are_those_of_compressed_tensors(name):
    """Dynamic integers are not: compressed-tensors divides by 127.5, the kernels of vLLM and this by 127."""
    args = QuantizationArgs(**input_arguments(named(name)))
    x = torch.randn(1, 5, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 1, 256)
    if not named(name).static:
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1))
        assert torch.equal(named(name).round(x), fake_quantize(x, scale, zero, args))
        return
    # Calibrated on the first tokens: some of the others are larger.
    seen = x[:, :2]
    rounds, given = named(name, float(seen.abs().max())), {}
    if rounds.part == "input_global_scale":
        given["global_scale"] = generate_gparam(seen.min(), seen.max())
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1), **given)
        assert given["global_scale"].item() == rounds.stored
    else:
        scale, zero = calculate_qparams(seen.min(), seen.max(), args)
        assert scale.item() == rounds.stored
    y = rounds.round(x)
    assert torch.equal(y, fake_quantize(x, scale, zero, args, **given))
    assert y.abs().max() < x.abs().max()


def test_a_static_scheme_needs_its_number():
    rounds = activations_named("fp8-static")
    with pytest.raises(FormatError) as error:
        rounds.round(torch.ones(1, 8))
    assert str(error.value) == (
        "inputs are rounded to fp8-e4m3 tensor by a number that was not read yet; load the checkpoint that "
        "stores it."
    )
    bound = rounds.bind(2.0)
    assert bound.unbound == rounds and bound != rounds
    assert ActivationScheme.from_dict(bound.to_dict()) == bound
    assert rounds.to_dict() == {"format": "fp8-e4m3", "group_size": None, "scale": "float32", "static": True}
    for bad in (0.0, -1.0, math.nan, math.inf, 1):
        with pytest.raises(
            FormatError, match=r"the stored scale of inputs is .*; static scales have a positive"
        ):
            rounds.bind(bad)


def test_a_static_scheme_names_the_part_that_stores_its_number():
    shapes = {
        name: scheme("nvfp4", activations=name).storage_shapes((4, 32))
        for name in ("nvfp4", "fp8-static", "fp8")
    }
    assert (
        shapes["nvfp4"]["input_global_scale"] == shapes["fp8-static"]["input_scale"] == (torch.float32, (1,))
    )
    assert not any(part.startswith("input") for part in shapes["fp8"])
    made = scheme("nvfp4", activations="nvfp4")
    assert made.part_names == made.of_weights.part_names


def test_int8_scales_are_the_largest_magnitude_over_127():
    x = torch.tensor([[254.0, 1.0, -3.0, 127.0]])
    assert named("int8").round(x).tolist() == [[254.0, 0.0, -4.0, 128.0]]
    assert Fraction(254, 127) == 2


def test_a_static_int8_scale_is_the_largest_magnitude_over_127_and_a_half():
    rounds = named("int8-static", 255.0)
    assert rounds.stored == 2.0
    # Two's complement has one more negative value, so a scale of its range saturates the positive side first.
    x = torch.tensor([[255.0, 254.0, 3.0, 1.0, -1.0, -255.0, -256.0, -1e9]])
    assert rounds.round(x).tolist() == [[254.0, 254.0, 4.0, 0.0, 0.0, -256.0, -256.0, -256.0]]


def test_a_scheme_and_its_token_keep_the_activations():
    made = scheme("int4", activations="int8")
    assert Scheme.from_dict(made.to_dict()) == made == parse_token(made.token)
    assert str(made) == "int4 g128 bfloat16, x int8 token"
    assert "activations" not in scheme("int4").to_dict()
    assert made.of_weights == scheme("int4") and scheme("int4").of_weights == scheme("int4")


def test_8_bit_integers_with_rounded_inputs_are_bytes():
    assert scheme("int8", activations="int8").packing == "bytes"
    assert scheme("int8", activations="int8", zero_point="integer").packing == "bits"
    assert scheme("int8").packing == scheme("int4", activations="int8").packing == "bits"


def test_every_scheme_of_llm_compressor_has_a_format_and_activations():
    for preset in SCHEMES.values():
        assert preset.format in PRESETS
        assert preset.activations in (None, *ACTIVATIONS)
        scheme(
            preset.format,
            group_size=preset.group_size,
            zero_point=preset.zero_point or "none",
            activations=preset.activations,
            packing=preset.packing,
        )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (("int9",), "inputs cannot be rounded to 'int9'; use one of int8, fp8-e4m3, fp4-e2m1, int4."),
        (("binary",), "inputs cannot be rounded to 'binary'; use one of int8, fp8-e4m3, fp4-e2m1, int4."),
        (("int8", 0), f"the group size of inputs is 0; {GROUPS}"),
        (("int8", 1 << 70), f"the group size of inputs is {1 << 70}; {GROUPS}"),
        (("int8", True), f"the group size of inputs is True; {GROUPS}"),
        (("int8", None, "e5m2"), "the scale of inputs is 'e5m2'; it is one of float32, e8m0, e4m3."),
        (("int8", 128, "float32", True), STATIC.format(True, "float32", 128) + RULE),
        (("int8", 32, "e8m0", True), STATIC.format(True, "e8m0", 32) + RULE),
        (("fp4-e2m1", 16, "e4m3"), STATIC.format(False, "e4m3", 16) + RULE),
        (("int8", None, "float32", 1), STATIC.format(1, "float32", None) + RULE),
    ],
)  # fmt: skip
def test_what_is_no_activation_scheme(fields, text):
    with pytest.raises(FormatError) as error:
        ActivationScheme(*fields)
    assert str(error.value) == text


@pytest.mark.parametrize("data", [None, [], {"format": "int8"}, {"format": "int8", "group_size": None}])
def test_a_stored_one_has_its_three_fields(data):
    with pytest.raises(FormatError, match=r"have the fields \['format', 'group_size', 'scale'\]"):
        ActivationScheme.from_dict(data)


@pytest.mark.parametrize(
    "changed", [{"format": 8}, {"scale": None}, {"scale": "int8"}, {"group_size": "128"}, {"format": "x"}]
)
def test_a_stored_one_with_a_wrong_field_is_refused(changed):
    with pytest.raises(FormatError):
        ActivationScheme.from_dict({**named("fp8-g128").to_dict(), **changed})


def test_unknown_activations_name_the_known_ones():
    with pytest.raises(UsageError) as error:
        activations_named("fp16")
    known = ", ".join(ACTIVATIONS)
    remedy = "That is the default: leave the option out."
    assert str(error.value) == f"unknown activations 'fp16'; known are none, {known}. {remedy}"
    assert activations_named(None) is activations_named("none") is None


def test_features_that_groups_do_not_divide():
    assert named("fp8-g128").why_not(192) == "groups of 128 inputs do not divide 192 features"
    assert named("fp8-g128").why_not(256) is None and named("fp8").why_not(7) is None
    assert set(FORMATS) >= {preset.format for preset in ACTIVATIONS.values()}
