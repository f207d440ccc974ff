"""The line of `benchmarks/machine.py`."""

import importlib
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_tree_that_is_not_its_commit_says_so(benchmark: ModuleType, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        names = ["-c", "user.name=x", "-c", "user.email=x"]
        return subprocess.run(
            ["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    assert benchmark.commit(tmp_path) == "no commit"
    (tmp_path / "file").write_text("1")
    results = tmp_path / "benchmarks" / "results" / "one.json"
    results.parent.mkdir(parents=True)
    results.write_text("1")
    git("add", ".")
    git("commit", "-qm", "One")
    (tmp_path / "other").write_text("not of the tree")
    results.write_text("2")
    assert benchmark.commit(tmp_path) == f"commit {git('rev-parse', '--short', 'HEAD')}"
    (tmp_path / "file").write_text("2")
    assert benchmark.commit(tmp_path) == f"commit {git('rev-parse', '--short', 'HEAD')} with changes"


def test_packages_that_are_not_installed_are_left_out(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(benchmark, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(benchmark, "commit", lambda: "commit 0")
    version = importlib.import_module("importlib.metadata").version("torch")
    assert benchmark.machine() == f"Some GPU, torch {torch.__version__}, torch {version}, commit 0"
