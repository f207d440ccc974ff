"""`quantkit verify` and `quantkit inspect`: damage is found, and what is shown is what is there."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.checkpoint.engines import SGLANG, TRANSFORMERS, VLLM
from quantkit.checkpoint.manifest import MANIFEST_NAME, manifest_bytes, read_manifest
from quantkit.errors import CheckpointError
from quantkit.runtime.load import load

from ..reliability.faults import edit_json
from .conftest import SOURCE, STORIES, Run

VLLM_INTS = "CompressedTensorsWNA16"


def flip_a_byte(directory: Path) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def delete_the_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def delete_the_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def edit_the_config(directory: Path) -> None:
    edit_json(directory / "config.json", lambda config: config.update(hidden_size=65))


def forget_quantization(directory: Path) -> None:
    edit_json(directory / "config.json", lambda config: config.pop("quantization_config"))


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (flip_a_byte, ["FAILED files", "model.safetensors has sha256", "1 of 3 checks failed"]),
        (delete_the_weights, ["model.safetensors is missing", "FAILED headers", "found no weights"]),
        (delete_the_config, ["config.json is missing", "FAILED headers: unreadable"]),
        (forget_quantization, ["FAILED layers: unreadable", "quantization_config has no section"]),
    ],
)
def test_verify_finds_damage(
    run: Run, damaged: Path, damage: Callable[[Path], None], messages: list[str]
) -> None:
    damage(damaged)
    done = run("verify", damaged, "--no-reload")
    assert done.code == 3
    for message in messages:
        assert message in done.out + done.err
    report = json.loads(run("verify", damaged, "--no-reload", "--json").out)
    assert report["ok"] is False
    assert any(check["problems"] for check in report["checks"])


def test_verify_reloads_in_a_fresh_process(run: Run, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_the_config(damaged)
    # What lies in a checkpoint is not imported, also not from within it.
    (damaged / "transformers.py").write_text("raise SystemExit('code of the checkpoint ran')")
    monkeypatch.chdir(damaged)
    done = run("verify", ".")
    assert done.code == 3
    assert "FAILED reload: does not load and run in a fresh process" in done.out
    assert "hidden size (65) is not a multiple" in done.out


def test_verify_compares_logits(
    run: Run, reloaded_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("quantkit.memory.free_memory", lambda device: 1000)
        done = run("quantize", SOURCE, out)
    assert done.code == 0
    assert re.search(
        r"note: the result was not run: that takes about [\d.]+ kB of memory, and 1.00 kB", done.err
    )
    assert run("verify", out).out.endswith("ok     logits: none stored at quantization\n")

    assert run("quantize", SOURCE, out, "--resume").code == 0
    manifest = read_manifest(out)
    manifest["prompt_logits"]["logits"][2][0] = 50.0
    (out / MANIFEST_NAME).write_bytes(manifest_bytes(manifest))
    done = run("verify", out)
    assert done.code == 3
    assert "FAILED logits: 16 tokens\n       position 2, token " in done.out


def _layers(manifest: dict[str, Any]) -> dict[str, Any]:
    layers: dict[str, Any] = manifest["layers"]
    return layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(layers=[]), "'layers' is list"),
        (lambda m: m.update(model_record=2), "'model_record' is 2"),
        (lambda m: m.update(bits_per_weight={"linears": None, "model": None}), "'model' is NoneType"),
        (lambda m: m.update(versions={"torch": [1]}), "'torch' is list"),
        (lambda m: m.update(recipe={"default": math.nan}), "not JSON"),
        (lambda m: m.update(source_bytes=10**400), "out of range"),
        (lambda m: m.update(source_bytes=-1), "out of range"),
        (lambda m: _layers(m)["lm_head"].update(shape=[10**400, 1]), "not [N, K]"),
        (lambda m: _layers(m)["lm_head"].update(scheme=""), "scheme of 'lm_head' is empty"),
        (lambda m: m["files"].update({"../x": {}}), "must name a file in the directory itself"),
    ],
)
def test_hostile_manifests_are_refused_in_words(
    run: Run, damaged: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_json(damaged / MANIFEST_NAME, change)
    for arguments in (
        ("inspect", damaged),
        ("inspect", damaged, "--json"),
        ("verify", damaged, "--no-reload"),
    ):
        done = run(*arguments)
        assert done.code == 3
        assert message in done.err + done.out


def test_verify_counts_the_layers(run: Run, damaged: Path) -> None:
    edit_json(damaged / MANIFEST_NAME, lambda m: _layers(m).pop("model.layers.0.mlp.up_proj"))
    done = run("verify", damaged, "--no-reload")
    assert done.code == 3
    assert "35 packed tensors in the files, 34 in the manifest" in done.out


def test_names_from_files_do_not_reach_the_terminal_as_they_are(run: Run, damaged: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        _layers(manifest)["\x1b]0;evil\x07[/bold]"] = _layers(manifest)["lm_head"]

    edit_json(damaged / MANIFEST_NAME, change)
    assert "has changed since it was written" in run("inspect", damaged).err
    # Who wants to deceive writes the hash too.
    path = damaged / MANIFEST_NAME
    path.write_bytes(manifest_bytes(json.loads(path.read_text())))
    done = run("inspect", damaged)
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\\x1b]0;evil\\x07[/bold]" in done.out


def test_names_of_files_make_up_no_line(run: Run, damaged: Path) -> None:
    (damaged / "a\nok     logits: \x1b[1mb").touch()
    first, *more = run("verify", damaged, "--no-reload").out.splitlines()
    assert first.endswith("; not in it, and not compared: a ok     logits: \\x1b[1mb")
    assert [line.split()[:2] for line in more] == [["ok", "headers:"], ["ok", "layers:"]]


def test_what_an_interrupt_says_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        error = KeyboardInterrupt()
        error.add_note("what is done so far is in a\n\x1b[1mb")
        raise error

    monkeypatch.setattr("quantkit.cli.app.app", stop)
    done = run("verify")
    assert (done.code, done.err) == (130, "interrupted; what is done so far is in a \\x1b[1mb\n")


def test_inspect_shows_tensor_parallel_sizes(run: Run, tmp_path: Path) -> None:
    # 8 heads, 4 of keys, of 8; 172 columns of down_proj.
    for group, sizes, reason in (
        (
            "channel",
            "1",
            "not 2: with 2 ranks each has 86 of the 172 columns of 'model.layers.0.mlp.down_proj'",
        ),
        ("channel --rule *.down_proj=int8", "1", "which are no whole words of 4 codes"),
        ("channel --rule *.down_proj=keep", "1, 2, 4", "not 8: with 8 ranks each has 4 of the 32 rows of"),
    ):
        out = tmp_path / "out"
        arguments = ("quantize", SOURCE, out, "--overwrite", "-g", *group.split(), "-m", "rtn", "--no-check")
        assert run(*arguments).code == 0
        shown = run("inspect", out, "--tensor-parallel").out.replace("\n", " ")
        assert f"tensor parallel sizes: {sizes} not" in shown and reason in shown
    assert "tensor parallel" not in run("inspect", out).out


def test_inspect_says_as_plan_does_who_reads_it_and_who_cannot(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("-f", "fp8", "-g", "4", "-m", "rtn")
    assert run("quantize", SOURCE, out, *options, "--no-check").code == 0
    for done in (run("plan", SOURCE, *options), run("inspect", out)):
        assert f"a compressed-tensors checkpoint: {TRANSFORMERS} reads it without quantkit\n" in done.out
        note = " ".join(done.err.split())
        assert f"note: {VLLM} and {SGLANG} cannot load fp8 with scales per group: model." in note
        assert "Choose scales per channel: -g channel." in note


def test_verify_says_what_an_engine_makes_of_it(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("quantize", SOURCE, out, "-g", "4", "-m", "rtn", "--no-check").code == 0
    done = run("verify", out, "--engine", "vllm")
    assert done.code == 0 and done.out.endswith("\nvLLM 0.33.0 has a class for each linear\n")
    first, *rest = done.out.splitlines()
    assert first.rstrip().endswith("stored as class of vLLM 0.33.0")
    assert rest[0].split() == ["model.layers.*.mlp.down_proj", "5", "64x172", "int4", "g4", VLLM_INTS]
    assert "tensor parallel sizes: 1\n" in done.out
    assert "not 2: with 2 ranks each has 86 of the 172 columns" in done.out
    assert done.err.startswith("note: Marlin takes groups of 32, 64, 128")

    rule = ("--rule", "*.q_proj=int8")
    assert run("quantize", SOURCE, out, "-g", "4", "-m", "rtn", "--no-check", "--overwrite", *rule).code == 0
    done = run("verify", out, "--engine", "sglang==0.5.23")
    assert done.code == 3 and "\nFAILED vLLM and SGLang cannot load this: they fuse these linears" in done.out
    assert done.err.endswith(f"error: SGLang 0.5.23 cannot load {out}, for the reasons printed.\n")
    report = json.loads(run("verify", out, "--engine", "vllm==0.26.0", "--json").out)
    assert (report["ok"], report["engine"], report["version"]) == (False, "vLLM", "0.26.0")
    assert len(report["refusals"]) == 1 and report["layers"]["lm_head"]["reads"] is None

    for arguments, text in (
        (("--engine", "vllm==1"), "vLLM 1 was not tried. Versions that were: 0.26.0, 0.32.0, 0.33.0."),
        (("--engine", "vllm", "--against", SOURCE), "--engine reads headers and compares no weights."),
    ):
        done = run("verify", out, *arguments)
        assert (done.code, done.out) == (2, "") and text in done.err


def test_inspect_json_is_the_manifest(run: Run, packed: Path) -> None:
    done = run("inspect", packed, "--json")
    assert json.loads(done.out) == json.loads((packed / MANIFEST_NAME).read_text())
    assert done.err == ""
    both = run("inspect", packed, "--json", "--tensor-parallel")
    assert (both.code, both.out) == (2, "")
    assert "--json prints the manifest, which has no tensor parallel sizes" in both.err


@pytest.fixture
def saved(packed: Path, tmp_path: Path) -> Path:
    """What `save_pretrained` makes of `packed`, with the tokenizer."""
    directory = tmp_path / "saved"
    load(packed, device="cpu").save_pretrained(directory)
    for path in packed.glob("tokenizer*"):
        shutil.copy(path, directory)
    return directory


def test_commands_take_what_save_pretrained_wrote(
    run: Run, saved: Path, packed: Path, tmp_path: Path, reloaded_here: None
) -> None:
    done = run("inspect", saved)
    assert done.code == 0 and "no quantkit_manifest.json, as save_pretrained writes none" in done.err
    # The same table, but for what only the manifest has.
    assert done.out.split("\n")[1].split()[:5] == run("inspect", packed).out.split("\n")[2].split()[:5]
    assert json.loads(run("inspect", saved, "--json").out)["source"] is None
    assert run("inspect", saved, "--plot", tmp_path / "errors.png").err.startswith(
        "error: saved: no linear has a measured error"
    )
    done = run("verify", saved)
    assert done.code == 0 and [line.split(":")[0].split() for line in done.out.splitlines()] == [
        ["skip", "files"],
        *(["ok", name] for name in ("headers", "layers", "reload", "logits")),
    ]
    assert json.loads(run("verify", saved, "--no-reload", "--json").out)["checks"][0]["skipped"] is True
    done = run("doctor", saved, "--m", "1")
    assert done.code == 0, done.err
    done = run("report", saved, "-o", tmp_path / "card")
    assert done.code == 0 and "the card names no base model: there is no manifest" in done.err
    assert "quantized with quantkit to int4" in (tmp_path / "card" / "README.md").read_text()
    for card in ((), ("--card", tmp_path / "card")):
        done = run("push", saved, "me/x", "--dry-run", *card)
        assert done.code == 0 and "nothing was uploaded" in done.out and "nor whether a byte has" in done.err
    assert run("generate", saved, "Once", "-n", 2).code == 0
    done = run("eval", saved, "--against", SOURCE, "--text", STORIES, "--window", 32, "--max-windows", 1)
    assert done.code == 0, done.err


def test_what_is_no_packed_checkpoint(run: Run, tmp_path: Path) -> None:
    for command, directory in (("verify", SOURCE), ("inspect", tmp_path)):
        done = run(command, directory)
        assert done.code == 3
        assert "is not a finished quantkit checkpoint" in done.err
    assert "dir 'missing' does not exist" in run("verify", "missing").err
    assert "path 'missing' does not exist" in run("inspect", "missing").err.lower()


@pytest.mark.parametrize("arguments", [("verify",), ("verify", "--engine", "vllm")])
def test_a_checkpoint_of_another_tool_is_said_to_be_one(
    run: Run, damaged: Path, arguments: tuple[str, ...]
) -> None:
    (damaged / MANIFEST_NAME).unlink()
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    edit_json(damaged / "config.json", lambda config: config.update(quantization_config=section))
    done = run(arguments[0], damaged, *arguments[1:])
    assert done.code == 3 and done.out == ""
    assert done.err.endswith(
        f"error: {damaged} is of another tool: config.json has quant_method 'compressed-tensors' and no "
        "section 'quantkit'. Make it a quantkit checkpoint with `quantkit convert`; `eval` and `generate` "
        "take it as it is.\n"
    )


@pytest.mark.parametrize("command", ["generate", "eval"])
@pytest.mark.parametrize("damage", [delete_the_weights, delete_the_config, edit_the_config, "tokenizer"])
def test_models_that_cannot_be_opened(
    run: Run, damaged: Path, command: str, damage: Callable[[Path], None] | str
) -> None:
    if callable(damage):
        damage(damaged)
    else:
        for path in damaged.glob("tokenizer*"):
            path.unlink()
    done = run(command, damaged, *(["hi"] if command == "generate" else ["--text", STORIES]))
    assert done.code == 3
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[:-40], "is not valid JSON"),
        (lambda text: text.replace('"size": ', '"size": 1', 1), "has changed since it was written"),
        (lambda text: "[]", "expected a JSON object"),
        (lambda text: "", "empty"),
    ],
)
def test_a_damaged_manifest_is_refused(damaged: Path, damage: Callable[[str], str], says: str) -> None:
    path = damaged / MANIFEST_NAME
    path.write_text(damage(path.read_text()))
    from transformers import AutoModelForCausalLM

    for loading in (quantkit.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError) as raised:
            loading(damaged)
        assert says in str(raised.value) and f"Without {MANIFEST_NAME} the model loads" in str(raised.value)
    path.unlink()
    quantkit.load(damaged, device="cpu")


def test_weights_that_are_not_those_of_the_manifest_are_refused(damaged: Path) -> None:
    weights = damaged / "model.safetensors"
    entry = read_manifest(damaged)["files"]
    entry["model.safetensors"]["size"] += 8
    path = damaged / MANIFEST_NAME
    path.write_bytes(manifest_bytes({**read_manifest(damaged), "files": entry}))
    size = weights.stat().st_size
    with pytest.raises(CheckpointError, match=f"has {size} bytes, and {MANIFEST_NAME} says {size + 8}"):
        quantkit.load(damaged, device="cpu")
    # Who edits how a model generates may load it; `verify` tells.
    (damaged / "generation_config.json").write_text('{"max_new_tokens": 3}')
    del entry["model.safetensors"]
    path.write_bytes(manifest_bytes({**read_manifest(damaged), "files": entry}))
    with pytest.raises(CheckpointError, match=f"and {MANIFEST_NAME} does not list it"):
        quantkit.load(damaged, device="cpu")
