"""Quantizing writes what the plan says, the same bytes however it is cut up, killed or resumed."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from quantkit.calibrate.methods import quantize_tensor
from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.checkpoint.manifest import read_manifest, verify_files
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, FormatError, OutputError, UsageError
from quantkit.quantization import stream
from quantkit.quantizing import quantize
from quantkit.recipes.recipe import Recipe

from ..support.compare import assert_equal
from ..tiny.calibrated import files_of
from ..tiny.packed import together
from ..tiny.sizes import SIZES, made_once

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36},
    ),
}
ROOT = Path(__file__).parents[2]
STORIES = next(
    (p for p in (ROOT / "examples/stories260K", ROOT.parent / "shared/models/stories260K") if p.is_dir()),
    None,
)
UP = "model.layers.1.mlp.up_proj.weight"


def write(
    directory: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    name, fields = FAMILIES[family]
    source = directory / f"{family}-source"

    def make() -> None:
        torch.manual_seed(0)
        config = getattr(transformers, name)(**{**SIZES, **fields, **changes})
        transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(source)
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(source / "tokenizer.json"))
        (source / "LICENSE").write_bytes(b"free \xff\n")

    made_once(source, ("quantize", family, dtype, changes), make)
    return source


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def edit(source: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def assert_same_bytes(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    assert found.dtype == expected.dtype, name
    assert_equal(*(one.contiguous().view(torch.uint8) for one in (found, expected)), name)


def check_tensors(source: Path, out: Path, **options: Any) -> int:
    """Compare every output tensor with its source; the number of packed matrices."""
    before, after = tensors_of(source), tensors_of(out)
    container = json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"]
    packed = [name.removesuffix("_scale") for name in after if name.endswith("weight_scale")]
    weights = {name: before.get(name, before["model.embed_tokens.weight"]) for name in packed}
    for names in together(packed, experts=False):
        # Linears that are joined are quantized as one matrix if they share a scale.
        whole = quantize_tensor(torch.cat([weights[name] for name in names]), **options)
        shares, first = whole.scheme.global_scale, 0
        for name in names:
            weight = weights[name]
            expected = whole if shares else quantize_tensor(weight, **options)
            rows = slice(first, first + len(weight)) if shares else slice(None)
            first += len(weight)
            stored = stored_format(expected.scheme, weight.shape[1], container)
            for part, tensor in expected.parts():
                found = after.pop(stored.part_name(name, part))
                own = tensor if part == "global_scale" else tensor[rows]
                assert_same_bytes(found, stored.to_file(part, own), f"{name} {part}")
            if stored.codes_per_element is None:
                assert after.pop(f"{name}_shape").tolist() == list(weight.shape)
            before.pop(name, None)
    assert set(after) == set(before)
    for name, tensor in after.items():
        assert_same_bytes(tensor, before[name], name)
    return len(packed)


CASES: list[dict[str, Any]] = [
    {"format": "int4", "method": "mse"},
    {"format": "int4", "method": "mse", "zero_point": "integer", "group_size": 32},
    {"format": "int8", "method": "rtn", "zero_point": "integer"},
    {"format": "fp6", "method": "mse"},
    {"format": "binary", "method": "rtn", "group_size": 48},
    {"format": "ternary", "method": "rtn", "packing": "radix"},
    {"format": "fp8", "method": "rtn"},
    {"format": "mxfp4", "method": "rtn"},
    {"format": "nvfp4", "method": "mse"},
    {"format": "int8", "method": "mse", "group_size": "tensor"},
    {"format": "ternary", "method": "rtn", "group_size": "tensor", "packing": "radix"},
]


@pytest.mark.parametrize("chunk", [8 << 20, 1], ids=["whole", "chunked"])
@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.sampled(2)
def test_packed_tensors_are_those_of_quantize_tensor_and_the_rest_is_untouched(
    tmp_path, monkeypatch, family, options, chunk
):
    # Chunks of 1 byte are chunks of 32 rows, the words of zero-points that do not share a block.
    monkeypatch.setitem(stream.CHUNK_BYTES, "cpu", chunk)
    source = write(tmp_path, family, num_hidden_layers=1)
    quantize(source, tmp_path / "out", max_shard_bytes=20_000, **options)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert check_tensors(source, tmp_path / "out", **options) == (7 if family == "llama" else 4 + 12)


@pytest.mark.skipif(STORIES is None, reason="stories260K is not in this checkout")
def test_a_real_model_is_written_as_planned(tmp_path):
    assert STORIES is not None
    result = quantize(STORIES, tmp_path / "out", format="int4", group_size=32)
    assert check_tensors(STORIES, tmp_path / "out", format="int4", group_size=32) == 35
    assert all(0.001 < error < 0.01 for error in result.relative_errors.values())
    for path in STORIES.iterdir():
        if path.suffix in {".json", ".model"} and path.name != "config.json":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_source_dtypes(tmp_path, dtype):
    source = write(tmp_path, "qwen2", dtype)
    quantize(source, tmp_path / "out", method="rtn")
    assert check_tensors(source, tmp_path / "out", method="rtn") == 14


def test_a_tied_head_is_packed_from_the_embedding(tmp_path):
    source = write(tmp_path, "tied")
    quantize(source, tmp_path / "out", format="int8", lm_head="int8", method="rtn")
    assert check_tensors(source, tmp_path / "out", format="int8", method="rtn") == 15
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_side_files_are_identical_and_the_manifest_holds_every_file(tmp_path):
    source, out = write(tmp_path), tmp_path / "out"
    quantize(source, out, method="rtn")
    for name in ("tokenizer.json", "LICENSE", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not verify_files(out, read_manifest(out))
    assert {path.name for path in out.iterdir()} == {*read_manifest(out)["files"], "quantkit_manifest.json"}


def test_relative_errors_are_those_of_the_stored_weights(tmp_path):
    source, out = write(tmp_path, "qwen3_moe"), tmp_path / "out"
    result = quantize(source, out, format="int4", group_size=32)
    before = tensors_of(source)
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(4)]
    norm = error = 0.0
    for name in names:
        stored = quantize_tensor(before[name], "int4", group_size=32).dequantize().double()
        error += float((stored - before[name].double()).square().sum())
        norm += float(before[name].double().square().sum())
    module = "model.layers.0.mlp.experts.down_proj"
    assert result.relative_errors[module] == pytest.approx(error / norm, rel=1e-5)
    assert read_manifest(out)["layers"][module]["relative_error"] == result.relative_errors[module]


@pytest.mark.parametrize(
    "options",
    [
        {"zero_point": "integer", "group_size": 32},
        {"format": "binary-rank1"},
        {"format": "book4"},
        {"format": "fp8", "group_size": "tensor"},
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_the_bytes_do_not_depend_on_workers_threads_or_the_run(tmp_path, monkeypatch, options):
    source = write(tmp_path, num_hidden_layers=1)
    monkeypatch.setitem(stream.CHUNK_BYTES, "cpu", 1)
    threads = torch.get_num_threads()
    outputs = []
    for workers, torch_threads in ((2, threads), (2, threads), (1, 1), (5, 3)):
        monkeypatch.setattr(stream, "worker_count", lambda _, count=workers: count)
        torch.set_num_threads(torch_threads)
        try:
            quantize(source, tmp_path / "out", **options, overwrite=bool(outputs))
            assert torch.get_num_threads() == torch_threads
        finally:
            torch.set_num_threads(threads)
        outputs.append(files_of(tmp_path / "out"))
    assert all(output == outputs[0] for output in outputs)


def test_what_cannot_be_fitted_is_named(tmp_path):
    source = write(tmp_path, dtype=torch.float32)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] *= 1e9
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for options in ({"format": "book4"}, {"format": "int6", "group_size": "tensor", "overwrite": True}):
        with pytest.raises(FormatError, match=rf"^'{name}': a scale of \S+ overflows torch.float16; store"):
            quantize(source, tmp_path / "out", scale_dtype="float16", **options)


def test_large_rows_that_are_copied_are_read_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setitem(stream.CHUNK_BYTES, "cpu", 1000)
    source, read = write(tmp_path), []
    tensors = load_file(source / "model.safetensors")
    tensors["fused.experts"] = torch.randn(5, 40, 30)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    original = Checkpoint.read

    def watch(checkpoint: Checkpoint, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if name == "fused.experts":
            read.append((start, stop))
        return original(checkpoint, name, start, stop)

    monkeypatch.setattr(Checkpoint, "read", watch)
    quantize(source, tmp_path / "out", method="rtn")
    assert sorted(read) == [(i, i + 1) for i in range(5)]
    assert_same_bytes(tensors_of(tmp_path / "out")["fused.experts"], tensors["fused.experts"])


@pytest.mark.parametrize("chunk", [8 << 20, 1], ids=["whole", "chunked"])
def test_progress_grows_to_the_total(tmp_path, monkeypatch, chunk):
    monkeypatch.setitem(stream.CHUNK_BYTES, "cpu", chunk)
    source, seen = write(tmp_path, "tied"), []
    total = sum(tensor.nbytes for tensor in tensors_of(source).values()) + 2 * 96 * 64
    options: dict[str, Any] = {
        "method": "rtn",
        "lm_head": "int8",
        "progress": lambda *step: seen.append(step),
    }
    quantize(source, tmp_path / "out", **options)
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})
    assert seen[-1][0] == total and {whole for _, whole, _ in seen} == {total}
    seen.clear()
    quantize(source, tmp_path / "out", resume=True, **options)
    assert seen == [(total, total, "")]


def test_the_plan_is_shown_once_the_output_is_accepted_and_before_a_tensor_is_written(tmp_path):
    source, out, seen = write(tmp_path), tmp_path / "out", []

    def look(checkpoint: Any, plan: Any) -> None:
        seen.append([path.name for path in out.glob("*.safetensors")])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, on_plan=look)
    assert seen == [[]]
    with pytest.raises(OutputError, match="is inside the output"):
        quantize(source, source.parent, on_plan=look)
    assert seen == [[]]


def test_resuming_a_finished_run_changes_nothing_and_reports_the_same(tmp_path):
    source, out = write(tmp_path), tmp_path / "out"
    first = quantize(source, out, method="rtn")
    before = files_of(out)
    assert quantize(source, out, method="rtn", resume=True) == first
    assert files_of(out) == before


def test_quantized_sources_are_refused(tmp_path):
    quantize(write(tmp_path), tmp_path / "out", method="rtn")
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_output_with_something_in_it_is_refused(tmp_path):
    source, out = write(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(OutputError, match=r"notes\.txt"):
            quantize(source, out, **options)
    assert files_of(out) == {"notes.txt": b"mine"}


def test_an_output_inside_the_source_is_refused(tmp_path):
    source = write(tmp_path)
    before = {path.name for path in source.iterdir()}
    for out in (source, source / "out"):
        with pytest.raises(OutputError, match="source"):
            quantize(source, out)
    assert {path.name for path in source.iterdir()} == before


def test_a_finished_output_is_replaced_only_on_request(tmp_path):
    source, out = write(tmp_path), tmp_path / "out"
    quantize(source, out, method="rtn")
    with pytest.raises(OutputError, match="already holds a finished"):
        quantize(source, out, method="rtn")
    with pytest.raises(OutputError, match=r"recipe.default.format: .*int4.* -> .*int8"):
        quantize(source, out, format="int8", method="rtn", resume=True)
    quantize(source, out, format="int8", method="rtn", overwrite=True)
    assert check_tensors(source, out, format="int8", method="rtn") == 14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": True, "overwrite": True}, "exclude each other"),
        ({"recipe": Recipe(), "format": "int8"}, "a Recipe says all"),
        ({"recipe": Recipe(), "rules": ("a=keep",)}, "a Recipe says all"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"rules": ("model.*=keep",)}, "the recipe keeps every linear. Leave out its rules with keep"),
        ({"rules": ("nowhere=keep",)}, "matches no linear"),
    ],
    ids=str,
)
def test_contradictory_options_are_refused(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        quantize(write(tmp_path), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, {"format": "fp8", "group_size": "tensor"}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_and_no_checkpoint_is_left(tmp_path, value, options):
    source, out = write(tmp_path), tmp_path / "out"

    def spoil(weight: torch.Tensor) -> torch.Tensor:
        weight[40, 3] = value
        return weight

    edit(source, UP, spoil)
    counts = "1 NaN and 0" if value != value else "0 NaN and 1"
    with pytest.raises(FormatError, match=rf"'{UP}', rows 0 to 171: {counts} infinite"):
        quantize(source, out, **options)
    assert not (out / "config.json").exists() and not list(out.glob("*.safetensors"))
    quantize(source, out, rules=(f"{UP.removesuffix('.weight')}=keep",), overwrite=True, **options)
    assert_same_bytes(tensors_of(out)[UP], tensors_of(source)[UP])


def test_a_source_that_changes_during_the_run_is_refused(tmp_path):
    source, out = write(tmp_path), tmp_path / "out"
    changed = False

    def touch(done: int, total: int, name: str) -> None:
        nonlocal changed
        if not changed:
            os.utime(source / "model.safetensors", ns=(1, 1))
            changed = True

    with pytest.raises(CheckpointError, match="changed"):
        quantize(source, out, progress=touch, max_shard_bytes=10_000)
    assert changed and not (out / "config.json").exists()
    with pytest.raises(OutputError, match="source"):
        quantize(source, out, resume=True, max_shard_bytes=10_000)


@pytest.mark.fault(68)
def test_a_config_that_changes_after_the_last_tensor_is_refused(tmp_path):
    source, out = write(tmp_path), tmp_path / "out"

    def touch(done: int, total: int, name: str) -> None:
        if done == total:
            os.utime(source / "config.json", ns=(1, 1))

    with pytest.raises(CheckpointError, match=r"config\.json"):
        quantize(source, out, progress=touch)
    assert not (out / "config.json").exists()


def test_no_worker_writes_after_a_failure(tmp_path, monkeypatch):
    # The descriptor of a closed shard may be that of another file.
    monkeypatch.setitem(stream.CHUNK_BYTES, "cpu", 1)
    running: list[str] = []

    def slow(*arguments: Any) -> Any:
        running.append("begin")
        time.sleep(0.05)
        running.append("end")

    def fail(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    discard = stream.ShardFile.discard
    states: list[int] = []

    def watch(file: Any) -> None:
        states.append(running.count("begin") - running.count("end"))
        discard(file)

    monkeypatch.setattr(stream, "_copy_rows", slow)
    monkeypatch.setattr(stream.ShardFile, "discard", watch)
    with pytest.raises(KeyboardInterrupt):
        quantize(write(tmp_path), tmp_path / "out", method="rtn", progress=fail)
    assert states == [0] and running


@pytest.mark.fault(62)
def test_killed_at_any_moment_and_resumed_it_is_the_same_directory(tmp_path, monkeypatch):
    source, out = write(tmp_path, "qwen3_moe"), tmp_path / "out"
    options: dict[str, Any] = {
        "zero_point": "integer",
        "group_size": 32,
        "max_shard_bytes": 2_000,
        "lm_head": "int8",
    }
    quantize(source, tmp_path / "whole", **options)
    # Slowed down, as a tiny model is done before a kill arrives.
    rows = stream._quantize_rows
    monkeypatch.setattr(stream, "_quantize_rows", lambda *work: (time.sleep(0.01), rows(*work))[1])
    # Forked after the imports, and with one thread: OpenMP's threads do not survive a fork.
    context = multiprocessing.get_context("fork")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    chance, kills, moments = random.Random(0), 0, set()
    try:
        while True:
            child = context.Process(target=quantize, args=(source, out), kwargs={**options, "resume": True})
            child.start()
            # A few shards further than the last child came, and then at any moment.
            target = len(list(out.glob("*.safetensors"))) + chance.randint(0, 2)
            while child.is_alive() and (kills >= 12 or len(list(out.glob("*.safetensors"))) < target):
                time.sleep(0.001)
            child.join(chance.uniform(0, 0.03))
            if child.exitcode is not None:
                break
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            kills += 1
            moments.add(len(list(out.glob("*.safetensors"))))
    finally:
        torch.set_num_threads(threads)
    assert child.exitcode == 0
    assert len(moments) >= 6
    assert files_of(out) == files_of(tmp_path / "whole")
