"""The tables and the plot of `benchmarks/gpu_matmul.py`, from a stored run."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

MS = (1, 16, 64, 1024)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    def row(name: str, shape: str, m: int, us: float, library: str) -> dict[str, object]:
        return {
            "format": name, "shape": shape, "m": m, "us": us, "floor_us": 4.0, "dense_us": 20.0 * m**0.5,
            "bytes": 1 << 23, "library": library,
        }  # fmt: skip

    shapes = {"llama3-8b.o": [4096, 4096], "64x128": [64, 128]}
    rows = [row(name, "llama3-8b.o", m, 5.0 * m**0.5, "quantkit") for name in ("int4", "nf4") for m in MS]
    rows += [row("int4", "llama3-8b.o", m, 10.0 * m, "tinygemm") for m in MS[:3]]
    rows += [row("int4", "64x128", m, 5.0, "quantkit") for m in MS]
    run = {
        "about": "Some GPU, commit 0",
        "shapes": shapes,
        "rows": rows,
        "notes": ["gemlite is not installed."],
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    return path


def test_markdown_has_multiples_of_the_floor_and_then_of_dense_speed(
    benchmark: ModuleType, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.main(["--from", str(stored), "--markdown"])
    assert capsys.readouterr().out == (
        "N x K = 4096 x 4096 (llama3-8b.o):\n\n"
        "| format | floor | M=1 | M=16 | M=64 | M=1024 |\n"
        "|---|---|---|---|---|---|\n"
        "| dense bf16 | | 20.0 | 80.0 | 160 | 640 |\n"
        "| int4 | 4.0 | 5.0, 1.25 | 20.0, 5.00 | 40.0, 4.00 | 160, 4.00 |\n"
        "| nf4 | 4.0 | 5.0, 1.25 | 20.0, 5.00 | 40.0, 4.00 | 160, 4.00 |\n"
        "| tinygemm int4 | 4.0 | 10.0, 2.50 | 160, 40.00 | 640, 0.25 | |\n\n"
        "N x K = 64 x 128 (64x128):\n\n"
        "| format | floor | M=1 | M=16 | M=64 | M=1024 |\n"
        "|---|---|---|---|---|---|\n"
        "| dense bf16 | | 20.0 | 80.0 | 160 | 640 |\n"
        "| int4 | 4.0 | 5.0, 1.25 | 5.0, 1.25 | 5.0, 32.00 | 5.0, 128.00 |\n\n"
        "gemlite is not installed.\n"
    )


def test_text_has_the_same_in_columns_and_says_where_it_was_measured(
    benchmark: ModuleType, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.main(["--from", str(stored), "--formats", "nf4", "--shapes", "llama3-8b.o", "--m", "1,64"])
    first, _, title, *lines = capsys.readouterr().out.splitlines()
    assert first == "Some GPU, commit 0" and title.startswith("llama3-8b.o 4096x4096: ")
    assert lines == [
        "format         floor         M=1        M=64",
        "dense bf16                  20.0         160",
        "nf4              4.0   5.0, 1.25  40.0, 4.00",
        "tinygemm int4    4.0  10.0, 2.50   640, 0.25",
        "",
        "gemlite is not installed.",
    ]


def test_a_stored_run_is_what_was_measured(benchmark: ModuleType, stored: Path, tmp_path: Path) -> None:
    run = benchmark.Run.load(stored)
    run.save(tmp_path / "again.json")
    assert benchmark.Run.load(tmp_path / "again.json") == run


def test_the_plot_has_a_line_per_format_and_a_bar_per_few_rows(
    benchmark: ModuleType, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []

    class Figure(figure_module.Figure):
        def savefig(self, path: Path, **options: object) -> None:
            figures.append(self)
            super().savefig(path, **options)

    monkeypatch.setattr(figure_module, "Figure", Figure)
    path = tmp_path / "plot.png"
    benchmark.main(["--from", str(stored), "--formats", "int4,nf4", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    speeds, _, floors, _ = figures[0].axes
    lines = {line.get_label(): line for line in speeds.get_lines()}
    assert list(lines["int4"].get_xdata()) == list(MS) and list(lines["int4"].get_ydata()) == [4.0] * 4
    assert list(lines["tinygemm int4"].get_ydata()) == [2.0, 0.5, 0.25]
    assert lines["tinygemm int4"].get_linestyle() == "--" and lines["int4"].get_linestyle() == "-"
    assert lines["int4"].get_linewidth() > lines["nf4"].get_linewidth()
    assert [bar.get_height() for bar in floors.patches] == [1.25, 5.0, 1.25, 5.0]
    assert [line.get_ydata()[0] for line in floors.get_lines()] == [1, 1.25]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["int4", "nf4", "tinygemm int4"]


def test_unless_asked_a_plot_has_the_well_known_formats(benchmark: ModuleType, stored: Path) -> None:
    assert benchmark.plotted(benchmark.Run.load(stored)).formats() == ["int4"]
    only = benchmark.Run.load(stored).only(["nf4"])
    assert benchmark.plotted(only).formats() == ["nf4"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--formats", "int4,int5"], "the run has no format int5; it has int4, nf4"),
        (["--m", "2"], "the run has no M 2; it has 1, 16, 64, 1024"),
        (["--peers", "gemlite"], "the run has no peer gemlite; it has tinygemm"),
        (["--json", "x.json"], "argument --json: not allowed with argument --from"),
        (["--load", "0.3"], "--rest and --load are for products that are timed; --from shows a stored run"),
        (["--load", "inf"], "argument --load: invalid seconds value: 'inf'"),
        (["--load", "-1"], "argument --load: invalid seconds value: '-1'"),
    ],
)
def test_what_a_stored_run_lacks_is_an_error(
    benchmark: ModuleType, stored: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--from", str(stored), *options])
    assert error in capsys.readouterr().err


def test_what_is_no_run_is_an_error(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    for text in ("[]", "{", '{"shapes": {"a": 1}}'):
        path.write_text(text)
        with pytest.raises(SystemExit):
            benchmark.main(["--from", str(path)])
        assert f"{path} is no run that --json stored" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--formats", "int4", "--m", "1"])
    assert "there is no GPU here; --from" in capsys.readouterr().err


def test_a_peer_that_fails_for_an_m_is_noted_and_the_rest_is_measured(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(x: object) -> None:
        if x == 16:
            raise RuntimeError("out of resource\nand more")

    monkeypatch.setattr(benchmark, "PEERS", {"other": benchmark.Peer(lambda *_: [call] * 3, 64)})
    monkeypatch.setattr(benchmark, "activations", lambda m, k: m)
    monkeypatch.setattr(
        benchmark, "graph_time", lambda calls, *_, **__: 7.0 if not any(f() for f in calls) else 0.0
    )
    nbytes = 64 * 128 // 2 + 64 * 4
    dense_us, clock = dict.fromkeys(MS, 9.0), benchmark.Clock(floors={nbytes >> 15: 3.0})
    failed, *rows = sorted(
        benchmark.time_peer("other", "64x128", (64, 128), dense_us, clock),
        key=lambda row: not isinstance(row, str),
    )
    assert failed == "other failed for 64x128 at M=16: RuntimeError: out of resource"
    # 64 is the most rows of x that it takes.
    assert [(row.m, row.us, row.floor_us, row.name) for row in rows] == [
        (1, 7.0, 3.0, "other int4"),
        (64, 7.0, 3.0, "other int4"),
    ]


def test_products_that_draw_much_power_rest_and_others_go_before(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def graph_time(calls: object, replays: int = 10, **before: float) -> float:
        asked.append((replays, before))
        return 7.0

    monkeypatch.setattr(benchmark, "graph_time", graph_time)
    clock = benchmark.Clock(load=0.3)
    assert [clock.time([], m) for m in (64, 128)] == [7.0, 7.0]
    assert asked == [(10, {}), (30, {"rest": 0.0, "load": 0.3}), (30, {"rest": 0.12, "load": 0.3})]
    asked.clear()
    assert benchmark.Clock(rest=0.0).time([], 128) == 7.0
    assert asked == [(10, {}), (30, {"rest": 0.0, "load": 0.0})]


def test_a_run_says_what_it_was_loaded_with(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "machine", lambda: "Some GPU")
    none: dict[str, tuple[int, int]] = {}
    assert benchmark.measure([], [], none, [1], 1, None, benchmark.Clock()).about == "Some GPU"
    loaded = benchmark.measure([], [], none, [1], 1, None, benchmark.Clock(load=0.3))
    assert loaded.about == "Some GPU, after 0.3 s of the same product"
    plain = benchmark.measure([], [], none, [1], 1, None, benchmark.Clock(rest=0.0))
    assert plain.about == "Some GPU, after 0 s of rest from M = 128 on"
