"""What pages for people tell them to type is typed here, on the bundled model."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.bench import bench_options, machine, worker
from quantkit.bench.speed import measure_speed
from quantkit.calibrate import scaling
from quantkit.errors import QuantkitError
from quantkit.packing.formats import FORMATS
from quantkit.packing.presets import PRESETS

from .cli.conftest import reloaded_here
from .conftest import Run
from .snippets import NEEDS, PAGES, ROOT, Block, blocks, code_blocks, commands, make_world

__all__ = ["reloaded_here"]

#: Most blocks of all pages that are not run, because of what they need: a new one is a decision.
MOST_NOT_RUN = 30


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reloaded_here: None) -> Iterator[Path]:
    """A directory with what pages name, as the working directory; what only takes time takes less here."""
    # It looks for fonts once, and finds them in the cache of the user alone.
    pytest.importorskip("matplotlib.font_manager")
    make_world(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Nobody answers there.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # A sixteenth of the calibration that a reader gets, short generations, and no fresh processes.
    monkeypatch.setattr("quantkit.quantization.blockwise.calibration_data.DEFAULT_SAMPLES", 8)
    monkeypatch.setattr(scaling, "EXPONENTS", (0.0, 0.5, 1.0))
    monkeypatch.setitem(bench_options.SPEED_DEFAULTS, "cpu", bench_options.SpeedDefaults((1,), (8, 16), 4))
    monkeypatch.setattr(worker, "speed_of", measure_speed)
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    tables = [(table, dict(table)) for table in (FORMATS, PRESETS)]
    yield tmp_path
    for table, before in tables:
        table.clear()
        table.update(before)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_of_a_page_runs(page: Path, world: Path, run: Run) -> None:
    """In order, in one directory and one namespace, as a reader would."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found = blocks(page)
    for number, block in enumerate(found):
        if not block.is_code or block.needs:
            continue
        where = f"{name_of(page)}:{block.line}"
        said = ""
        if block.language == "python":
            said = executed(block, names, where)
        else:
            for words in commands(block.text):
                assert words[0] == "quantkit", f"{where}: {words[0]} is not run; say what the block needs"
                done = run(*words[1:])
                assert bool(done.code) == ("fails" in block.words), f"{where}: {words}\n{done.out}{done.err}"
                said += done.err
        if "fails" in block.words:
            shown = found[number + 1]
            assert shown.language == "text", f"{where}: the error is not shown"
            missing = [part for part in parts(shown.text) if part not in unwrapped(said)]
            assert not missing, f"{where}: said is\n{said}"


def executed(block: Block, names: dict[str, Any], where: str) -> str:
    """Run Python; return the text of the error of a block that is to fail."""
    code = compile("\n" * block.line + block.text, where, "exec")
    if "fails" not in block.words:
        exec(code, names)
        return ""
    with pytest.raises((QuantkitError, ImportError, RuntimeError, ValueError)) as error:
        exec(code, names)
    return str(error.value)


def unwrapped(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def parts(shown: str) -> list[str]:
    """What an error has to have, in one line each; `...` stands for what differs."""
    return [part.strip() for part in unwrapped(shown).split("...") if part.strip()]


def test_what_is_not_run_says_what_it_needs() -> None:
    needed = Counter(word for _, block in code_blocks() for word in block.words if word != "fails")
    assert set(needed) <= {*NEEDS, "scheme"}, needed
    not_run = [f"{name_of(page)}:{block.line}" for page, block in code_blocks() if block.needs]
    assert len(not_run) <= MOST_NOT_RUN, not_run
    assert sum(1 for _ in code_blocks()) > 2 * len(not_run)


def test_commands_that_are_not_run_have_options_that_exist(run: Run) -> None:
    helps: dict[str, str] = {}
    for page, block in code_blocks():
        if not block.needs or block.language != "bash":
            continue
        for words in commands(block.text):
            program, *typed = words
            if program != "quantkit" and typed[2:4] != ["-m", "quantkit"]:
                continue
            command, *rest = typed if program == "quantkit" else typed[4:]
            known = helps.setdefault(command, run(command, "--help").out)
            used = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert used <= set(re.findall(r"--[\w-]+", known)), f"{name_of(page)}:{block.line}"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/guide/quickstart.md"], ids=name_of)
def test_a_clone_answers_after_five_commands(page: Path) -> None:
    """A stranger types lines from the top of the page until a model of the package index answers."""
    lines = [words for block in blocks(page) if block.is_code for words in commands(block.text)]
    programs = [words[:2] for words in lines]
    answered = programs.index(["quantkit", "generate"])
    assert programs[: answered + 1] == [
        ["python3", "-m"],
        ["pip", "install"],
        ["pip", "install"],
        ["quantkit", "quantize"],
        ["quantkit", "generate"],
    ]
    *_, download, quantize, generate = lines[: answered + 1]
    assert quantize[2].startswith(f"{download[download.index('--target') + 1]}/")
    assert quantize[3] == generate[2] and "--chat" in generate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "quantkit plan a \\\n  --format int4  # why\n\n# only this\n",
            [["quantkit", "plan", "a", "--format", "int4"]],
        ),
        ("quantkit generate out 'Once upon'\n", [["quantkit", "generate", "out", "Once upon"]]),
    ],
)
def test_commands_are_cut_as_a_shell_does(text: str, expected: list[list[str]]) -> None:
    assert commands(text) == expected
