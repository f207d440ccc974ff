"""The plot of errors: which points it has, what it leaves out and says, and what is refused."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from quantkit.checkpoint.model_record import LayerRecord
from quantkit.cli import plots
from quantkit.cli.plots import draw_errors
from quantkit.errors import OutputError, UsageError

from .conftest import SOURCE, STORIES, Run

LAYER = LayerRecord("linear", (8, 8), 1, "int4 g128 bfloat16", "gptq", 4.125, 0.1, "default", 0.01)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that are saved, which are looked at instead of pixels."""
    figures: list = []
    plain = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (figures.append(figure), plain(figure, path)))
    return figures


def layers(blocks: int = 12) -> dict[str, LayerRecord]:
    names = ("self_attn.q_proj", "mlp.down_proj")
    return {
        f"model.layers.{block}.{name}": replace(LAYER, output_error=0.01 * (block + 1) * (1 + i))
        for block in range(blocks)
        for i, name in enumerate(names)
    }


def test_a_line_for_each_kind_of_linear(tmp_path: Path, drawn: list) -> None:
    path = tmp_path / "errors.png"
    assert draw_errors(path, "a $model", layers()) == []
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert axes.get_yscale() == "log" and axes.get_title() == r"a \$model"
    assert axes.get_ylabel() == "relative squared error of outputs on the calibration data"
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {
        "self_attn.q_proj": [[block, 0.01 * (block + 1)] for block in range(12)],
        "mlp.down_proj": [[block, 0.02 * (block + 1)] for block in range(12)],
    }
    before = path.read_bytes()
    draw_errors(path, "a $model", layers())
    assert path.read_bytes() == before


def test_experts_are_points_around_a_line_and_lm_head_is_beyond_the_blocks(
    tmp_path: Path, drawn: list
) -> None:
    experts = {
        f"model.layers.{block}.mlp.experts.{e}.up_proj": replace(LAYER, output_error=0.1 * (e + 1))
        for block in (0, 1)
        for e in range(3)
    }
    assert draw_errors(tmp_path / "a.png", "a", {**experts, "lm_head": LAYER}) == []
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["mlp.experts.*.up_proj"] == [[0, pytest.approx(0.2)], [1, pytest.approx(0.2)]]
    assert lines["lm_head"] == [[2, 0.01]]
    assert sum(len(points.get_offsets()) for points in axes.collections) == 6
    assert [label.get_text() for label in axes.get_xticklabels()][-1] == "lm_head"


def test_without_calibration_the_errors_of_the_weights_are_drawn(tmp_path: Path, drawn: list) -> None:
    found = {name: replace(layer, output_error=None) for name, layer in layers(2).items()}
    assert draw_errors(tmp_path / "a.png", "a", found) == []
    assert drawn[0].axes[0].get_ylabel() == "relative squared error of weights"
    mixed = {
        **layers(2),
        "lm_head": replace(LAYER, output_error=None),
        "exact.0.x": replace(LAYER, output_error=0),
    }
    assert draw_errors(tmp_path / "a.png", "a", mixed) == ["lm_head", "exact.0.x"]


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    dense = replace(LAYER, scheme=None, relative_error=None, output_error=None)
    with pytest.raises(UsageError, match="a: no linear has a measured error, so there is nothing to plot"):
        draw_errors(tmp_path / "a.png", "a", {"x.0.y": dense})
    with pytest.raises(UsageError, match="a: every linear is exact"):
        draw_errors(tmp_path / "a.png", "a", {"x.0.y": replace(LAYER, relative_error=0.0, output_error=None)})
    with pytest.raises(OutputError, match=r"cannot write .*no/a\.png: No such file or directory"):
        draw_errors(tmp_path / "no/a.png", "a", layers(1))


def test_inspect_draws_or_says_why_not(run, packed: Path, tmp_path: Path, monkeypatch) -> None:
    done = run("inspect", packed, "--plot", tmp_path / "errors.png")
    assert done.code == 0 and done.out.endswith(f"wrote {tmp_path / 'errors.png'}\n")
    done = run("inspect", packed, "--plot", tmp_path / "errors.svg")
    assert done.code == 2 and "errors.svg does not end in .png" in done.err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("inspect", packed, "--plot", tmp_path / "none.png")
    assert (
        done.code == 7 and "plots need matplotlib" in done.err and "pip install 'matplotlib>=3.9'" in done.err
    )
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("command", ["eval", "demo"])
def test_a_report_without_matplotlib_is_announced(
    run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    asked: tuple[object, ...] = ("--text", STORIES, "--window", 32, "--max-windows", 1)
    if command == "eval":
        asked = (packed, "--against", SOURCE, *asked, "--no-per-block", "--report", tmp_path / "out")
    else:
        asked = (SOURCE, *asked, "--formats", "int4", "--out", tmp_path / "out")
    done = run(command, *asked)
    assert done.code == 0
    (line,) = [one for one in done.err.splitlines() if "matplotlib" in one]
    assert line.startswith("note: the report will have no plots: plots need matplotlib, the extra 'plots', ")
    assert line.endswith("Install it with `pip install 'matplotlib>=3.9'`.")
