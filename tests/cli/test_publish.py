"""`quantkit report` and `quantkit push`."""

import json
import shutil
from pathlib import Path

import pytest

from quantkit.publish import upload

from .conftest import SOURCE, Run


def test_what_report_writes_push_uploads(
    run: Run, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = tmp_path / "card"
    done = run("report", packed, "-o", card, "--license", "mit", "--repo", "me/tiny")
    assert done.code == 0
    assert done.out == f"wrote {card / 'README.md'}\n"
    assert "note: the card names no base model" in done.err and "license" not in done.err
    (card / "bench-memory.png").write_bytes(b"png")

    done = run("push", packed, "me/tiny", "--card", card, "--dry-run")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "       3 B  bench-memory.png" in lines
    assert lines[-1].endswith("; nothing was uploaded")

    given = {}

    def push(prepared: upload.Upload, repo: str, **options: object) -> str:
        given.update(options, repo=repo, files=prepared.files)
        return "https://hub/commit/1"

    monkeypatch.setattr(upload, "push", push)
    done = run("push", packed, "me/tiny", "--card", card, "--private", "--revision", "dev", "--json")
    printed = json.loads(done.out)
    assert printed["commit"] == "https://hub/commit/1"
    assert set(printed["files"]) == set(given["files"]) > {"README.md", "model.safetensors"}
    assert (given["private"], given["revision"], given["repo"]) == (True, "dev", "me/tiny")
    assert given["files"]["README.md"] == (card / "README.md").read_bytes()


def test_report_replaces_a_card_only_with_overwrite(run: Run, packed: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("by hand")
    done = run("report", packed, "-o", tmp_path)
    assert done.code == 5
    assert f"output {tmp_path} already holds README.md. Replace a card with --overwrite" in done.err
    assert readme.read_text() == "by hand"
    assert run("report", packed, "-o", tmp_path, "--overwrite").code == 0
    assert "by hand" not in readme.read_text()


def test_report_keeps_the_card_that_came_with_the_checkpoint(run: Run, tmp_path: Path) -> None:
    source = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    (source / "README.md").write_text("the original's")
    out = tmp_path / "out"
    assert run("quantize", source, out, "-m", "rtn", "--no-check").code == 0
    for more in ((), ("--overwrite",)):
        done = run("report", out, "-o", out, *more)
        assert done.code == 5 and (out / "README.md").read_text() == "the original's"
        assert f"{out / 'README.md'} is the card of the original model" in done.err
        assert f"`quantkit push {out} REPO --card card` uploads it" in done.err
        assert "Replace a card with" not in done.err


def test_push_without_a_card_makes_one(run: Run, packed: Path) -> None:
    done = run("push", packed, "me/tiny", "--dry-run", "--json")
    assert json.loads(done.out)["files"]["README.md"] > 500
    assert "note: the card names no license" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("push", "me/x", "--card", "none"), 2, "cannot read the card in none"),
        (("push", "me/x", "--card", "c", "--license", "mit"), 2, "--card has its own base model and license"),
        (("report", "--bench", "none.json"), 2, "cannot read none.json"),
        (("report", "--eval", "none.json"), 2, "cannot read none.json"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(
    run: Run,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *rest = arguments
    done = run(command, packed, *rest)
    assert done.code == code
    assert message in done.err
