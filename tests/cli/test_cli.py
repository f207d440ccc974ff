"""The command line as people use it: what it prints, how it ends, and that no mistake ends in a traceback."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibrate.methods import METHODS
from quantkit.checkpoint.manifest import MANIFEST_NAME
from quantkit.checkpoint.shard import ShardFile
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.writer import OutputDirectory
from quantkit.cli import console, demo, options
from quantkit.cli.quantize import coverage_line, learned_line
from quantkit.eval.report import floor_label
from quantkit.files import size_text
from quantkit.kernels.problem import Gpu
from quantkit.kernels.table import ROWS
from quantkit.kernels.tiles.store import save
from quantkit.kernels.tiles.table import Entry, Key, TileTable, as_computed
from quantkit.model.prompt_logits import compare
from quantkit.model.record import Measured
from quantkit.model.structure import read_structure
from quantkit.packing.schemes import PRESETS, scheme

from .conftest import SOURCE, STORIES, Run

COMMANDS = (
    "quantize",
    "plan",
    "inspect",
    "verify",
    "eval",
    "bench",
    "report",
    "push",
    "generate",
    "doctor",
    "tune",
    "formats",
    "methods",
    "demo",
)


@pytest.fixture
def damaged(packed: Path, tmp_path: Path) -> Path:
    """A copy of `packed` to damage."""
    return Path(shutil.copytree(packed, tmp_path / "damaged"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_the_whole_way(run: Run, tmp_path: Path) -> None:
    """quantize, inspect, verify, eval, generate, plan: each on what the one before left."""
    packed = tmp_path / "packed"
    done = run("quantize", SOURCE, packed, "-f", "int8", "--lm-head", "int8", "--rule", "*.down_proj=int4:32")
    assert done.code == 0
    assert re.search(r"model\.layers\.\*\.mlp\.down_proj +5 +64x172 int4 g32 +mse ", done.out)
    assert "5 int4 g32 bfloat16: rule '*.down_proj' (model.layers.*.mlp.down_proj)" in done.out
    assert "1 dense: an embedding (model.embed_tokens.weight)" in done.out
    assert "relative error: mean" in done.out
    assert f"wrote {packed}" in done.out
    assert "note: only quantkit can load this: model.layers.0.mlp.down_proj: " in done.err
    assert "(one of 5 linears)." in done.err.replace("\n", " ")

    done = run("inspect", packed)
    assert done.code == 0
    assert done.out.startswith(f"made from {SOURCE} with python ")
    assert re.search(r"lm_head +1 +512x64 int8 channel mse +8\.254 \d\.\de-0\d", done.out)

    done = run("verify", packed)
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == ["ok"] * 5
    assert done.out.endswith("ok     logits: 16 tokens\n")

    file, report = tmp_path / "eval.json", tmp_path / "report"
    done = run(
        *("eval", packed, "--against", SOURCE, "--text", STORIES, "--window", 128, "--max-windows", 2),
        *("--json", file, "--report", report),
    )
    assert done.code == 0
    assert "stories.txt: 254 tokens" in done.out
    assert "packed: " in done.out
    figures = json.loads(file.read_text())
    assert set(figures["bits_per_weight"]) == {"linears", "model"}
    (text,) = figures["texts"].values()
    fields = {"perplexity", "reference_perplexity", "excess", "kl_mean", "kl_p99", "same_top1", "tokens"}
    assert fields <= set(text)
    assert text["tokens"] == 254
    assert text["excess"] == pytest.approx(math.log(text["perplexity"] / text["reference_perplexity"]))
    assert 0 < text["kl_mean"] < text["kl_p99"]
    assert (report / "report.md").read_text().startswith("# Evaluation")
    assert "quantkit eval" in (report / "report.html").read_text()
    assert not (report / ".quantkit-eval").exists()

    done = run("generate", packed, "Once upon a time", "-n", 8)
    assert done.code == 0
    assert done.out.startswith("Once upon a time, there was")
    assert re.fullmatch(r"8 tokens, [\d.]+ tokens/s\n", done.err)

    done = run("plan", packed)
    assert done.code == 3
    assert "the checkpoint is quantized already" in done.err


def test_a_rotated_model_says_so_and_what_its_head_costs(run: Run, tmp_path: Path) -> None:
    done = run("quantize", SOURCE, tmp_path / "out", "--rotate")
    assert done.code == 0
    assert "note: rotated, and the model computes the same" in done.err
    assert "lm_head and the embedding are stored apart" in done.err
    assert "\nrotated: the residual stream" in run("inspect", tmp_path / "out").out
    assert run("verify", tmp_path / "out", "--no-reload").code == 0
    planned = json.loads(run("plan", SOURCE, "--rotate", "--json").out)
    assert any("stored apart" in note for note in planned["notes"])


def test_plan_promises_what_quantize_writes(run: Run, tmp_path: Path) -> None:
    options_of_both = ("-f", "fp6", "-g", "64", "--max-shard-size", "100KB", "--json")
    planned = json.loads(run("plan", SOURCE, *options_of_both).out)
    done = run("quantize", SOURCE, tmp_path / "out", *options_of_both)
    written = json.loads(done.out)
    assert done.err == ""
    assert written.pop("directory") == str(tmp_path / "out")
    errors = [layer.pop("relative_error") for layer in written["layers"].values()]
    assert all(0 < error < 1e-3 for error in errors if error is not None)
    for layer in planned["layers"].values():
        assert layer.pop("relative_error") is None
    assert planned == written
    assert planned["needs_quantkit"][0].endswith("compressed-tensors has no fp6-e2m3")
    assert all((tmp_path / "out" / name).stat().st_size > size for name, size in written["files"].items())


def test_plan_tells_memory_and_readers(run: Run) -> None:
    done = run("plan", SOURCE, "-f", "int8", "--every-layer")
    assert (done.code, done.err) == (0, "")
    assert "model.layers.4.self_attn.v_proj" in done.out
    assert "error" not in done.out
    assert "a compressed-tensors checkpoint: vLLM, SGLang and transformers read it" in done.out
    assert re.search(r"peak memory beyond the libraries: about [\d.]+ MB", done.out)


def test_recipe_file(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[default]\nformat = "int4"\ngroup_size = 32\nzero_point = "integer"\n'
        '[[rule]]\nmatch = "*.down_proj"\nformat = "int8"\n'
        '[[rule]]\nmatch = "model.layers.0.*"\nkeep = true\n'
    )
    layers = json.loads(run("plan", SOURCE, "--recipe", recipe, "--json").out)["layers"]
    assert layers["model.layers.0.mlp.down_proj"]["scheme"] == "int8 channel asym bfloat16"
    assert layers["model.layers.0.mlp.up_proj"]["reason"] == "kept by rule 'model.layers.0.*'"
    assert layers["model.layers.1.mlp.up_proj"]["scheme"] == "int4 g32 asym bfloat16"
    done = run("plan", SOURCE, "--recipe", recipe, "-f", "int8")
    assert done.code == 2
    assert f"--format int8 and [default] of recipe {recipe} (int4) differ" in done.err


def test_recipe_file_in_yaml(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('default: {group_size: 32}\nrule:\n- match: "*.down_proj"\n  format: int8\n')
    done = run("quantize", SOURCE, tmp_path / "out", "--recipe", recipe, "--json")
    layers = json.loads(done.out)["layers"]
    assert layers["model.layers.0.mlp.down_proj"]["scheme"] == "int8 channel bfloat16"
    assert layers["model.layers.0.mlp.up_proj"]["scheme"] == "int4 g32 bfloat16"
    recipe.write_text("rule:\n- match: *.down_proj\n  format: int8\n")
    done = run("quantize", SOURCE, tmp_path / "none", "--recipe", recipe)
    assert done.code == 2
    assert f"recipe {recipe} cannot be read: line 2, column 11: " in " ".join(done.err.split())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "scheme"),
    [
        (("-f", "int3", "--zero-point", "float"), "int3 g128 asym-float bfloat16"),
        (("-f", "nf4", "-g", "32", "--scale-dtype", "e4m3"), "nf4 g32 e4m3"),
        (("-f", "nvfp4"), "fp4-e2m1 g16 e4m3"),
        (("-f", "ternary", "--packing", "radix"), "ternary g128 radix bfloat16"),
    ],
)
def test_zero_points_and_scales_of_every_kind(run: Run, arguments: tuple[str, ...], scheme: str) -> None:
    layers = json.loads(run("plan", SOURCE, *arguments, "--json").out)["layers"]
    up = layers["model.layers.1.mlp.up_proj"]["scheme"]
    assert up in (scheme, scheme.replace("g128", "channel"))  # a row shorter than the group


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-f", "int9"), 4, "unknown format 'int9'; known are int8, int7"),
        (("-m", "magic"), 2, "unknown method 'magic'; known are rtn, mse"),
        (("-g", "0"), 2, "group size '0' is not a positive integer, 'channel' or 'tensor'"),
        (("-f", "binary", "--zero-point", "float"), 4, "format 'binary' has no zero-point"),
        (("--zero-point", "half"), 2, "zero-point 'half' is unknown; use one of none, integer, float"),
        (("--packing", "radix"), 4, "packing 'radix' is not for 'int4': its 16 values fill 4 bits"),
        (("--packing", "trits"), 2, "packing 'trits' is unknown; use one of bits, radix"),
        (("--scale-dtype", "e5m2"), 2, "scale dtype 'e5m2' is unknown; use one of float32, float16"),
        (("--lm-head", "int99"), 4, "unknown format 'int99'"),
        (("--rule", "down_proj"), 2, "rule 'down_proj' is not PATTERN=FORMAT[:GROUP][:METHOD]"),
        (("--rule", "*.nothing=int8"), 2, "rule '*.nothing' matches no linear of the model"),
        (("--rule", "*=int8", "--rule", "*.q_proj=keep"), 2, "rule '*.q_proj' never applies"),
        (("--rule", "*=keep"), 2, "there is nothing to quantize"),
        (("--recipe", "missing.toml"), 2, "recipe missing.toml cannot be read"),
        (("--max-shard-size", "10x"), 2, "size '10x' is not a positive number with a unit"),
        (("--device", "tpu"), 2, "device 'tpu' is unknown; use auto, cpu or cuda"),
        (("--resume", "--overwrite"), 2, "resume and overwrite exclude each other"),
    ],
)
def test_wrong_options_of_quantize(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run("quantize", SOURCE, tmp_path / "out", *arguments)
    assert done.code == code
    assert message in done.err
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_written(run: Run, packed: Path, tmp_path: Path) -> None:
    for place, message in (
        (SOURCE, "is the source checkpoint itself"),
        (STORIES, "is a file, not a directory"),
        (packed, "already holds a finished quantkit checkpoint"),
    ):
        done = run("quantize", SOURCE, place)
        assert done.code == 5
        assert done.err.splitlines()[-1].startswith("error: output ")
        assert message in done.err
    done = run("quantize", SOURCE, packed, "--resume", "-f", "int8")
    assert done.code == 5
    assert "was finished by a run that differs from this one" in done.err
    done = run("quantize", tmp_path / "missing", tmp_path / "out")
    assert done.code == 2
    assert "is no directory; expected a checkpoint directory or a hub id" in done.err


def test_overwrite_and_resume_of_a_finished_run(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments in ((), ("--resume",), ("--overwrite", "--json")):
        assert run("quantize", SOURCE, out, "-m", "rtn", *arguments).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_directory_to_resume(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    arguments = ("quantize", SOURCE, out, "-m", "rtn", "--max-shard-size", "50KB")
    shard = OutputDirectory.shard

    def interrupted(self: OutputDirectory, filename: str, *rest: Any) -> AbstractContextManager[ShardFile]:
        if filename.startswith("model-00003"):
            os.kill(os.getpid(), number)
        return shard(self, filename, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(OutputDirectory, "shard", interrupted)
        done = run(*arguments)
    assert done.code == 128 + number
    assert done.err.endswith("Continue with the same command and --resume.\n")
    kept = sorted(path.name[:11] for path in out.glob("*.safetensors"))
    assert kept == ["model-00001", "model-00002"]
    assert not (out / "config.json").exists()
    done = run("inspect", out)
    assert done.code == 3
    assert "continue it with --resume" in done.err
    assert run(*arguments, "--resume").code == 0
    assert run("verify", out, "--no-reload").code == 0


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


@pytest.fixture
def reloaded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` runs the model in this process: a fresh one, which other tests have, imports for seconds."""

    def compared(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, json.dumps(compare(Path(command[-1]))), "")

    monkeypatch.setattr("quantkit.model.verify.subprocess.run", compared)


def test_verify_compares_logits(
    run: Run, reloaded_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("quantkit.model.memory.free_memory", lambda device: 1000)
        done = run("quantize", SOURCE, out)
    assert done.code == 0
    assert re.search(
        r"note: the result was not run: that takes about [\d.]+ kB of memory, and 1.00 kB", done.err
    )
    assert run("verify", out).out.endswith("ok     logits: none stored at quantization\n")

    assert run("quantize", SOURCE, out, "--resume").code == 0
    edit_json(out / MANIFEST_NAME, lambda m: m["prompt_logits"]["logits"][2].__setitem__(0, 50.0))
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
def test_hostile_manifests(
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
    done = run("inspect", damaged)
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\\x1b]0;evil\\x07[/bold]" in done.out


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


def test_inspect_json_is_the_manifest(run: Run, packed: Path) -> None:
    done = run("inspect", packed, "--json")
    assert json.loads(done.out) == json.loads((packed / MANIFEST_NAME).read_text())
    assert done.err == ""
    both = run("inspect", packed, "--json", "--tensor-parallel")
    assert (both.code, both.out) == (2, "")
    assert "--json prints the manifest, which has no tensor parallel sizes" in both.err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_packed_checkpoint(run: Run, command: str) -> None:
    done = run(command, SOURCE)
    assert done.code == 3
    assert "is not a finished quantkit checkpoint" in done.err
    done = run(command, "missing")
    assert done.code == 2
    assert "dir 'missing' does not exist" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "nothing to evaluate: give --text FILE"),
        (("--text", "missing.txt"), 2, "missing.txt: cannot be read"),
        (("--tasks", ","), 2, "--tasks is empty; name at least one"),
        (("--text", STORIES, "--noise-floor"), 2, "give --against as well"),
        (("--tasks", "x", "--against", SOURCE, "--per-block"), 2, "give --against and --text as well"),
        (("--text", STORIES, "--task-path", "."), 2, "name them with --tasks"),
        (("--text", STORIES, "--limit", "3"), 2, "--limit is of tasks and none is to run"),
        (("--text", STORIES, "--window", "64", "--stride", "65"), 2, "stride is 65; use 1 to 64"),
        (("--text", STORIES, "--logits-space", "much"), 2, "size 'much' is not"),
        (("--text", STORIES, "--dtype", "int3"), 2, "unknown dtype 'int3'"),
        (("--text", STORIES, "--device", "tpu", "--max-windows", "1"), 2, "device 'tpu' is unknown"),
        (("--text", STORIES, "--json", "missing/eval.json"), 5, "cannot write missing/eval.json"),
        (("--text", STORIES, "--report", STORIES), 5, "cannot create the directory"),
        (("--text", STORIES, "--window", "1"), 2, "Invalid value for '--window'"),
    ],
)
def test_wrong_options_of_eval(
    run: Run, packed: Path, arguments: tuple[object, ...], code: int, message: str
) -> None:
    done = run("eval", packed, *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err


def test_eval_without_lm_eval(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.cli.evaluate.find_spec", lambda name: None)
    done = run("eval", packed, "--text", STORIES, "--tasks", "arc_easy")
    assert (done.code, done.out) == (7, "")
    assert "pip install 'quantkit[eval]'" in done.err


def test_eval_compares_models_and_goes_on_after_an_interruption(
    run: Run, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.eval import passes

    calls = 0

    def interrupted(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    report, file = tmp_path / "report", tmp_path / "figures.json"
    command = (
        *("eval", packed, SOURCE, "--text", STORIES, "--window", 32, "--max-windows", 2),
        *("--against", SOURCE, "--report", report, "--json", file, "--no-noise-floor", "--no-per-block"),
    )
    monkeypatch.setattr(passes, "check_finite", interrupted)
    done = run(*command)
    assert (done.code, done.out) == (130, "")
    assert f"what is done so far is in {report / '.quantkit-eval'}; the same command goes on" in done.err
    assert list(report.iterdir()) == [report / ".quantkit-eval"]

    done = run(*command)
    assert done.code == 0
    assert "int4: 1 of 2 batches of windows come from a run that was interrupted" in done.err
    assert re.search(r"\nint4 .*\nstories260K .* \+0\.00000 +0 +100\.00%\n", done.out)
    assert calls == 7
    figures = json.loads(file.read_text())["reports"]
    assert [one["label"] for one in figures] == ["int4", "stories260K"]
    assert not (report / ".quantkit-eval").exists()


def test_eval_calls_the_noise_floor_as_the_report_does(run: Run, packed: Path) -> None:
    options = ("--against", SOURCE, "--noise-floor", "--text", STORIES, "--window", 64, "--max-windows", 1)
    done = run("eval", packed, *options)
    assert floor_label(str(SOURCE), "bfloat16") in done.out


def test_eval_without_a_reference(run: Run, packed: Path) -> None:
    done = run("eval", packed, "--text", STORIES, "--window", 4096, "--max-windows", 1)
    assert done.code == 0
    assert "KL" not in done.out
    assert "int4: not compared with a reference" in done.out
    assert "window 4096 was cut to 512" in done.err and "stride" not in done.err
    done = run("eval", packed, "--text", STORIES, "--window", 4096, "--stride", 600, "--max-windows", 1)
    assert (
        "window 4096 was cut to 512, the positions that the model has; so was the stride of 600"
        in " ".join(done.err.split())
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


def test_generate(run: Run, packed: Path) -> None:
    done = run("generate", packed, "Once upon a time", "-n", 6, "--json")
    assert done.err == ""
    result = json.loads(done.out)
    assert len(result["tokens"]) == 6
    assert result["prompt_tokens"] == 5
    assert result["decode_seconds"] > 0
    assert result["end"] == "max_new_tokens"

    def sampled(seed: int) -> str:
        return run("generate", packed, "One", "-n", 12, "--temperature", 2, "--seed", seed).out

    assert sampled(1) == sampled(1) != sampled(2)
    done = run("generate", packed, "One", "-n", 2, "--verbose")
    assert done.out.startswith("One")
    assert os.environ["QUANTKIT_VERBOSE"] == "1"


def test_generate_stops_where_positions_end(run: Run, packed: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(packed, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 12}))
    done = run("generate", short, "Once upon a time", "-n", 100)
    assert done.code == 0
    assert "note: stopped at 7 of 100 tokens: the model has no more positions" in done.err


def test_generate_says_what_a_quantized_cache_leaves_as_it_is(run: Run, packed: Path, tmp_path: Path) -> None:
    assert run("generate", packed, "One", "-n", 2, "--kv-cache", "int8", "--json").err == ""
    shutil.copytree(packed, tmp_path / "mistral")
    config = json.loads((packed / "config.json").read_text())
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4}
    (tmp_path / "mistral" / "config.json").write_text(json.dumps(config | mistral))
    done = run("generate", tmp_path / "mistral", "One", "-n", 2, "--kv-cache", "int8")
    assert done.code == 0
    assert "note: 5 of 5 layers have a sliding window" in done.err


def test_what_a_model_refuses_while_it_generates_is_an_error(
    run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise ValueError("a cache of its own")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", refused)
    done = run("generate", packed, "One", "-n", 2, "--json")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: ") and "ValueError: a cache of its own" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0"), "Invalid value for '--max-new-tokens'"),
        (("--temperature", "-1"), "Invalid value for '--temperature'"),
        (("--temperature", "nan"), "Invalid value for '--temperature'"),
        (("--seed", str(1 << 64)), f"seed is {1 << 64}; use 0 to {(1 << 63) - 1}."),
        (("--kv-cache", "int3"), "unknown format of a KV cache 'int3'"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
        (("--device", "tpu"), "device 'tpu' is unknown"),
    ],
)
def test_wrong_options_of_generate(run: Run, packed: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("generate", packed, "hi", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_doctor(run: Run) -> None:
    done = run("doctor", "--reasons")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^torch +\d", done.out, re.MULTILINE)
    assert re.search(r"^int8 channel bfloat16 +float32 ", done.out, re.MULTILINE)
    assert "  not torch-int4: " in done.out
    assert "  experts: " in done.out
    report = json.loads(run("doctor", "--json").out)
    assert set(report) == {"packages", "machine", "tile_tables", "kernels"}
    assert all(entry["kernel"] or entry["refused"] for entry in report["kernels"])


def test_doctor_says_that_a_kernel_is_forced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_KERNEL", "unpack")
    done = run("doctor", "--json")
    assert (
        done.code == 0 and "note: QUANTKIT_KERNEL is set, and products run unpack or not at all" in done.err
    )
    monkeypatch.setenv("QUANTKIT_KERNEL", "nope")
    assert run("doctor").code == 6


def test_demo(run: Run, tmp_path: Path) -> None:
    arguments = ("demo", SOURCE, "--text", STORIES, "--window", 128, "--max-windows", 2, "--out", tmp_path)
    done = run(*arguments)
    assert done.code == 0
    assert re.search(r"^int8 +8\.\d{3} ", done.out, re.MULTILINE)
    assert "int8: indistinguishable" in done.out
    assert "binary: unusable" in done.out
    assert f"wrote {tmp_path / 'report' / 'report.md'}" in done.out
    reports = json.loads((tmp_path / "report" / "report.json").read_text())["reports"]
    assert [report["label"] for report in reports] == list(demo.FORMATS)
    assert run(*arguments, "--formats", "int8").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--formats", "int8,int9"), 4, "unknown format 'int9'"),
        (("--formats", ","), 2, "--formats is empty"),
        (("--text", "missing.txt"), 2, "missing.txt: cannot be read"),
        (("--out", STORIES), 5, "cannot create the directory"),
    ],
)
def test_wrong_options_of_demo(
    run: Run, tmp_path: Path, arguments: tuple[object, ...], code: int, message: str
) -> None:
    done = run("demo", SOURCE, "--text", STORIES, "--out", tmp_path / "out", *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert not (tmp_path / "out").exists()


def test_help_says_all(run: Run) -> None:
    done = run("--help")
    assert [command for command in COMMANDS if f"\n  {command} " in done.out] == list(COMMANDS)
    assert "..." not in done.out.partition("Commands:")[2]
    for command in COMMANDS:
        text = run(command, "--help").out
        assert max(map(len, text.splitlines())) <= 80
        bare = re.findall(r"\n  (?:-\w, )?(--[\w-]+)(?: <[^>]*>| [A-Z]+)?\n(?! {10})", text)
        assert bare == [], f"{command} does not explain {bare}"


def test_the_page_has_every_option(run: Run) -> None:
    page = (SOURCE.parents[1] / "docs" / "cli.md").read_text()
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    sections["quantize"] = sections["plan"] = sections.pop("quantize and plan")
    assert set(sections) == set(COMMANDS)
    for command in COMMANDS:
        known = set(re.findall(r"--[\w-]+", run(command, "--help").out)) - {"--help", "--reload"}
        assert known - set(re.findall(r"--[\w-]+", sections[command])) == set()


def test_help_names_every_format_and_method() -> None:
    assert tuple(PRESETS) == options.FORMATS
    assert list(options.METHODS) == list(METHODS)


def test_version(run: Run) -> None:
    assert re.fullmatch(r"quantkit \d+\.\d+\.\d+\n", run("--version").out)


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("10B", 10), ("500MB", 500_000_000), ("2 GiB", 2 << 30), ("3kb", 3000)]
)
def test_sizes(text: str, size: int) -> None:
    assert options.parse_size(text) == size


def test_sizes_are_shown_in_powers_of_1000() -> None:
    shown = [size_text(n) for n in (0, 999, 1000, 1_500_000, 2e9, 3e12, 4e15)]
    assert shown == ["0 B", "999 B", "1.00 kB", "1.50 MB", "2.00 GB", "3.00 TB", "4000.00 TB"]


def test_tables_fit_80_columns(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    out = run("inspect", packed).out
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(
        r"model\.layers\.\*\.self_attn\.k_proj +5 +32x64 int4 channel mse +4\.312 \d\.\de-03", out
    )
    out = run("eval", packed, "--against", SOURCE, "--text", STORIES, "--window", 64, "--max-windows", 1).out
    assert re.search(r"\nint4 +4\.277 +7\.845 +\d+\.\d\d kB +[\d.]+ +[+-][\d.]+ +[\d.]+ +[\d.]+%\n", out)


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "{packed}", "--json"]])
def test_a_closed_pipe_is_no_traceback(packed: Path, arguments: list[str]) -> None:
    code = "from quantkit.cli.main import main; main()"
    command = [sys.executable, "-c", code, *(argument.format(packed=packed) for argument in arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_the_package_runs_as_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "quantkit", "formats", "binary", "--codes"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "-1" in shown.stdout


def test_one_scale_per_tensor(run: Run, reloaded_here: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("quantize", SOURCE, out, "--format", "fp8", "-g", "tensor", "--json")
    assert done.code == 0, done.err
    written = json.loads(done.out)
    assert written["container"] == "compressed-tensors" and written["notes"] == []
    packed = {layer["scheme"] for layer in written["layers"].values()} - {None}
    assert packed == {"fp8-e4m3 tensor bfloat16"}
    # Eight bits a weight and sixteen in all.
    assert all(
        layer["bits_per_weight"] == 8 + 16 / math.prod(layer["shape"])
        for layer in written["layers"].values()
        if layer["scheme"] is not None
    )
    shown = run("inspect", out)
    assert re.search(r"self_attn\.q_proj +5 +64x64 fp8-e4m3 tensor mse", shown.out)
    assert run("verify", out).code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-f", "mxfp4"), "group size 'tensor' does not go with e8m0 scales"),
        (("-f", "int4", "--zero-point", "integer"), "does not go with integer zero-points"),
        (("-f", "int4", "--method", "hqq"), "method 'hqq' has no way to choose one scale per tensor"),
    ],
)
def test_what_has_no_scale_per_tensor_is_refused_by_the_plan(
    run: Run, options: tuple[str, ...], message: str
) -> None:
    done = run("plan", SOURCE, "-g", "tensor", *options)
    assert done.code == 4 and message in " ".join(done.err.split())


def test_how_many_tokens_experts_have_is_said_once_per_expert() -> None:
    plain = Measured(0.1)
    assert coverage_line({"model.layers.0.mlp.up_proj": plain}) is None
    experts = {
        f"model.layers.{layer}.mlp.experts.{leaf}": Measured(0.1, 0.1, None, None, tokens)
        for layer, tokens in ((0, (5, 0, 12)), (1, (7, 8, 300)))
        for leaf in ("gate_up_proj", "down_proj")
    }
    line = coverage_line({"model.layers.0.self_attn.q_proj": plain, **experts})
    assert line == "calibration tokens per expert: 0 to 300, median 7; 1 of 6 experts without any"


def test_errors_of_learned_blocks_count_each_block_once() -> None:
    blocks = {"0.q_proj": (0.2, 0.1), "0.k_proj": (0.2, 0.1), "1.q_proj": (0.4, 0.4), "1.k_proj": None}
    measured = {name: Measured(0.1, block_error=errors) for name, errors in blocks.items()}
    assert learned_line(measured) == (
        "relative error of the outputs of blocks: mean 2.50e-01, 3.00e-01 before learned rounding"
    )
    assert learned_line({"0.k_proj": Measured(0.1)}) is None


def test_methods_with_data_take_the_bundled_text_by_default(run: Run, tmp_path: Path) -> None:
    small = ("--calibration-samples", 4, "--calibration-length", 32, "--device", "cpu")
    done = run("quantize", SOURCE, tmp_path / "out", "--method", "gptq", *small)
    assert done.code == 0
    assert (
        "note: calibrated on the text that comes with quantkit; give --calibration for text like yours"
        in done.err
    )
    calibration = json.loads((tmp_path / "out/quantkit_manifest.json").read_text())["calibration"]
    assert calibration.startswith("4 samples of 32 tokens from the text that comes with quantkit:4, sha256 ")
    assert f"calibrated on {calibration}" in run("inspect", tmp_path / "out").out.replace("\n", "")
    done = run("quantize", SOURCE, tmp_path / "no", "--method", "gptq", "--calibration", tmp_path)
    assert done.code == 2 and not (tmp_path / "no").exists()
    assert "Give one, or a data set of the hub as hf:OWNER/NAME." in done.err


DATA = ("--calibration", STORIES, "--calibration-samples", 4, "--calibration-length", 32)


def test_bits_per_weight(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """plan shows what quantize then does, from what was measured once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = ("--bits-per-weight", 4.5, "--formats", "int3,int4:32,int5,fp8", *DATA)
    done = run("plan", SOURCE, *asked)
    assert done.code == 0
    assert re.search(
        r"\nallocated: 4\.4\d\d of 4\.5 bits per weight, expected KL divergence 0\.\d+ nats", done.out
    )
    assert re.search(r"\d+ int5 \w+ bfloat16: allocated, 4\.5 bits per weight \(model\.layers", done.out)

    files = list((tmp_path / "cache").rglob("*.json"))
    assert len(files) == 1
    monkeypatch.setattr("quantkit.model.allocate.measure", None)
    planned = json.loads(run("plan", SOURCE, *asked, "--json").out)
    done = run("quantize", SOURCE, tmp_path / "out", *asked, "--json")
    assert (done.code, done.err) == (0, "")
    written = json.loads(done.out)
    assert written["allocation"] == planned["allocation"]
    assert written["allocation"]["bits_per_weight"] == written["bits_per_weight"]["linears"] <= 4.5
    stored = {name: layer["scheme"] for name, layer in written["layers"].items()}
    for group in written["allocation"]["groups"]:
        assert {stored[name].split()[0] for name in group["linears"]} == {group["scheme"].split()[0]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (*DATA, "--format", "int8"),
            "--bits-per-weight chooses the formats, so it does not go with --format.",
        ),
        ((*DATA, "-g", "32"), "so it does not go with --group-size. Leave one out; --formats says"),
        ((*DATA, "--formats", "int2,int9"), "--formats int9: unknown format 'int9'"),
        (
            (*DATA, "--formats", "int8,fp8"),
            "4.5 bits per weight are out of reach: with these formats the linears take",
        ),
        (
            (*DATA, "--milliseconds-per-token", "0.5"),
            "--bits-per-weight and --milliseconds-per-token are two budgets; formats are chosen within one.",
        ),
        (("--gpu", "nvidia_h200"), "--gpu says whose time --milliseconds-per-token counts; give that too."),
        (("--formats", ","), "--formats is empty; name at least one."),
    ],
)
def test_bits_per_weight_that_cannot_be(run: Run, options: tuple[object, ...], message: str) -> None:
    done = run("plan", SOURCE, "--bits-per-weight", 4.5, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err.replace("\n", " ")


def test_options_that_only_go_with_bits_per_weight(run: Run) -> None:
    done = run("plan", SOURCE, "--formats", "int4")
    assert (done.code, done.out) == (2, "")
    assert "--formats is what --bits-per-weight and --milliseconds-per-token choose from" in done.err
    done = run("plan", SOURCE, *DATA)
    assert (done.code, done.out) == (2, "")
    assert "--bits-per-weight and --milliseconds-per-token alone. Leave them out," in done.err


def test_milliseconds_per_token(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated, by group, in the nanoseconds of a table that is here for another GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    linears = read_structure(Checkpoint.open(SOURCE)).linears.values()
    times = {"int4": 3.125, "int8": 5.5}
    entries = {
        Key(as_computed(scheme(name), k), torch.bfloat16, n, k, 1): Entry(us, "dequantize")
        for n, k in {linear.shape for linear in linears}
        for name, us in times.items()
    }
    save(TileTable(Gpu("Far Away 9000", (9, 0), 1, 1), {}, entries), ROWS)
    asked = ("--milliseconds-per-token", 0.125, "--gpu", "far_away_9000", "--formats", "int4,int8", *DATA)
    done = run("plan", SOURCE, *asked)
    assert done.code == 0
    assert re.search(
        r"\nallocated: 0\.12\d of 0\.125 milliseconds per token on far_away_9000, \d\.\d+ bits per weight, "
        r"expected KL divergence 0\.\d+ nats per token\n",
        done.out,
    )
    assert re.search(r"\nallocated +count stored as +nanoseconds +KL\n", done.out)
    assert re.search(r"self_attn\.k_proj, q_proj, v_proj +\d int4 \w+ +\d+ \d\.\de-\d\d\n", done.out)
    found = json.loads(run("plan", SOURCE, *asked, "--json").out)["allocation"]
    assert found["cost"] == sum(
        1e3 * times[group["scheme"].split()[0]] * len(group["linears"]) for group in found["groups"]
    )
    assert found["cost"] <= found["budget"] == 125_000 and found["counts"] == "nanoseconds"
    done = run("plan", SOURCE, "--milliseconds-per-token", 1, "--gpu", "../other")
    assert (done.code, done.out) == (2, "")
    assert "no table of measured times for a GPU '../other'; there are far_away_9000, nvidia_h200." in (
        done.err.replace("\n", " ")
    )
