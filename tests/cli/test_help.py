"""Help and completion: grouped, with examples that parse, and without torch."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantkit.bench.bench_options import MODES
from quantkit.checkpoint.engines import SERVERS
from quantkit.cli import choices, completion
from quantkit.cli.app import app
from quantkit.cli.help import EXAMPLES, GROUPS
from quantkit.devices import KINDS
from quantkit.eval.models import DTYPES
from quantkit.packing.packings import PACKINGS
from quantkit.packing.presets import (
    MENU_NAMES,
    PACKING_NAMES,
    PRESETS,
    SCALE_DTYPE_NAMES,
    SCHEMES,
    ZERO_POINT_NAMES,
)
from quantkit.packing.scale_types import SCALE_DTYPES
from quantkit.packing.zero_points import searched
from quantkit.recipes.candidates import MENUS
from quantkit.targets.table import TARGETS

from .conftest import Run
from .test_cli import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_that_its_options_take(run: Run, command: str) -> None:
    shown = run(command, "--help").out
    assert EXAMPLES[command]
    for line in EXAMPLES[command]:
        assert f"  {line}\n" in shown and len(line) <= 78
        name, asked, *rest = shlex.split(line)
        assert (name, asked) == ("quantkit", command)
        for word in rest:
            assert not word.startswith("-") or f" {word}" in shown, line


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal(command: str, width: int) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], prog_name="quantkit", terminal_width=width).output
    assert shown.startswith(f"Usage: quantkit {command} ")
    assert [line for line in shown.splitlines() if len(line) > width] == []


@pytest.mark.parametrize("command", GROUPS)
def test_options_of_large_commands_are_grouped(run: Run, command: str) -> None:
    shown = run(command, "--help").out
    for title in GROUPS[command]:
        assert f"\n{title}:\n" in shown
    rest = shown.partition("\nOther options:\n")[2].partition("\nExample")[0]
    assert 0 < rest.count("\n  -") <= 7, "sort new options into a group of cli/help.py"


def test_names_in_help_are_those_of_the_tables() -> None:
    assert searched() == ZERO_POINT_NAMES
    assert tuple(SCALE_DTYPES) == SCALE_DTYPE_NAMES
    # "bytes" follows from the activations.
    assert tuple(name for name in PACKINGS if name != "bytes") == PACKING_NAMES
    assert ("auto", *KINDS) == choices.DEVICES
    assert tuple(DTYPES) == choices.DTYPES
    assert tuple(SERVERS) == choices.SERVERS
    assert tuple(TARGETS) == choices.TARGETS
    assert tuple(dict.fromkeys(mode for of in MODES.values() for mode in of)) == choices.MODES
    assert tuple(MENUS) == MENU_NAMES


def completed(*words: str, env: dict[str, str] | None = None) -> list[str]:
    """What bash is given for the last of `words`; fails if that took an import of torch."""
    code = (
        "import sys; sys.argv = ['quantkit']\n"
        "from quantkit.cli.app import app\n"
        "try: app(prog_name='quantkit')\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    asked = {"COMP_WORDS": shlex.join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "_QUANTKIT_COMPLETE": "complete_bash", **asked, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_shell_completes_names(tmp_path: Path) -> None:
    assert completed("quantkit", "qua") == ["quantize"]
    assert "--format" in completed("quantkit", "plan", "--for")
    assert completed("quantkit", "plan", "x", "--format", "mxf") == ["mxfp8", "mxfp6", "mxfp4"]
    assert completed("quantkit", "export", "x", "y", "--to", "g") == ["gptq", "gguf"]
    (tmp_path / "models--ORG--a-model").mkdir()
    cache = {"HF_HUB_CACHE": str(tmp_path)}
    assert completed("quantkit", "plan", "ORG/", env=cache) == ["ORG/a-model"]


def test_what_completes() -> None:
    assert completion.names(*SCHEMES)("w4a16") == ["W4A16", "W4A16_ASYM"]
    assert completion.names(*PRESETS)("x") == []
    assert completion.lists("awq", "gptq")("awq,g") == ["awq,gptq"]


def test_models_are_directories_and_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "other", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "model.gguf").touch()
    (tmp_path / "model.txt").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "missing"))
    assert completion.models(f"{tmp_path}/m") == [f"{tmp_path}/model", f"{tmp_path}/model.gguf"]
    assert completion.models(f"{tmp_path}/missing/x") == []
