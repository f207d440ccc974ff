"""Estimated time of a run: of every method, from a sample, and by the operations of a calibration."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization import duration
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.duration import SAMPLE_WEIGHTS, Duration, estimate
from quantkit.quantization.quantize_options import DEFAULT_DISTILLATION, QuantizeOptions
from quantkit.recipes.recipe_options import RecipeOptions

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"
CALIBRATION = CalibrationOptions(samples=4, length=32)


def estimated(
    method: str, training: DistillOptions = DEFAULT_DISTILLATION, **options: Any
) -> Duration | None:
    asked = QuantizeOptions(RecipeOptions(method=method, **options), device="cpu")
    checkpoint, planned = plan(SOURCE, asked)
    return estimate(checkpoint, planned, CALIBRATION, torch.device("cpu"), training)


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample takes a second."""

    def seconds(work: Any, device: torch.device) -> float:
        work()
        return 1.0

    monkeypatch.setattr(duration, "_seconds", seconds)


def test_all_weights_take_what_the_sample_does(one_second: None) -> None:
    # Per layer q, o 64 x 64, k, v 32 x 64, gate, up, down 172 x 64.
    weights = 5 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 172 * 64)
    found = estimated("mse", group_size="channel")
    assert found is not None and found.factor == 2
    assert found.seconds == pytest.approx(weights / SAMPLE_WEIGHTS, rel=0.01)


def test_calibration_adds_its_operations(one_second: None) -> None:
    plain, found, best = (estimated(method, group_size="channel") for method in ("mse", "gptq", "best"))
    assert plain is not None and found is not None and best is not None and found.factor == 3
    tokens = 4 * 32
    linears = 5 * [(64, 64), (32, 64), (32, 64), (64, 64), (172, 64), (172, 64), (64, 172)]
    inputs = 5 * [64, 64, 64, 172]
    passes = sum(2 * n * k * (2 * tokens + k) for n, k in linears)
    hessians = sum(2 * k**2 * tokens + 3 * k**3 for k in inputs)
    extra = (found.seconds - plain.seconds) * 2 * 768**3
    assert extra == pytest.approx(passes + hessians, rel=1e-3)
    assert best.seconds - found.seconds == pytest.approx(
        sum(4 * n * k * tokens for n, k in linears) / (2 * 768**3), rel=1e-3
    )


def test_what_cannot_be_told_is_not(one_second: None) -> None:
    assert estimated("signround") is None
    assert estimated("distill", DistillOptions(steps=5)) is None


def test_an_allocation_takes_what_its_formats_do(
    one_second: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sensitivities are measured by the plan: the run finds them in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    budget = Budget(BitsPerWeight(5.0), ("int4:32", "int5:32", "int8"))
    asked = QuantizeOptions(RecipeOptions(method="gptq"), budget, CALIBRATION, device="cpu")
    checkpoint, planned = plan(SOURCE, asked)
    assert planned.allocation is not None
    found = estimate(checkpoint, planned, CALIBRATION, torch.device("cpu"), DEFAULT_DISTILLATION)
    # A second per sample in any format.
    uniform = estimated("gptq", group_size="channel")
    assert found is not None and uniform is not None and found.factor == uniform.factor
    assert found.seconds == pytest.approx(uniform.seconds, rel=1e-3)


def test_a_training_takes_its_time(one_second: None) -> None:
    before, hour, default = (
        estimated(method, training)
        for method, training in (
            ("best", DEFAULT_DISTILLATION),
            ("distill", DistillOptions(seconds=3600.0)),
            ("distill", DEFAULT_DISTILLATION),
        )
    )
    assert before is not None and hour is not None and default is not None
    assert hour.seconds - before.seconds == pytest.approx(3600)
    assert default.seconds - before.seconds == pytest.approx(600)
    assert DEFAULT_DISTILLATION.seconds_of(8 * 10**9) == 48000


def test_a_sample_takes_little_time() -> None:
    found = estimated("mse")
    assert found is not None and 0 < found.seconds < 60


def test_a_pass_that_measures_scales_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration, "_speed", lambda device: 1.0)
    monkeypatch.setattr(duration, "_seconds_of_rows", lambda tasks, device: 0.0)
    found = []
    for name in ("FP8_DYNAMIC", "FP8"):
        checkpoint, planned = plan(SOURCE, QuantizeOptions(RecipeOptions(scheme=name), device="cpu"))
        one = estimate(checkpoint, planned, CALIBRATION, torch.device("cpu"), DEFAULT_DISTILLATION)
        assert one is not None
        found.append(one)
    weights = sum(layer.weights for layer in planned.layers if layer.scheme is not None)
    assert [one.seconds for one in found] == [0.0, 2.0 * 4 * 32 * weights]
    assert found[1].factor > found[0].factor
