"""The distribution has a name of its own, and no text sends anybody to the `quantkit` of another author."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit import about

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: The other author's distribution, as something to install.
STRANGER = re.compile(
    r"\binstall\b[^\n#|]*[\s'\"`=]quantkit(?![\w-])|\bquantkit\[[a-z]|\bversion\(\"quantkit\"\)"
)


def test_name_and_version_stand_once() -> None:
    assert PROJECT["name"] == about.DISTRIBUTION != "quantkit"
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert quantkit.__version__ == about.VERSION
    assert PROJECT["scripts"] == {"quantkit": "quantkit.__main__:main"}


def test_extras_are_those_of_the_project() -> None:
    assert {name: [package] for name, package in about.EXTRAS.items()}.items() <= PROJECT[
        "optional-dependencies"
    ].items()
    assert about.pip_install("eval") == "`pip install 'lm-eval[hf]>=0.4.13'`"


def test_the_oldest_transformers_tested_is_the_oldest_allowed() -> None:
    (allowed,) = (one for one in PROJECT["dependencies"] if one.startswith("transformers"))
    oldest = about.TESTED_TRANSFORMERS[0].rpartition(".")[0]
    assert allowed == f"transformers>={oldest},<6"


def texts() -> list[Path]:
    folders = ("quantkit", "docs", "examples", "benchmarks", "tests", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.suffix == ".md" or path.name == "Makefile"]
    kinds = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ""}
    return [path for path in files if path.suffix in kinds and path != Path(__file__)]


def test_no_text_installs_the_distribution_of_another_author() -> None:
    files = texts()
    assert len(files) > 300 and ROOT / "README.md" in files
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        for match in STRANGER.finditer(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("text", "is_stranger"),
    [
        ("import quantkit  # pip install quantkit", True),
        ("`pip install -U 'quantkit[eval]'`", True),
        ("uv pip install quantkit==0.1.0", True),
        ("'quantkit[plots]'", True),
        ('metadata.version("quantkit")', True),
        ("pip install 'quantkit-lowbit @ git+https://a.b/quantkit@0'", False),
        ("pip install '.[eval]'", False),
    ],
)
def test_what_the_search_finds(text: str, is_stranger: bool) -> None:
    assert bool(STRANGER.search(text)) == is_stranger


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, origin: Mapping[str, Any] | None
) -> None:
    """Metadata of an installed distribution, first on the path, as pip writes it."""
    info = folder / f"{name.replace('-', '_')}-0.0.1rc1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1rc1\n")
    (info / "INSTALLER").write_text("pip\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(folder)


GIT = {
    "url": "https://a.b/quantkit",
    "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": "c0"},
}
WHEEL = {"archive_info": {"hashes": {}}}


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "quantkit-lowbit"),
        (GIT, "quantkit-lowbit @ git+https://a.b/quantkit@c0"),
        ({**WHEEL, "url": "https://a.b/q.whl"}, "quantkit-lowbit @ https://a.b/q.whl"),
        ({**WHEEL, "url": "file:///home/me/q.whl"}, None),
        ({"url": "file:///home/me/quantkit", "dir_info": {"editable": True}}, None),
        ({**GIT, "url": "ssh://git@a.b/quantkit"}, None),
    ],
)
def test_what_another_machine_can_install(
    origin: Mapping[str, Any] | None, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, about.DISTRIBUTION, origin)
    assert about.requirement() == expected


def test_a_build_in_a_source_tree_is_no_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, about.DISTRIBUTION, None)
    next(tmp_path.glob("*/INSTALLER")).unlink()
    assert about.requirement() is None


def test_a_source_tree_beside_the_distribution_of_another_author(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "quantkit", None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT)])
    assert about.requirement() is None
    code = "import quantkit, sys; print(quantkit.__version__)"
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path}, check=True
    )
    assert done.stdout == f"{about.VERSION}\n"
