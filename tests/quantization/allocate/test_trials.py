"""Trials of schemes on a sample of rows: which there are, and what linears of one input lose together."""

import math

import pytest
import torch

from quantkit.calibrate.hessian import Hessian
from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import METHODS
from quantkit.errors import FormatError
from quantkit.packing.schemes import Scheme, scheme
from quantkit.quantization.allocate.trials import Sample, trials_of
from quantkit.recipes.candidates import MENUS, candidates

ROW = (scheme("fp4"), scheme("int4"), scheme("int3", group_size=32), scheme("ternary"))


@pytest.mark.parametrize("method", ["gptq", "best", "signround", "distill"])
def test_gptq_rounds_one_scheme_of_evenly_spaced_values(method: str) -> None:
    *quick, exact = trials_of(ROW, METHODS[method])
    assert [trial.scheme for trial in quick] == list(ROW)
    assert str(exact.scheme) == "int3 g32 bfloat16" and exact.method is METHODS[method]
    assert all(not isinstance(trial.method.rounding, type(exact.method.rounding)) for trial in quick)
    assert all(exact.units > trial.units for trial in quick)
    assert trials_of(ROW[:1], METHODS[method]) == [exact._replace(scheme=ROW[0])]
    assert str(trials_of((ROW[0], ROW[3]), METHODS[method])[-1].scheme) == str(ROW[3])


@pytest.mark.parametrize("method", ["rtn", "mse", "hqq", "imatrix", "awq", "smoothquant"])
def test_quick_methods_round_every_scheme(method: str) -> None:
    found = trials_of(ROW, METHODS[method])
    assert [(trial.scheme, trial.method) for trial in found] == [(one, METHODS[method]) for one in ROW]


def test_the_reference_of_a_menu_is_its_int_format_of_middle_size() -> None:
    names = {}
    for menu in MENUS:
        row = [one.scheme(torch.bfloat16) for one in candidates("best", (menu,))]
        names[menu] = str(trials_of([one for one in row if one is not None], METHODS["best"])[-1].scheme)
    assert names == {"engine": "int4 g64 bfloat16", "fast": "int4 g128 bfloat16", "all": "int4 g128 bfloat16"}


def sample_of(weights: dict[str, torch.Tensor]) -> tuple[Sample, LinearStats]:
    """32 rows of each at most, of 64 features that are correlated."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    hessian = x.T @ x / len(x)
    importance = {name: torch.rand(len(weight), generator=generator) for name, weight in weights.items()}
    stats = LinearStats.prepare(Hessian(hessian.clone(), len(x)), METHODS["gptq"].needs)
    return Sample.of(weights, importance, hessian, 32), stats


def weights_of(*counts: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"w{at}": torch.randn(count, 64, generator=generator) for at, count in enumerate(counts)}


def test_linears_together_lose_what_each_does_alone() -> None:
    weights = weights_of(32, 8, 96)
    together, stats = sample_of(weights)
    assert together.counts == (32, 8, 32)
    found = together.losses(ROW, METHODS["gptq"], stats, map)
    for name, weight in weights.items():
        at = list(weights).index(name)
        part = slice(sum(together.counts[:at]), sum(together.counts[: at + 1]))
        assert torch.equal(together.rows[part], weight[:: -(-len(weight) // 32)])
        alone = Sample(
            (name,),
            (part.stop - part.start,),
            together.rows[part],
            together.importance[part],
            together.hessian,
        )
        assert found[name] == pytest.approx(alone.losses(ROW, METHODS["gptq"], stats, map)[name], rel=1e-3)


@pytest.mark.parametrize(
    "once",
    [scheme("binary-rank1"), scheme("int4", group_size="tensor"), scheme("book4"), scheme("nvfp4")],
    ids=str,
)
def test_linears_do_not_share_what_a_weight_has_once(once: Scheme) -> None:
    """Column scales and the scale of a tensor are those of each linear, whatever is beside it."""
    weights = weights_of(32, 8)
    weights["w1"] *= 100
    together, _ = sample_of(weights)
    row = (once,)
    found = together.losses(row, METHODS["mse"], None, map)
    for at, (one, part) in enumerate(
        zip(weights, torch.split(together.rows, list(together.counts)), strict=True)
    ):
        begin = sum(together.counts[:at])
        importance = together.importance[begin : begin + len(part)]
        alone = Sample((one,), (len(part),), part, importance, together.hessian)
        assert found[one] == alone.losses(row, METHODS["mse"], None, map)[one]


def test_a_linear_of_zeros_loses_nothing() -> None:
    sample, stats = sample_of({"zero": torch.zeros(8, 64), **weights_of(8)})
    found = sample.losses(ROW, METHODS["gptq"], stats, map)
    assert found["zero"] == (0.0,) * len(ROW) and min(found["w0"]) > 0


def test_weights_that_are_not_finite_are_refused_with_the_linears_of_the_input() -> None:
    weights = weights_of(8, 8)
    weights["w1"][3, 5] = math.nan
    sample, stats = sample_of(weights)
    with pytest.raises(FormatError, match=r"^'w0\.weight' or 'w1\.weight': "):
        sample.losses(ROW, METHODS["mse"], None, map)
    with pytest.raises(FormatError, match=r"^'w0\.weight' or 'w1\.weight': "):
        sample.losses(ROW, METHODS["gptq"], stats, map)
