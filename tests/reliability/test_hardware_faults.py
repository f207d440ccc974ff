"""GPUs that are too small or not there, damaged caches, versions and exports that do not fit: rows 69 to 72.

Nothing here needs a GPU: what one would raise or lack is simulated where quantkit asks for it.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit import memory
from quantkit.errors import CheckpointError, EnvironmentProblem, KernelError, UsageError
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem
from quantkit.kernels.registry import KERNELS, choose, forget_tile_tables
from quantkit.kernels.tuning.store import save, user_path
from quantkit.kernels.tuning.tile_table import Entry, Key, TileTable
from quantkit.model import blocks, transformers_version
from quantkit.packing.schemes import scheme
from quantkit.quantization import stream
from quantkit.quantization.blockwise import layer_quantizer

from ..conftest import Run
from .faults import (
    QUICK,
    SOURCE,
    STORIES,
    WEIGHTS,
    Message,
    check_message,
    is_unfinished,
    refused,
    resumes,
    snapshot,
)

#: As torch says it.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.93 GiB of which 512.00 "
    "MiB is free. Process 1 has 7.10 GiB memory in use."
)
GPTQ = ("-m", "gptq", "--calibration", STORIES, "--calibration-samples", 2, "--calibration-length", 16)
FIGURES = "(2.00 GiB needed at once, 512.00 MiB free)"


def room_for(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, rows: Callable[[], int]) -> None:
    """Let a calculation run out of memory for more than so many rows at a time."""
    calculate = getattr(module, name)

    def limited(weights: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if len(weights) > rows():
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return calculate(weights, *rest, **options)

    monkeypatch.setattr(module, name, limited)
    monkeypatch.setattr(memory, "_said", set())


METHODS = pytest.mark.parametrize(
    ("module", "name", "method"),
    [(stream, "quantize_rows", QUICK), (layer_quantizer, "quantize_calibrated_rows", (*GPTQ, "--no-check"))],
    ids=["plain", "calibrated"],
)


@pytest.mark.fault(69)
@METHODS
def test_a_gpu_that_is_too_small_gets_fewer_rows_at_a_time(
    run: Run,
    tmp_path: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    name: str,
    method: tuple[object, ...],
) -> None:
    assert run("quantize", SOURCE, tmp_path / "whole", *method).code == 0
    room_for(monkeypatch, module, name, lambda: 33)
    done = run("quantize", SOURCE, out, *method)
    assert done.code == 0, done.err
    assert snapshot(out)[WEIGHTS] == snapshot(tmp_path / "whole")[WEIGHTS]
    said = [record.getMessage() for record in caplog.records if record.name == "quantkit.memory"]
    assert len(said) == len(set(said)) >= 2
    assert "the GPU has too little memory for 64 rows at a time " + FIGURES + ", so 32 are tried" in "".join(
        said
    )
    assert all("Free memory on it to avoid that." in text for text in said)


@pytest.mark.fault(69)
@METHODS
def test_a_gpu_without_memory_for_a_row_is_an_error_with_figures(
    run: Run,
    tmp_path: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    method: tuple[object, ...],
) -> None:
    command = ("quantize", SOURCE, out, *method, "--max-shard-size", "50KB")
    assert run(*command[:2], tmp_path / "whole", *command[3:]).code == 0
    left = [100]

    def rows() -> int:
        left[0] -= 1
        return 1000 if left[0] > 70 else 0

    with monkeypatch.context() as patch:
        room_for(patch, module, name, rows)
        done = run(*command)
    message = Message(
        "'model.layers.", f"the GPU has too little memory {FIGURES}", "even one row at a time", "--resume"
    )
    check_message(done, EnvironmentProblem, message)
    assert "or start over with --device cpu." in str(done.error)
    is_unfinished(out)
    resumes(run, command, out, snapshot(tmp_path / "whole"))


@pytest.mark.fault(69)
@pytest.mark.parametrize("command", ["quantize", "plan"])
def test_a_gpu_too_small_for_a_pass_is_an_error_with_figures(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    monkeypatch.setattr(blocks.Decoder, "passes", fail)
    budget = ("--bits-per-weight", 4.5, "--formats", "int4,int8", *GPTQ[2:])
    monkeypatch.setenv("XDG_CACHE_HOME", str(out.parent / "cache"))
    message = Message(SOURCE, f"the GPU has too little memory {FIGURES}", "Free memory", "--device cpu")
    if command == "plan":
        refused(run, ("plan", SOURCE, *budget), EnvironmentProblem, message, out.parent)
        return
    refused(run, ("quantize", SOURCE, out, *budget), EnvironmentProblem, message, out.parent)
    done = run("quantize", SOURCE, out, *GPTQ)
    check_message(done, EnvironmentProblem, message)
    assert not out.exists()


@pytest.mark.fault(69)
@pytest.mark.parametrize("command", [("generate", "hello"), ("eval", "--text", STORIES)], ids=str)
def test_a_gpu_too_small_to_run_a_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...]
) -> None:
    from transformers import LlamaForCausalLM

    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    message = Message(SOURCE, FIGURES, "the GPU has too little memory", "Use --device cpu, or a ")
    refused(run, (command[0], SOURCE, *command[1:]), EnvironmentProblem, message, tmp_path)


@pytest.mark.fault(70)
def test_without_a_gpu_the_cpu_is_used_unless_a_gpu_was_asked_for(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = Message(
        "device 'cuda'", "this torch sees no GPU", "Install a CUDA build of torch", "--device cpu"
    )
    refused(run, ("quantize", SOURCE, out, "--device", "cuda"), UsageError, message, out.parent)
    refused(run, ("generate", SOURCE, "hello", "--device", "cuda"), UsageError, message, out.parent)
    assert run("quantize", SOURCE, out, *QUICK).code == 0
    assert run("generate", out, "Once", "-n", 2).code == 0


GPU = Gpu("Test GPU 3000", (9, 0), 130, 227 << 10)


def problem(features: frozenset[str] = GPU_FEATURES, capability: tuple[int, int] = (9, 0)) -> Problem:
    gpu = replace(GPU, capability=capability)
    return Problem(1, 4096, 4096, scheme("int4"), torch.bfloat16, "cuda", features, None, gpu)


@pytest.mark.fault(70)
@pytest.mark.usefixtures("cache")
def test_a_gpu_without_triton_computes_in_torch_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    from quantkit.kernels import registry

    without = problem(frozenset(GPU_FEATURES - {"triton"}))
    row = choose(without).kernel
    assert row.layout is None
    registry._logged.clear()
    for _ in range(2):
        registry.warn_unfused(without, row)
    (record,) = caplog.records
    assert f": {row.name}; not " in record.getMessage() and "triton" in record.getMessage().lower()


@pytest.mark.fault(70)
@pytest.mark.usefixtures("cache")
def test_a_kernel_that_was_asked_for_and_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(row.name for row in KERNELS if row.tile_space is not None)
    monkeypatch.setenv("QUANTKIT_KERNEL", name)
    with pytest.raises(KernelError) as caught:
        choose(problem(frozenset(GPU_FEATURES - {"triton"})))
    text = str(caught.value)
    assert text.startswith(f"QUANTKIT_KERNEL={name} cannot run ")
    assert "Triton" in text and text.endswith("Unset QUANTKIT_KERNEL or name another row.")


@pytest.mark.fault(70)
def test_a_kernel_that_was_asked_for_and_does_not_exist(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("quantize", SOURCE, out, *QUICK).code == 0
    monkeypatch.setenv("QUANTKIT_KERNEL", "warp-drive")
    message = Message("'warp-drive'", "unknown kernel", "known are torch-int4", "Check QUANTKIT_KERNEL")
    refused(run, ("generate", out, "hello"), KernelError, message, out.parent)


@pytest.mark.fault(70)
@pytest.mark.parametrize("version", ["4.57.1", "6.0.0.dev0"])
def test_a_transformers_outside_the_range(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(transformers_version.metadata, "version", lambda name: version)
    message = Message("transformers", f"found {version}", ">=5.12,<6.0", "pip install")
    refused(run, ("generate", SOURCE, "hello"), EnvironmentProblem, message, tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("QUANTKIT_TILES", raising=False)
    forget_tile_tables()
    yield tmp_path / "cache"
    forget_tile_tables()


def store(gpu: Gpu = GPU, **recorded: str) -> Path:
    """A table with a row that the rules would not choose."""
    entry = Entry(20.0, "dequantize")
    known = {"quantkit": "0.1.0", "torch": "2.11.0", "triton": "3.6.0", **recorded}
    save(TileTable(gpu, known, {Key.of(problem()): entry}), KERNELS)
    forget_tile_tables()
    path = user_path(GPU)
    assert path is not None
    return path


@pytest.mark.fault(71)
def test_a_damaged_tile_table_stops_and_is_named(cache: Path) -> None:
    """Another tile would be another speed without a word: the file is named, and deleting it is safe."""
    path = store()
    assert choose(problem()).kernel.name == "dequantize"
    path.write_bytes(path.read_bytes()[:-20])
    forget_tile_tables()
    with pytest.raises(KernelError) as caught:
        choose(problem())
    text = str(caught.value)
    assert text.startswith(f"the tile table {path} is damaged: ")
    assert text.endswith("Delete it, or run `quantkit tune`.")
    path.unlink()
    forget_tile_tables()
    assert choose(problem()).kernel.name != "dequantize"


@pytest.mark.fault(71)
def test_a_tile_table_of_another_gpu_is_left_out(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = store()
    text = path.read_text().replace("Test GPU 3000", "Other GPU 7")
    path.write_text(text)
    forget_tile_tables()
    rules = choose(problem()).kernel.name
    assert rules != "dequantize"
    assert any(
        f"the tile table {path} is not used" in record.getMessage() and "Delete it" in record.getMessage()
        for record in caplog.records
    )


@pytest.mark.fault(71)
def test_a_damaged_sensitivity_cache_is_measured_anew(run: Run, cache: Path) -> None:
    formats = ("--bits-per-weight", 5, "--formats", "int4:32,int5,fp8")
    command = ("plan", SOURCE, *formats, *GPTQ[2:], "--json")
    first = run(*command)
    assert first.code == 0, first.err
    (file,) = cache.rglob("*.json")
    whole = file.read_bytes()
    for content in (b"", whole[:-20], b'{"a": 1}'):
        file.write_bytes(content)
        again = run(*command)
        assert again.code == 0
        assert json.loads(again.out)["allocation"] == json.loads(first.out)["allocation"]
        assert file.read_bytes() == whole


@pytest.mark.fault(71)
@pytest.mark.parametrize("place", ["no home", "a file", "not writable"])
def test_a_cache_that_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Nothing is kept, and nothing else is different."""
    if place == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    elif place == "a file":
        (tmp_path / "cache").write_bytes(b"")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no")
    command = ("--bits-per-weight", 5, "--formats", "int4:32,int5,fp8", *GPTQ[2:])
    done = run("plan", SOURCE, *command)
    assert done.code == 0, done.err
    assert "allocated: " in done.out


@pytest.mark.fault(72)
def test_an_export_of_values_that_the_target_does_not_have(run: Run, tmp_path: Path) -> None:
    assert run("quantize", SOURCE, tmp_path / "packed", *QUICK, "--format", "nf4").code == 0
    message = Message(
        "'model.layers.0.mlp.down_proj' and 34 more",
        "its values are those of nf4",
        "awq holds integers of 4 bits",
        "Quantize with --format int4",
    )
    command = ("export", tmp_path / "packed", tmp_path / "out", "--to", "awq")
    refused(run, command, CheckpointError, message, tmp_path)
