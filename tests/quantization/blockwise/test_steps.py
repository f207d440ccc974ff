"""A new rounding is one step and one row of the table: nothing else of quantkit knows roundings by name."""

import importlib
from collections.abc import Set
from dataclasses import dataclass

import pytest
import torch

from quantkit.calibrate import methods, summaries
from quantkit.calibrate.gptq import round_nearest
from quantkit.calibrate.hessian import Hessian, gram
from quantkit.calibrate.linear_stats import LinearStats, Need
from quantkit.calibrate.methods import METHODS, Method
from quantkit.calibrate.scale_search import nearest
from quantkit.calibrate.steps import Rounded, Rounding, Rows
from quantkit.errors import FormatError
from quantkit.packing.schemes import scheme
from quantkit.quantizing import quantize
from quantkit.verification.verify import verify

from ...tiny.calibrated import data, write


@dataclass(frozen=True)
class Ldlq(Rounding):
    """LDLQ column by column, in its slow and obvious form."""

    @property
    def needs(self) -> Set[Need]:
        return frozenset({"hessian", "cholesky"})

    def apply(self, rows: Rows, stats: LinearStats) -> Rounded:
        assert stats.factor is not None
        done, scale, order = round_nearest(rows), rows.wide(rows.scale), stats.factor.order
        zero = None if rows.zero_point is None else rows.wide(rows.zero_point)
        values, errors = done.values, torch.zeros_like(done.errors)
        for at, column in enumerate(order.tolist()):
            here = slice(column, column + 1)
            target = rows.weights[:, column] + errors[:, order] @ stats.factor.coupling[:, at]
            units = (target / scale[:, column])[:, None]
            values[:, here] = nearest(units, None if zero is None else zero[:, here], rows.scheme)
            errors[:, column] = rows.weights[:, column] - values[:, column] * scale[:, column]
        return Rounded(values, rows.scale, errors)

    def __str__(self) -> str:
        return "ldlq"


@pytest.fixture
def ldlq(monkeypatch: pytest.MonkeyPatch) -> Method:
    # Its help texts list the methods that there are when it is imported, for all tests of this process.
    importlib.import_module("quantkit.cli.options")
    row = Method("ldlq", METHODS["gptq"].scale_search, Ldlq())
    monkeypatch.setitem(methods.METHODS, "ldlq", row)
    monkeypatch.setitem(summaries.SUMMARIES, "ldlq", summaries.Summary("slow", "as gptq, slowly"))
    return row


def test_a_new_rounding_quantizes_a_model_and_is_listed(tmp_path, text, ldlq, run):
    """Its codes are those of `gptq`, which computes the same in blocks."""
    source, errors = write(tmp_path, num_hidden_layers=1), {}
    for method in ("gptq", "ldlq"):
        out = tmp_path / method
        result = quantize(source, out, format="int3", group_size=32, method=method, calibration=data(text))
        assert not any(check.problems for check in verify(out, reload=False))
        errors[method] = sum(one.output_error or 0.0 for one in result.measured.values())
    assert errors["ldlq"] == pytest.approx(errors["gptq"], rel=0.02)
    listed = next(line for line in run("methods").out.splitlines() if line.startswith("ldlq"))
    assert listed.split() == ["ldlq", "none", "Hessian", "mse,", "weighted", "ldlq"]


def test_what_needs_data_is_refused_for_schemes_that_rows_alone_do_not_make(ldlq):
    with pytest.raises(
        FormatError, match=r"'ldlq' has no way to choose several planes.*take one of rtn, mse"
    ):
        ldlq.check(scheme("binary-residual", group_size=32))


def test_a_rounding_to_other_than_the_nearest_needs_data():
    @dataclass(frozen=True)
    class Blind(Ldlq):
        needs: Set[Need] = frozenset()

    with pytest.raises(AssertionError, match="nearest"):
        Method("blind", METHODS["mse"].scale_search, Blind())


@pytest.mark.parametrize("method", METHODS)
def test_statistics_are_made_only_for_steps_that_need_them(method):
    needs = METHODS[method].needs
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    stats = LinearStats.prepare(Hessian(gram(x) / 100, 100, torch.zeros(8, 8)), needs)
    assert (stats.factor is not None) == ("cholesky" in needs)
    assert stats.corrects == ("input_error" in needs) == METHODS[method].changes_target(stats)
    assert METHODS[method].needs_data == ("hessian" in needs) and METHODS[method].note(stats) is None
