"""Shards, indexes and what else is in a directory: rows 16 to 27."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import CheckpointError, OutputError

from ..conftest import Run
from ..support.compare import assert_equal
from .faults import (
    CONFIG,
    INDEX,
    ONE,
    QUICK,
    SOURCE,
    TWO,
    WEIGHTS,
    Message,
    edit_json,
    edit_tensors,
    refused,
    snapshot,
)

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
ONE_REVISION = "Download the index and the shards again, of one revision"


def map_to(source: Path, **shards: Any) -> None:
    """Let the index say that these tensors are in these shards."""
    edit_json(source / INDEX, lambda index: index["weight_map"].update(shards))


def both_are_refused(run: Run, source: Path, out: Path, message: Message) -> None:
    for arguments in (("quantize", source, out), ("plan", source)):
        refused(run, arguments, CheckpointError, message, source.parent)


def goes_on(run: Run, source: Path, out: Path, warning: str, expected: Path = SOURCE) -> None:
    """`quantize` and `plan` warn, and what is written is what `expected` gives."""
    done = run("quantize", source, out, *QUICK)
    assert done.code == 0, done.err
    assert f"note: {warning}\n" in done.err
    assert run("quantize", expected, out.with_name("expected"), *QUICK).code == 0
    tensors, wanted = load_file(out / WEIGHTS), load_file(out.with_name("expected") / WEIGHTS)
    assert_equal(tensors, wanted)
    assert run("verify", out, "--no-reload").code == 0


@pytest.mark.fault(16)
def test_all_missing_shards_are_listed(run: Run, sharded: Path, out: Path) -> None:
    for shard in (ONE, TWO):
        (sharded / shard).unlink()
    message = Message(sharded, f"are missing: {ONE}, {TWO}", f"2 of the 2 shards in {INDEX}", "Download them")
    both_are_refused(run, sharded, out, message)


@pytest.mark.fault(17, 22)
@pytest.mark.parametrize(
    "shard",
    [
        "../../x.safetensors",
        "/x.safetensors",
        r"\\host\x.safetensors",
        r"C:\x.safetensors",
        "a/b.safetensors",
        "..",
        "",
        "\0.safetensors",
        "x.bin",
        3,
        None,
        ["a"],
    ],
)
def test_an_index_that_names_something_else_than_a_file_beside_it(
    run: Run, sharded: Path, out: Path, shard: object
) -> None:
    map_to(sharded, **{EMBEDDING: shard})
    message = Message(
        sharded / INDEX,
        f"the shard of tensor '{EMBEDDING}' is {shard!r}",
        "expected the name of a file beside the index: [A-Za-z0-9._-]+.safetensors",
        "Download the index again",
    )
    both_are_refused(run, sharded, out, message)


@pytest.mark.fault(17)
@pytest.mark.parametrize("name", [ONE, CONFIG, INDEX])
def test_a_link_out_of_the_directory(run: Run, sharded: Path, out: Path, name: str) -> None:
    outside = sharded.parent / f"outside-{name}"
    (sharded / name).rename(outside)
    (sharded / name).symlink_to(outside)
    message = Message(
        sharded / name, f"links to {outside}", "expected a file inside the directory", "Replace the link"
    )
    both_are_refused(run, sharded, out, message)


@pytest.mark.fault(17)
def test_a_side_file_that_links_out_of_the_directory_is_not_copied(run: Run, source: Path, out: Path) -> None:
    secret = source.parent / "secret.txt"
    secret.write_text("secret")
    (source / "merges.txt").symlink_to(secret)
    goes_on(run, source, out, f"{source / 'merges.txt'}: ignored, because it links out of the directory")
    assert not (out / "merges.txt").exists()


@pytest.mark.fault(17)
def test_what_is_not_copied_is_said_once(run: Run, source: Path, out: Path) -> None:
    for folder in ("additional_chat_templates", "original", ".cache"):
        (source / folder).mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (source / "weights.bin").write_bytes(b"x")
    (source / ".gitattributes").write_text("")
    os.mkfifo(source / "pipe")
    done = run("quantize", source, out, *QUICK)
    assert done.code == 0
    line = f"{source}: not copied: additional_chat_templates/, original/, pipe, weights.bin."
    text = " ".join(done.err.split())
    assert text.count("not copied") == 1 and line in text, done.err
    assert "additional_chat_templates/ has chat templates that transformers reads: copy it" in text
    assert "not in it, and not compared" not in run("verify", out, "--no-reload").out


@pytest.mark.fault(18)
def test_an_index_with_a_tensor_that_no_shard_has(run: Run, sharded: Path, out: Path) -> None:
    map_to(sharded, **{"lm_head.weight": TWO})
    message = Message(
        sharded / INDEX, "but no shard has it", f"tensor 'lm_head.weight' should be in {TWO}", ONE_REVISION
    )
    both_are_refused(run, sharded, out, message)


@pytest.mark.fault(19)
def test_a_tensor_in_two_shards(run: Run, sharded: Path, out: Path) -> None:
    edit_tensors(sharded / TWO, lambda tensors: tensors.update({EMBEDDING: torch.zeros(512, 64)}))
    message = Message(
        sharded / TWO,
        f"tensor '{EMBEDDING}' is also in {ONE}",
        "expected it in one shard",
        "Download the checkpoint again",
    )
    both_are_refused(run, sharded, out, message)


@pytest.mark.fault(20)
def test_a_tensor_that_the_index_does_not_list(run: Run, sharded: Path, out: Path) -> None:
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop(NORM))
    problem = (
        f"{sharded / INDEX}: 1 tensors are in shards but not in the index, the first is '{NORM}' in {TWO}"
    )
    goes_on(run, sharded, out, f"{problem}; they are used")


@pytest.mark.fault(20)
def test_verify_is_strict_about_the_index(run: Run, out: Path) -> None:
    assert run("quantize", SOURCE, out, *QUICK, "--max-shard-size", "100KB").code == 0
    edit_json(out / INDEX, lambda index: index["weight_map"].pop(NORM))
    done = run("verify", out, "--no-reload")
    assert done.code == CheckpointError.exit_code
    assert "FAILED headers: unreadable" in done.out
    assert "1 tensors are in shards but not in the index" in done.out
    assert "; expected all in the index. " + ONE_REVISION in done.out


@pytest.mark.fault(21)
def test_an_index_that_maps_to_the_wrong_shard(run: Run, sharded: Path, out: Path) -> None:
    map_to(sharded, **{EMBEDDING: TWO})
    message = Message(
        sharded / INDEX, f"but is in {ONE}", f"tensor '{EMBEDDING}' should be in {TWO}", ONE_REVISION
    )
    both_are_refused(run, sharded, out, message)


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("content", "found", "expected"),
    [
        (b"", "the file is empty", "expected a JSON object"),
        (b'{"weight_map": {"a":', "the file is invalid (", "expected a JSON object"),
        (b'{"\xff": 1}', "the file is invalid (", "expected a JSON object"),
        (b"[]", "the file is []", "expected a JSON object"),
        (b'{"a":' * 100_000, "the file is nested too deeply", "expected a few levels of JSON"),
        (b"{}", "weight_map is None", "expected shard names by tensor"),
        (b'{"weight_map": {}}', "weight_map is {}", "expected shard names by tensor"),
        (b'{"weight_map": [1]}', "weight_map is [1]", "expected shard names by tensor"),
        (b'{"weight_map": {"a": "1.safetensors", "a": "2"}}', "key 'a' occurs twice", "expected once"),
    ],
    ids=["empty", "cut", "no UTF-8", "array", "deep", "no map", "empty map", "list", "duplicate"],
)
def test_an_index_that_is_no_index(
    run: Run, sharded: Path, out: Path, content: bytes, found: str, expected: str
) -> None:
    (sharded / INDEX).write_bytes(content)
    both_are_refused(run, sharded, out, Message(sharded / INDEX, found, expected, " again"))


@pytest.mark.fault(23)
def test_the_index_wins_over_a_single_file(run: Run, sharded: Path, out: Path) -> None:
    save_file({EMBEDDING: torch.zeros(512, 64)}, sharded / WEIGHTS)
    goes_on(run, sharded, out, f"{sharded}: ignored {WEIGHTS}, because {INDEX} does not name them")


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (("pytorch_model.bin",), "Convert them with transformers: AutoModelForCausalLM"),
        (("model.pt",), "Convert them with transformers: AutoModelForCausalLM"),
        ((ONE, TWO), f"Download {INDEX} as well"),
        ((), "Download the weights as well"),
    ],
)
def test_a_directory_without_weights_that_can_be_used(
    run: Run, source: Path, out: Path, names: tuple[str, ...], remedy: str
) -> None:
    (source / WEIGHTS).unlink()
    for name in names:
        (source / name).write_bytes(b"\x80\x02}q\x00.")
    found = f"found {', '.join(names) or 'no weights'}"
    both_are_refused(run, source, out, Message(source, found, f"expected {WEIGHTS} or {INDEX}", remedy))


@pytest.mark.fault(24)
def test_a_gguf_file_that_is_none(run: Run, source: Path, out: Path) -> None:
    (source / WEIGHTS).unlink()
    file = source / "model.gguf"
    file.write_bytes(b"\x80\x02}q\x00.")
    both_are_refused(run, source, out, Message(file, "starts with", "expected b'GGUF'", "Check the path"))


@pytest.mark.fault(25)
def test_a_wrong_total_size(run: Run, sharded: Path, out: Path) -> None:
    edit_json(sharded / INDEX, lambda index: index["metadata"].update(total_size=7))
    nbytes = sum(tensor.nbytes for tensor in load_file(SOURCE / WEIGHTS).values())
    goes_on(run, sharded, out, f"{sharded / INDEX}: total_size is 7, but the tensors have {nbytes} bytes")


@pytest.mark.fault(26)
def test_shards_of_an_older_run_go_only_with_overwrite_and_only_quantkits_own(run: Run, out: Path) -> None:
    older = ("quantize", SOURCE, out, *QUICK, "--max-shard-size", "100KB")
    assert run(*older).code == 0
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 2
    now = ("quantize", SOURCE, out, *QUICK)
    message = Message(out, "already holds a finished quantkit checkpoint", "output", "--overwrite")
    refused(run, now, OutputError, message, out.parent)
    message = Message(out, "was finished by a run that differs", "old -> new", "start over with --overwrite")
    refused(run, (*now, "--resume"), OutputError, message, out.parent)

    stranger = out / "model-00099-of-00099.safetensors"
    stranger.write_bytes(b"mine")
    message = Message(out, stranger.name, "quantkit did not write", "Move them elsewhere")
    refused(run, (*now, "--overwrite"), OutputError, message, out.parent)
    stranger.unlink()
    assert run(*now, "--overwrite").code == 0
    assert [path.name for path in out.glob("*.safetensors")] == [WEIGHTS]
    assert not (out / INDEX).exists()
    assert run("quantize", SOURCE, out.with_name("fresh"), *QUICK).code == 0
    assert snapshot(out) == snapshot(out.with_name("fresh"))


@pytest.mark.fault(27)
def test_names_that_differ_in_case_only(run: Run, source: Path, out: Path) -> None:
    (source / "Tokenizer.json").write_text("{}")
    message = Message(
        source / "tokenizer.json",
        "its name differs from Tokenizer.json in case only",
        "expected distinct names",
        "Rename one of the two",
    )
    both_are_refused(run, source, out, message)


@pytest.mark.fault(27)
def test_shards_that_differ_in_case_only(run: Run, sharded: Path, out: Path) -> None:
    upper = ONE.replace("model", "Model")
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    (sharded / TWO).rename(sharded / upper)
    map_to(sharded, **{name: upper for name, shard in weight_map.items() if shard == TWO})
    message = Message(
        sharded / ONE,
        f"differs from {upper} in case only",
        "expected distinct names",
        "Rename one of the two",
    )
    both_are_refused(run, sharded, out, message)
