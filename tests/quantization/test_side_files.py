"""Files that are copied along: what their readers cannot read is an error before work starts."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model import tokenizer as tokenizer_module
from quantkit.model.tokenizer import tokenizer
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.side_files import check_side_files
from quantkit.quantizing import quantize
from quantkit.runtime.load import load

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"
#: As `git clone` leaves it without git LFS.
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
DEFAULTS = "Mend it, or remove it: the model then generates with the defaults of transformers."


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "source"))


def test_what_can_be_read_is_left_alone(source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    assert check_side_files(checkpoint) is checkpoint
    # A model of people who have no tokenizer yet.
    for path in source.glob("*token*"):
        path.unlink()
    checkpoint = Checkpoint.open(source)
    assert check_side_files(checkpoint) is checkpoint


BROKEN = [
    ("generation_config.json", "", f"the file is empty; expected a JSON object. {DEFAULTS}"),
    (
        "generation_config.json",
        '{"max_length": ',
        f"the file is invalid (.*); expected a JSON object. {DEFAULTS}",
    ),
    ("generation_config.json", "[]", f"the file is []; expected a JSON object. {DEFAULTS}"),
    ("generation_config.json", '{"a": 1, "a": 2}', f"key 'a' occurs twice in one JSON object; .* {DEFAULTS}"),
    ("generation_config.json", '{"max_new_tokens": "x"}', f"cannot be read: TypeError: .*. {DEFAULTS}"),
    (
        "generation_config.json",
        '{"eos_token_id": ["x"]}',
        f"eos_token_id is ['x']; expected a token .* {DEFAULTS}",
    ),
    (
        "generation_config.json",
        "<!DOCTYPE html>",
        "is an HTML page; expected the file itself. Download it again",
    ),
    (
        "tokenizer.json",
        "",
        "is not a tokenizer (EOF .*); expected one of the library tokenizers. Download it again",
    ),
    (
        "tokenizer.json",
        "{}",
        "is not a tokenizer (.*); expected one of the library tokenizers. Download it again",
    ),
    (
        "tokenizer.json",
        POINTER,
        "is a git LFS pointer; expected the file itself. Run `git lfs pull` in the dir",
    ),
    (
        "tokenizer.model",
        POINTER,
        "is a git LFS pointer; expected the file itself. Run `git lfs pull` in the dir",
    ),
    (
        "tokenizer.model",
        "",
        "is empty; expected a vocabulary. Download it again, or copy the original model's",
    ),
    (
        "tokenizer_config.json",
        "{",
        "cannot be read: JSONDecodeError: .* or copy the original model's tokenizer_c",
    ),
    ("tokenizer_config.json", "[1]", "is [1]; expected a JSON object. Mend it."),
    (
        "tokenizer_config.json",
        '{"tokenizer_class": 5}',
        "no tokenizer can be made with this file, and without it",
    ),
    (
        "tokenizer_config.json",
        '{"chat_template": "{% if %}"}',
        "cannot be read: TemplateSyntaxError: .* Mend it.",
    ),
    (
        "tokenizer_config.json",
        '{"chat_template": [{}]}',
        "chat_template has {}; expected a template. Mend it.",
    ),
    ("special_tokens_map.json", "null", "is None; expected a JSON object. Download it again"),
    (
        "special_tokens_map.json",
        '{"eos_token": 5}',
        "no tokenizer can be made with this file, and without it one",
    ),
    (
        "added_tokens.json",
        '{"a": "b"}',
        "no tokenizer can be made with this file, and without it one can (TypeErr",
    ),
    ("vocab.txt", "\xff", "cannot be read: UnicodeDecodeError: .*. Download it again"),
    (
        "chat_template.jinja",
        "{% for %}",
        "cannot be read: TemplateSyntaxError: .* Mend the template, or remove",
    ),
    ("chat_template.json", "{}", "chat_template is None; expected a template. Mend the template, or remove"),
    ("preprocessor_config.json", "", "cannot be read: JSONDecodeError: .* or remove it: text needs none."),
    ("README.md", POINTER, "is a git LFS pointer; expected the file itself. Run `git lfs pull`"),
    (
        "quantkit_manifest.json",
        "{}",
        "a copy cannot have the name 'quantkit_manifest.json'; .* Rename or remove",
    ),
    (
        "Quantkit_Manifest.json",
        "{}",
        "a copy cannot have the name 'Quantkit_Manifest.json'; .* Rename or remove",
    ),
]


@pytest.mark.parametrize(("name", "text", "message"), BROKEN)
def test_what_cannot_be_read_is_named(source: Path, name: str, text: str, message: str) -> None:
    (source / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        check_side_files(Checkpoint.open(source))
    found = str(caught.value)
    assert found.startswith(f"{source / name}: ")
    at = 0
    for part in message.split(".*"):
        assert part in found[at:], found
        at = found.index(part, at) + len(part)
    assert "quantkit-tokenizer-" not in found


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "generation_config.json", "chat_template.jinja", "notes.txt"]
)
def test_what_is_no_file_is_not_left_out_in_silence(source: Path, name: str) -> None:
    path = source / name
    path.unlink(missing_ok=True)
    for target in ("../../blobs/gone", name):
        path.symlink_to(target)
        with pytest.raises(
            CheckpointError, match=rf"{name}: is a link that leads to no file; .* or remove it"
        ):
            plan(source, QuantizeOptions())
        path.unlink()
    for make in (os.mkfifo, os.mkdir):
        make(path)
        if name == "notes.txt":  # which nobody asks for
            plan(source, QuantizeOptions())
        else:
            with pytest.raises(CheckpointError, match=rf"{name}: is no regular file; .* or remove it"):
                plan(source, QuantizeOptions())
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()


def test_plan_and_quantize_refuse_alike_and_resume_goes_on(source: Path, tmp_path: Path) -> None:
    path, out = source / "generation_config.json", tmp_path / "out"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    errors = []
    for call in (
        lambda: plan(source, QuantizeOptions()),
        lambda: quantize(source, out),
        lambda: quantize(source, out, resume=True),
    ):
        with pytest.raises(CheckpointError, match=r"generation_config\.json: the file is invalid") as caught:
            call()
        errors.append(str(caught.value))
    assert len(set(errors)) == 1
    assert not out.exists()
    path.write_bytes(whole)
    quantize(source, out, resume=True)
    assert (out / path.name).read_bytes() == whole
    assert load(out, device="cpu").generation_config.eos_token_id == json.loads(whole)["eos_token_id"]
    assert tokenizer(out)("a").input_ids


def test_a_file_that_breaks_in_the_run_is_copied_once_it_is_mended(source: Path, tmp_path: Path) -> None:
    path, out = source / "tokenizer.json", tmp_path / "out"
    whole = path.read_bytes()

    def break_off(*_: object) -> None:
        path.write_bytes(b"{")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, on_plan=break_off)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        quantize(source, out, resume=True)
    path.write_bytes(whole)
    quantize(source, out, resume=True)
    assert (out / "tokenizer.json").read_bytes() == whole


def test_what_nothing_here_can_read_is_copied_with_a_warning(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "tokenizer.json").unlink()
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda _: None)
    (warning,) = check_side_files(Checkpoint.open(source)).warnings
    assert warning.startswith("the tokenizer is copied, and was not read: ")
    assert "reading it takes sentencepiece, which is not installed" in warning

    config = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    (source / "tokenizer.model").unlink()
    (source / "vocab.json").write_text('{"a": 0}')
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (warning,) = check_side_files(Checkpoint.open(source)).warnings
    assert "auto_map names code of its repository, which quantkit never runs" in warning


def test_what_is_not_copied_is_not_read(source: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("{")
    (source / "added_tokens.json").symlink_to(tmp_path / "outside")
    (source / "results.json").write_text("nobody reads this")
    os.mkfifo(source / "pipe.txt")
    checkpoint = check_side_files(Checkpoint.open(source))
    assert [path.name for path in checkpoint.side_files if path.name in ("results.json", "pipe.txt")] == [
        "results.json"
    ]


def test_halves_of_two_tokenizers(source: Path) -> None:
    for path in source.glob("*token*"):
        path.unlink()
    (source / "config.json").write_text(
        json.dumps({**json.loads((SOURCE / "config.json").read_text()), "model_type": "gpt2"})
    )
    (source / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(CheckpointError, match=r"vocab\.json: no tokenizer can be made of it \(.*merges"):
        check_side_files(Checkpoint.open(source))


@pytest.mark.parametrize("read", [tokenizer_module.vocabularies, check_side_files])
def test_a_disk_that_does_not_list_the_source_is_an_error_in_words(
    source: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Any], object]
) -> None:
    checkpoint = Checkpoint.open(source)

    def refuse(path: Path) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"source: cannot be examined: Input/output error \(EIO\)"):
        read(checkpoint if read is check_side_files else source)
