"""`quantkit formats`: the table, the codes, the noise and its plot, and what it refuses."""

import json
import re
import sys
from pathlib import Path

import pytest

from quantkit.calibrate import noise
from quantkit.cli import console
from quantkit.packing.formats import FORMATS
from quantkit.packing.presets import PRESETS

from .conftest import Run

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "SAMPLE_SHAPE", (2, 256))


def test_the_table_has_every_preset(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    done = run("formats")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *PRESETS]
    assert max(map(len, lines)) <= 80
    assert re.search(r"\nint4 +int4 +4\.125 +128 bfloat16 -8\.\.7 +16 \S+", done.out)
    assert re.search(r"\nnvfp4 +fp4-e2m1 +4\.500 +16 e4m3 +-6\.\.6 +15 \S+", done.out)


def test_the_table_as_json(run: Run) -> None:
    rows = json.loads(run("formats", "--json").out)
    assert [row["name"] for row in rows] == list(PRESETS)
    assert all(row["bits_per_weight"] > FORMATS[row["format"]].bits for row in rows)
    assert all(row["kernel"] for row in rows)
    (row,) = json.loads(run("formats", "mxfp4", "--json").out)
    assert row["bits_per_weight"] == pytest.approx(4.25, abs=1e-3)
    device, kernel = row.pop("device"), row.pop("kernel")
    assert device in ("cpu", "cuda") and kernel
    assert row == {
        "name": "mxfp4",
        "format": "fp4-e2m1",
        "bits_per_weight": row["bits_per_weight"],
        "group_size": 32,
        "scale_dtype": "e8m0",
        "global_scale": False,
        "min": -6.0,
        "max": 6.0,
        "values": 15,
        "planes": 1,
        "column_scale": False,
    }


def test_the_table_counts_planes_column_scales_and_code_books(run: Run) -> None:
    rows = {row["name"]: row for row in json.loads(run("formats", "--json").out)}
    assert rows["binary-residual"]["bits_per_weight"] == pytest.approx(2 + 32 / 128, abs=1e-4)
    assert rows["binary-rank1"]["bits_per_weight"] == pytest.approx(1 + 32 / 4096, abs=1e-4)
    assert rows["book4"]["bits_per_weight"] == pytest.approx(4.25 + 17 * 32 / 4096**2, abs=1e-5)
    assert [rows[name]["values"] for name in ("binary-residual", "binary-rank1", "book4")] == [4, 2, 16]


def test_codes_of_planes_have_a_value_for_each(run: Run) -> None:
    done = run("formats", "binary-residual", "--codes").out
    assert done.startswith("binary: sums of 2 numbers in 2 bits, plane 0 first")
    assert re.search(r"\n +1 +01 +1, -1\n", done)
    (data,) = [json.loads(run("formats", "binary-residual", "--codes", "--json").out)]
    assert (data["bits"], data["planes"], data["codes"][2]["value"]) == (2, 2, [-1.0, 1.0])


def test_fitted_codes_say_so(run: Run) -> None:
    done = run("formats", "book4", "--codes").out
    assert done.startswith("codebook4: 16 numbers in 4 bits, stored with each tensor\n")
    assert done.count("fitted") == 16
    data = json.loads(run("formats", "book4", "--codes", "--json").out)
    assert data["fitted"] and {row["value"] for row in data["codes"]} == {None}


@pytest.mark.parametrize(
    "name", [n for n in (*PRESETS, *FORMATS) if n not in ("binary-residual", "book4", "codebook4")]
)
def test_codes_lists_each_code_with_its_value(run: Run, name: str) -> None:
    chosen = FORMATS[PRESETS[name].format if name in PRESETS else name]
    lines = run("formats", name, "--codes").out.splitlines()
    rows = [line.split(maxsplit=2) for line in lines[2:]]
    assert [int(row[0]) for row in rows] == list(range(2**chosen.bits))
    assert [int(row[1], 2) for row in rows] == list(range(2**chosen.bits))
    assert all(len(row[1]) == chosen.bits for row in rows)
    numbers = [float("nan") if row[2] == "no number" else float(row[2]) for row in rows]
    assert numbers == pytest.approx(chosen.values, rel=1e-8, nan_ok=True)
    data = json.loads(run("formats", name, "--codes", "--json").out)
    assert (data["format"], data["bits"]) == (chosen.name, chosen.bits)
    assert [row["code"] for row in data["codes"]] == list(range(2**chosen.bits))
    found = [float("nan") if row["value"] is None else row["value"] for row in data["codes"]]
    assert found == pytest.approx(chosen.values, rel=0, abs=0, nan_ok=True)


def test_codes_that_are_no_number(run: Run) -> None:
    assert re.search(r"\n +3 +11 +no number\n$", run("formats", "ternary", "--codes").out)
    assert json.loads(run("formats", "ternary", "--codes", "--json").out)["codes"][3] == {
        "code": 3,
        "bits": "11",
        "value": None,
    }


def test_noise_is_a_table_and_a_plot(run: Run, small: None, tmp_path: Path) -> None:
    plot = tmp_path / "noise.png"
    done = run("formats", "--noise", "--plot", plot)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("relative squared error of 2x256 weights, seed 0")
    assert len(lines) == 3 + len(noise.known_schemes()) + 1
    assert re.search(r"\nint4 asym-float +4\.250( +0\.0\d+){4}\n", done.out)
    assert lines[-1] == f"wrote {plot}"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_noise_is_json_too(run: Run, small: None) -> None:
    data = json.loads(run("formats", "--noise", "--json").out)
    assert (data["shape"], data["seed"]) == ([2, 256], 0)
    assert [row["label"] for row in data["schemes"]] == list(noise.known_schemes())
    for row in data["schemes"]:
        assert set(row["relative_squared_error"]) == {"rtn", "mse"}
        assert 0 < row["relative_squared_error"]["mse"]["gaussian"] < 1


def test_a_plot_without_matplotlib(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("formats", "--noise", "--plot", tmp_path / "noise.png")
    assert done.code == 7
    assert "pip install 'matplotlib>=3.9'" in done.err
    assert done.out == ""


def test_a_plot_that_cannot_be_written(run: Run, small: None, tmp_path: Path) -> None:
    done = run("formats", "--noise", "--plot", tmp_path / "missing" / "noise.png")
    assert done.code == 5
    assert "cannot write" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--codes",), 2, "--codes needs the name of a format"),
        (("nf4", "--noise"), 2, "leave out NAME and --codes"),
        (("--plot", "x.png"), 2, "add --noise"),
        (("--noise", "--plot", "x.pdf"), 2, "does not end in .png"),
        (("int9",), 4, "unknown format 'int9'; known are int8,"),
        (("int9", "--codes"), 4, "unknown number format 'int9'"),
    ],
)
def test_wrong_options_are_refused_in_words(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run("formats", *arguments)
    assert done.code == code
    assert message in done.err


def test_the_page_is_what_the_command_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    # The kernels are those of the machine that is asked.
    bare = [line.rstrip().rpartition(" ")[0] for line in run("formats").out.splitlines()]
    assert [line for line in bare if line not in PAGE] == []
    assert run("formats", "ternary", "--codes").out in PAGE


def test_the_page_has_the_noise_of_every_scheme() -> None:
    for label, chosen in noise.known_schemes().items():
        assert f"\n| {label} | {chosen} | {noise.bits_per_weight(chosen):.3f} | " in PAGE


def test_schemes_name_what_reads_them(run: Run) -> None:
    rows = {row["name"]: row for row in json.loads(run("formats", "--schemes", "--json").out)}
    assert rows["W8A8"] == {
        "name": "W8A8",
        "weights": "int8 channel bytes bfloat16",
        "inputs": "int8 token",
        "readers": ["vLLM", "SGLang", "transformers"],
    }
    assert rows["W4A16"]["inputs"] == "as they are" and rows["W4A4"]["readers"] == []
    table = run("formats", "--schemes").out
    assert "W4A8        int4 g128 bfloat16          int8 token        transformers" in table
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    assert "\n".join(line.rstrip() for line in table.splitlines()[:4]) in page
    refused = run("formats", "int4", "--schemes")
    assert refused.code == 2 and "--schemes lists all schemes; leave out NAME" in refused.err
