"""`quantkit plan` and `quantkit quantize`: what they promise, write, resume and refuse."""

import json
import math
import os
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.engines import SGLANG, TRANSFORMERS, VLLM
from quantkit.checkpoint.model_record import Measured
from quantkit.checkpoint.output.directory import OutputDirectory
from quantkit.checkpoint.output.journal import Journal
from quantkit.checkpoint.output.shard_file import ShardFile
from quantkit.checkpoint.source import Checkpoint
from quantkit.cli import threads
from quantkit.cli.commands.quantize import coverage_line, learned_line
from quantkit.kernels.problem import Gpu
from quantkit.kernels.registry import KERNELS
from quantkit.kernels.tuning.store import save
from quantkit.kernels.tuning.tile_table import Entry, Key, TileTable, as_computed
from quantkit.leaving import advised
from quantkit.model.structure import read_structure
from quantkit.packing.schemes import scheme

from .conftest import SOURCE, STORIES, Run


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
    assert planned.pop("time")["factor"] == 2
    assert planned == written
    assert planned["needs_quantkit"][0].endswith("compressed-tensors has no fp6-e2m3")
    assert all((tmp_path / "out" / name).stat().st_size > size for name, size in written["files"].items())


def test_plan_tells_memory_and_readers(run: Run) -> None:
    done = run("plan", SOURCE, "-f", "int8", "--every-layer")
    assert (done.code, done.err) == (0, "")
    assert "model.layers.4.self_attn.v_proj" in done.out
    assert "error" not in done.out
    readers = f"{VLLM}, {SGLANG} and {TRANSFORMERS}"
    assert f"a compressed-tensors checkpoint: {readers} read it without quantkit\n" in done.out
    memory = r"peak memory beyond the libraries: about [\d.]+ MB"
    assert re.search(rf"{memory}\n", done.out)
    done = run(
        "plan", SOURCE, "-f", "int8", "-m", "gptq", "--calibration", str(SOURCE.parent / "stories.txt")
    )
    kept = "and up to half of what is free for activations that are kept between linears"
    text = done.out.replace("\n", " ")
    assert re.search(rf"peak memory beyond the libraries: at least [\d.]+ MB, {kept} ", text), done.out


def test_plan_refuses_what_quantize_does(run: Run) -> None:
    """Steps or a time of a training that no method makes."""
    for given in (("--steps", 5), ("--time", "5m")):
        done = run("plan", SOURCE, *given)
        assert done.code == 2 and "no method of the recipe trains" in done.err.replace("\n", " ")
    done = run("plan", SOURCE, "--fit", "24")
    assert done.code == 2 and "--fit is '24', which is 24 bytes" in done.err.replace("\n", " ")


def test_plan_tells_what_a_gpu_that_is_not_here_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # A note about cores is for CPUs, and does not ask for the GPU.
    monkeypatch.setattr(threads, "shortage", lambda _: "few cores are free")
    line = r"GPU memory, as nvidia-smi counts it: at most ([\d.]+) GB to quantize, [\d.]+ GB to run"
    sizes = {}
    for method in ("mse", "gptq"):
        done = run("plan", SOURCE, "-f", "int8", "-m", method, "--device", "cuda")
        assert (done.code, done.err) == (0, "")
        found = re.search(line, done.out.replace("\n", " "))
        assert found is not None, done.out
        sizes[method] = float(found[1])
    assert 1.0 < sizes["mse"] < sizes["gptq"]
    many = ("--calibration-samples", 4096, "--calibration-length", 512)
    told = json.loads(run("plan", SOURCE, "-m", "gptq", "--device", "cuda", *many, "--json").out)
    assert told["gpu_memory"]["quantizing"] > 1e9 * sizes["gptq"]
    assert told["gpu_memory"]["fastest"] is None
    trained = run("plan", SOURCE, "-f", "int2", "-m", "distill", "--device", "cuda").out.replace("\n", " ")
    found = re.search(r"it: ([\d.]+) GB to quantize and train, up to ([\d.]+) GB where that is free", trained)
    assert found is not None and 1.0 < float(found[1]) < float(found[2])
    assert "gpu_memory" not in json.loads(run("plan", SOURCE, "--device", "cpu", "--json").out)
    assert (
        "unknown device 'gpu'; known are auto, cpu, cuda. Did you mean cuda?"
        in run("plan", SOURCE, "--device", "gpu").err
    )


def test_a_recipe_file_decides_formats(run: Run, tmp_path: Path) -> None:
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


def test_recipe_file_in_yaml_is_refused_before_work(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rule:\n- match: '*.down_proj'\n  format: int8\n")
    done = run("quantize", SOURCE, tmp_path / "none", "--recipe", recipe)
    assert done.code == 2
    assert f"recipe {recipe} ends in '.yaml'; expected TOML in" in " ".join(done.err.split())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "scheme"),
    [
        (("-f", "int3", "--zero-point", "float"), "int3 g128 asym-float bfloat16"),
        (("-f", "nf4", "-g", "32", "--scale-dtype", "e4m3"), "nf4 g32 e4m3"),
        (("-f", "nvfp4"), "fp4-e2m1 g16 e4m3"),
        (("-f", "ternary", "--packing", "radix"), "ternary g128 radix bfloat16"),
        (("-f", "int8", "--activations", "int8"), "int8 channel bytes bfloat16, x int8 token"),
        (("--scheme", "W8A8"), "int8 channel bytes bfloat16, x int8 token"),
        (("--scheme", "W4AFP8", "-g", "32"), "int4 g32 bfloat16, x fp8-e4m3 token"),
        (("--scheme", "W4A16_ASYM"), "int4 g128 asym bfloat16"),
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
        (("--zero-point", "half"), 2, "unknown zero-point 'half'; known are none, integer, float"),
        (("--packing", "radix"), 4, "packing 'radix' is not for 'int4': its 16 values fill 4 bits"),
        (("--packing", "trits"), 2, "unknown packing 'trits'; known are bits, radix"),
        (("--scale-dtype", "e5m2"), 2, "unknown scale dtype 'e5m2'; known are float32, float16"),
        (("--activations", "fp16"), 2, "unknown activations 'fp16'; known are none, int8, int8-static, fp8"),
        (("--activations", "fp8-g128"), 2, "groups of 128 inputs do not divide 172 features. Choose one sca"),
        (("--scheme", "w8a8"), 2, "unknown scheme 'w8a8'; known are FP8, FP8_DYNAMIC"),
        (("--scheme", "w8a8"), 2, "Did you mean W8A8?"),
        (("--scheme", "W8A8", "-f", "int4"), 2, "--scheme W8A8 says the format, so it does not go with --fo"),
        (("--scheme", "W8A8", "--activations", "fp8"), 2, "does not go with --activations. Leave one out."),
        (("--scheme", "W8A8", "--bits-per-weight", "4"), 2, "so it does not go with --scheme. Leave one out"),
        (("--lm-head", "int99"), 4, "unknown format 'int99'"),
        (("--rule", "down_proj"), 2, "rule 'down_proj' is not PATTERN=FORMAT[:GROUP][:METHOD]"),
        (("--rule", "*.nothing=int8"), 2, "rule '*.nothing' matches no linear of the model"),
        (("--rule", "*=int8", "--rule", "*.q_proj=keep"), 2, "rule '*.q_proj' never applies"),
        (("--rule", "*=keep"), 2, "there is nothing to quantize"),
        (("--recipe", "missing.toml"), 2, "recipe missing.toml cannot be read"),
        (("--max-shard-size", "10x"), 2, "size '10x' is not a positive number with a unit"),
        (("--device", "tpu"), 2, "unknown device 'tpu'; known are auto, cpu, cuda"),
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


@pytest.mark.parametrize("moment", ["before", "config", "done", "overwrite"])
def test_a_signal_says_how_to_go_on_where_that_is_possible(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As the files of the output are at that moment, also if the process ends at once."""
    out = tmp_path / "out"
    arguments = ["quantize", SOURCE, out, "-m", "rtn", "--no-check"]
    if moment == "overwrite":
        assert run(*arguments).code == 0
        arguments.append("--overwrite")
    owner, name, after = {
        "before": (Checkpoint, "__init__", False),
        "config": (Journal, "remove", True),
        "done": (OutputDirectory, "finish", True),
        "overwrite": (OutputDirectory, "shard", False),
    }[moment]
    before = getattr(owner, name)
    at_once: list[str | None] = []

    def interrupted(*rest: Any, **named: Any) -> Any:
        result = before(*rest, **named) if after else None
        at_once.append(advised())
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        done = run(*arguments)
    hint = "finished files are kept. Continue with the same command and --resume"
    said = {"config": f"{hint}.", "overwrite": f"{hint} in place of --overwrite."}.get(moment)
    assert done.code == 128 + signal.SIGTERM
    assert done.err.splitlines()[-1] == ("interrupted" if said is None else f"interrupted; {said}")
    assert at_once == [said]
    if said is not None:
        assert run(*[one for one in arguments if one != "--overwrite"], "--resume").code == 0


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


def test_bits_per_weight_are_allocated_as_planned(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr("quantkit.quantization.allocate.allocate.measure", None)
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
            (*DATA, "--formats", "int8,int6"),
            "4.5 bits per weight are out of reach: with these formats the linears take",
        ),
        (
            (*DATA, "--formats", "int8,fp8"),
            "in each of these formats, so a budget chooses nothing. Name other formats with --formats",
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rule", "*=keep"), "there is nothing to quantize in "),
        (("--calibration", STORIES), "calibration data was given, but no method of the recipe takes any."),
        (("-m", "gptq", "--calibration", "wikitext2"), "a data set of the hub as hf:Salesforce/wikitext/"),
        (("-m", "gptq", "--calibration", "missing.txt"), "calibration file missing.txt is not there."),
    ],
)
def test_plan_refuses_what_quantize_refuses(
    run: Run, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    planned, done = run("plan", SOURCE, *options), run("quantize", SOURCE, tmp_path / "out", *options)
    assert (planned.code, planned.err) == (done.code, done.err)
    assert (planned.code, planned.out) == (2, "") and message in planned.err
    assert not (tmp_path / "out").exists()


def test_options_that_only_go_with_bits_per_weight(run: Run) -> None:
    done = run("plan", SOURCE, "--formats", "int4")
    assert (done.code, done.out) == (2, "")
    assert "--formats is what --bits-per-weight and --milliseconds-per-token choose from" in done.err
    done = run("plan", SOURCE, *DATA)
    assert (done.code, done.out) == (2, "")
    assert "or a budget, such as --bits-per-weight." in done.err


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
    save(TileTable(Gpu("Far Away 9000", (9, 0), 1, 1), {}, entries), KERNELS)
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
    assert "a GPU '../other'; there are far_away_9000, nvidia_h100_80gb_hbm3, nvidia_h200." in (
        done.err.replace("\n", " ")
    )


def test_a_training_says_the_divergence_before_and_after(run: Run, tmp_path: Path) -> None:
    asked = ("quantize", SOURCE, tmp_path / "out", "-f", "binary-residual", "-m", "distill", "--steps", 2)
    text = SOURCE.parent / "stories.txt"
    few = ("--calibration", text, "--calibration-length", 32, "--calibration-samples", 4)
    said = run(*asked, *few, "--no-check").out
    found = re.search(r"KL on held out text: (\S+) nats before the training, (\S+) after 2 steps\n", said)
    assert found is not None
    facts = json.loads(run(*asked, *few, "--no-check", "--overwrite", "--json").out)["distillation"]
    assert [f"{facts[key]:.3g}" for key in ("kl_before", "kl_after")] == [found[1], found[2]]
    assert facts["steps"] == 2
