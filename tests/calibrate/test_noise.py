"""Measured noise is deterministic, agrees with theory, and is counted in bits that are really stored."""

import math

import pytest
import torch

from quantkit.calibrate import noise
from quantkit.calibrate.methods import quantize_tensor
from quantkit.errors import FormatError
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import scheme

SMALL = (8, 512)


def test_every_preset_and_variant_is_there_once():
    known = noise.known_schemes()
    assert set(known.values()) == {scheme(name) for name in PRESETS} | set(noise.VARIANTS.values())
    assert len(set(known.values())) == len(known)
    assert known["fp8-e4m3"] == scheme("fp8")


@pytest.mark.parametrize("label", noise.known_schemes())
def test_bits_are_those_of_a_packed_tensor(label):
    chosen = noise.known_schemes()[label]
    packed = quantize_tensor(torch.ones(40, 256), chosen, method="rtn")
    assert noise.bits_per_weight(chosen, (40, 256)) == packed.bits_per_weight


def test_bits_per_weight_count_scales():
    assert noise.bits_per_weight(scheme("int4")) == pytest.approx(4.125, abs=1e-4)
    assert noise.bits_per_weight(scheme("nvfp4")) == pytest.approx(4.5, abs=1e-4)
    assert noise.bits_per_weight(scheme("int8")) == pytest.approx(8 + 16 / 4096, abs=1e-4)


def test_drawn_weights_have_the_variance_of_their_distribution():
    for draw, variance in ((noise.gaussian, 1.0), (noise.student_t, 5 / 3)):
        weight = draw((200, 1000), torch.Generator().manual_seed(1))
        assert weight.shape == (200, 1000)
        assert float(weight.square().mean()) == pytest.approx(variance, rel=0.05)
        assert abs(float(weight.mean())) < 0.02


def test_noise_is_reported_and_follows_the_seed():
    schemes = {"int4": scheme("int4"), "nvfp4": scheme("nvfp4")}
    seen = []
    measured = noise.measure(schemes, shape=SMALL, report=lambda *args: seen.append(args))
    assert [n.label for n in measured] == ["int4", "nvfp4"]
    assert seen == [(0, 2, "int4"), (1, 2, "nvfp4")]
    assert measured == noise.measure(schemes, shape=SMALL)
    assert measured != noise.measure(schemes, shape=SMALL, seed=1)
    for row in measured:
        assert set(row.errors) == {"rtn", "mse"}
        for name in noise.DISTRIBUTIONS:
            assert 0 < row.errors["mse"][name] <= row.errors["rtn"][name]
    (large,) = noise.measure({"int4": scheme("int4")}, shape=(64, 1024))
    assert large.errors["mse"]["gaussian"] == pytest.approx(0.0093, rel=0.03)


def test_a_binary_weight_keeps_what_theory_says():
    """The best binary value of a Gaussian is its mean magnitude: 1 - 2 / pi of its energy is lost."""
    weight = noise.gaussian(noise.SAMPLE_SHAPE, torch.Generator().manual_seed(0))
    chosen = scheme("binary", group_size="channel")
    assert noise.relative_error(weight, chosen, "mse") == pytest.approx(1 - 2 / math.pi, rel=0.01)


def test_a_method_that_does_not_take_a_scheme():
    with pytest.raises(FormatError, match="'hqq'"):
        noise.measure({"nf4": scheme("nf4")}, methods=("hqq",), shape=SMALL)


def test_the_pareto_front_has_no_point_that_another_beats():
    def point(label: str, bits: float, error: float) -> noise.Noise:
        return noise.Noise(label, scheme("int4"), bits, {"mse": {"gaussian": error}})

    points = [point("d", 4, 0.3), point("a", 1, 0.5), point("c", 3, 0.2), point("b", 3, 0.1)]
    front = noise.pareto_front(points, "mse", "gaussian")
    assert [p.label for p in front] == ["a", "b"]
    # The float32 factor of a whole tensor is no reason to be of more bits.
    better = point("e", 3.00001, 0.05)
    assert [p.label for p in noise.pareto_front([*points, better], "mse", "gaussian")] == ["a", "e"]
    assert noise.pareto_front([], "mse", "gaussian") == ()
