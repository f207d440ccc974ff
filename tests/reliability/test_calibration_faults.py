"""Texts, tokenizers and Hessians that calibration and evaluation cannot use: rows 49 to 56."""

import json
import tracemalloc
from pathlib import Path

import huggingface_hub
import pytest
import torch

from quantkit.calibrate.data import documents
from quantkit.errors import CheckpointError, EnvironmentProblem, FormatError, UsageError

from ..conftest import Run
from ..tiny.calibrated import write
from .faults import (
    CONFIG,
    SOURCE,
    STORIES,
    WEIGHTS,
    Message,
    check_message,
    edit_json,
    edit_tensors,
    is_unfinished,
    refused,
    snapshot,
)

SMALL = ("--calibration-samples", 4, "--calibration-length", 32, "--no-check", "--device", "cpu")


def calibrated(source: Path, out: Path, data: Path, method: str = "gptq") -> tuple[object, ...]:
    return ("quantize", source, out, "-m", method, "--calibration", data, *SMALL)


def text_is_refused(run: Run, out: Path, data: Path, message: Message) -> None:
    """As calibration data and as text to score on."""
    for arguments in (calibrated(SOURCE, out, data), ("eval", SOURCE, "--text", data)):
        refused(run, arguments, UsageError, message, out.parent)


@pytest.mark.fault(49)
@pytest.mark.parametrize("content", [b"", b" \n\t\n \n"])
def test_a_text_without_text(run: Run, out: Path, tmp_path: Path, content: bytes) -> None:
    data = tmp_path / "text.txt"
    data.write_bytes(content)
    text_is_refused(
        run, out, data, Message(data, "the file has no text", "at least two tokens", "Give a file with")
    )


@pytest.mark.fault(49)
def test_a_text_shorter_than_a_sample(run: Run, out: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("Once upon a time")
    message = Message(
        data, "tokens are less than", "one calibration sample of 32", "Give more text, or shorter samples"
    )
    refused(run, calibrated(SOURCE, out, data), UsageError, message, tmp_path)


@pytest.mark.fault(49)
def test_a_text_too_short_to_score(run: Run, out: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("a")
    message = Message(data.name, "the text has 1 tokens", "scoring takes at least 2", "Give more text")
    refused(run, ("eval", SOURCE, "--text", data), UsageError, message, tmp_path)


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    ("content", "found", "remedy"),
    [
        (b"one\ntwo\nthr\xffee\n", "line 3 is not UTF-8 (byte 0xff)", "Convert the file to UTF-8"),
        (b"one\nt\0wo\n", "line 2 has a NUL byte; this is a binary file", "Give a text file"),
        ("one".encode("utf-16"), "line 1 is not UTF-8 (byte 0xff)", "Convert the file to UTF-8"),
        (b"\x1f\x8b\x08\0\0", "is compressed with gzip", "Decompress it, or let its name end in .gz"),
    ],
    ids=["no UTF-8", "binary", "UTF-16", "gzip"],
)
def test_a_file_that_is_no_text(
    run: Run, out: Path, tmp_path: Path, content: bytes, found: str, remedy: str
) -> None:
    data = tmp_path / "text.txt"
    data.write_bytes(content)
    text_is_refused(run, out, data, Message(data, found, found, remedy))


@pytest.mark.fault(50)
def test_a_byte_order_mark_is_no_text(run: Run, out: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    for mark, name in (("", "plain"), ("\ufeff", "marked")):
        data.write_text(mark + STORIES.read_text())
        assert run(*calibrated(SOURCE, out.with_name(name), data)).code == 0
    plain, marked = (snapshot(out.with_name(name)) for name in ("plain", "marked"))
    assert plain[WEIGHTS] == marked[WEIGHTS]


@pytest.mark.fault(51)
@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_an_endless_line_is_not_read_into_memory(
    run: Run, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A hole of 1 GB, of which no more than the allowed length of a line is read."""
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1 << 20)
    data = tmp_path / name
    with data.open("wb") as file:
        file.write(b'{"text": "')
        file.truncate(1 << 30)
    tracemalloc.start()
    # Not as in `refused`, which would read the file to compare it.
    done = run(*calibrated(SOURCE, out, data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert type(done.error) is UsageError and done.code == 2
    assert str(done.error) == (
        f"{data}: line 1 has {1 << 20} bytes or more; expected lines of text, or a document a line. Break it "
        "into lines, or give a part of it."
    )
    assert peak < 8 << 20
    assert not out.exists()


@pytest.mark.fault(52)
@pytest.mark.parametrize("command", ["quantize", "eval", "generate"])
def test_a_missing_tokenizer(run: Run, source: Path, out: Path, command: str) -> None:
    for path in source.glob("tokenizer*"):
        path.unlink()
    arguments = {
        "quantize": calibrated(source, out, STORIES),
        "eval": ("eval", source, "--text", STORIES),
        "generate": ("generate", source, "hello"),
    }[command]
    message = Message(
        source,
        "has special_tokens_map.json",
        "but no file with a vocabulary",
        "Copy the original model's tokenizer",
    )
    refused(run, arguments, CheckpointError, message, source.parent)


@pytest.mark.fault(52)
def test_a_tokenizer_of_another_model(run: Run, source: Path, out: Path) -> None:
    """Its tokens have no row in the embedding."""
    edit_json(source / CONFIG, lambda config: config.update(vocab_size=300))
    edit_tensors(
        source / WEIGHTS,
        lambda tensors: tensors.update(
            {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:300].clone()}
        ),
    )
    for arguments in (calibrated(source, out, STORIES), ("eval", source, "--text", STORIES)):
        message = Message(
            source,
            "the tokenizer gives token ",
            "but the embedding has 300 rows",
            "restore the files of one revision",
        )
        refused(run, arguments, CheckpointError, message, source.parent)


@pytest.mark.fault(52)
def test_a_tokenizer_without_special_tokens_is_enough(run: Run, source: Path, out: Path) -> None:
    for name in ("special_tokens_map.json", "generation_config.json"):
        (source / name).unlink()
    specials = ("bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens")
    edit_json(source / "tokenizer_config.json", lambda known: [known.pop(name, None) for name in specials])
    assert run(*calibrated(source, out, STORIES)).code == 0
    assert run("eval", out, "--text", STORIES, "--window", 32, "--max-windows", 1).code == 0
    assert run("generate", out, "Once upon", "-n", 2).code == 0


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Characters to calibrate models of one token per character on."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line * 20}) + "\n" for line in ("abc", "xyz0", "QRS9")))
    return path


@pytest.mark.fault(53)
def test_an_expert_that_no_token_chooses(run: Run, tmp_path: Path, out: Path, text: Path) -> None:
    source = write(tmp_path, "qwen3_moe", num_experts_per_tok=1)

    def never_3(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("mlp.gate.weight"):
                # Its logit is the mean of those of the others.
                tensor[3] = tensor[:3].mean(0)

    edit_tensors(source / WEIGHTS, never_3)
    done = run(*calibrated(source, out, text))
    assert done.code == 0, done.err
    assert "of them no token)" in done.err and "more calibration samples" in done.err
    assert "calibration tokens per expert: 0 to " in done.out
    layers = json.loads((out / "quantkit_manifest.json").read_text())["layers"]
    tokens = layers["model.layers.0.mlp.experts.down_proj"]["expert_tokens"]
    assert tokens[3] == 0 and sum(tokens) == 4 * 32
    assert run("verify", out, "--no-reload").code == 0


@pytest.mark.fault(54)
def test_a_hessian_without_a_cholesky_factor(run: Run, source: Path, out: Path) -> None:
    """An up_proj of zeros: all inputs of the down_proj behind it are zero."""
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(source / WEIGHTS, lambda tensors: tensors[name].zero_())
    done = run(*calibrated(source, out, STORIES))
    assert done.code == 0
    assert (
        "note: model.layers.1.mlp.down_proj: the Hessian of the inputs is singular, so its weights "
        "were rounded to nearest."
    ) in done.err
    manifest = json.loads((out / "quantkit_manifest.json").read_text())
    assert "singular" in manifest["layers"]["model.layers.1.mlp.down_proj"]["note"]
    assert run("verify", out, "--no-reload").code == 0


@pytest.mark.fault(55)
def test_activations_beyond_float16(run: Run, source: Path, out: Path) -> None:
    """Blocks run in float32 whatever the weights are stored in."""

    def grow(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            larger = 1000.0 if name.endswith(("up_proj.weight", "gate_proj.weight")) else 1.0
            tensors[name] = (tensor * larger).to(torch.float16)

    edit_tensors(source / WEIGHTS, grow)
    edit_json(source / CONFIG, lambda config: config.update(dtype="float16", torch_dtype="float16"))
    done = run(*calibrated(source, out, STORIES), "--json")
    assert done.code == 0, done.err
    layers = json.loads(done.out)["layers"]
    assert all(0 < layers[f"model.layers.{i}.mlp.down_proj"]["output_error"] < 0.5 for i in range(5))


@pytest.mark.fault(55)
def test_activations_that_are_not_finite(run: Run, source: Path, out: Path) -> None:
    name = "model.layers.1.post_attention_layernorm.weight"
    edit_tensors(source / WEIGHTS, lambda tensors: tensors[name].__setitem__(3, float("inf")))
    done = run(*calibrated(source, out, STORIES))
    message = Message(
        "model.layers.1.mlp.gate_proj: ",
        "infinite inputs (of ",
        "or activations overflow the dtype",
        "check the checkpoint, or take a method without data, such as mse",
    )
    check_message(done, FormatError, message)
    is_unfinished(out)


@pytest.mark.fault(56)
@pytest.mark.parametrize("what", ["checkpoint", "data set"])
def test_a_hub_that_cannot_be_reached(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    calls = []

    def ask(*arguments: object) -> None:
        calls.append(arguments)
        raise TimeoutError("no answer")

    def nothing(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("not in the cache")

    monkeypatch.setattr("quantkit.checkpoint.hub.answers._ask", ask)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing)
    asked = (
        ("nobody/nothing", out)
        if what == "checkpoint"
        else (SOURCE, out, "-m", "gptq", "--calibration", "hf:nobody/nothing")
    )
    message = Message(
        "nobody/nothing",
        f"the hub does not answer and the {what} is not complete in the local cache",
        f"expected a downloadable {what}",
        "Check the network, HF_ENDPOINT and the proxy settings, or give a local",
    )
    refused(run, ("quantize", *asked), EnvironmentProblem, message, out.parent)
    assert len(calls) == 1
