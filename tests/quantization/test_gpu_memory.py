"""The GPU memory that a plan names: an upper bound, close to what the code holds when it runs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit import memory, quantizing
from quantkit.calibrate import gptq, hessian, quantize_with_hessian, scale_search, scaling
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.methods import METHODS, quantize_rows
from quantkit.calibrate.parameters import fit_parameters
from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.model import blocks
from quantkit.model.distributed import Ranks
from quantkit.model.forward import model_pass
from quantkit.model.forward.suspended import Suspended
from quantkit.packing.schemes import scheme
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization import gpu_memory
from quantkit.quantization.blockwise import awq, layer_quantizer, moe_calibration, pipeline, refine_block
from quantkit.quantization.blockwise.calibration import Calibration
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.recipes.recipe_options import RecipeOptions

from ..support.live_bytes import AtOnce, LiveBytes
from ..tiny.calibrated import write

#: The widths of Llama-3 8B and 70B are so many times those of the tests, and what is worked on at a time.
SHRUNK = 32
EIGHT = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4, "head_dim": 32}
SEVENTY = {"hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 8, "head_dim": 32}
EXPERTS = {**EIGHT, "moe_intermediate_size": 64, "num_experts": 4}
CPU = torch.device("cpu")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU works on as much at a time as a GPU does, in proportion to the width of the models."""
    tables = (
        (scale_search.HISTOGRAM_CELLS, scale_search.HISTOGRAM_CELLS["cuda"] // SHRUNK**2),
        (hessian.TILE, hessian.TILE["cuda"] // SHRUNK),
        (gptq.REFIT_COLUMNS, gptq.REFIT_COLUMNS["cuda"] // SHRUNK),
        (pipeline.SUSPENDED_MEMORY, 0.0),
        (pipeline.BATCH, 8),
        (pipeline.LEARNING_BATCH, 8),
    )
    for table, value in tables:
        monkeypatch.setitem(table, "cpu", value)
    for module, name, by in (
        (hessian, "INPUT_ERROR_ROWS", SHRUNK),
        (gpu_memory, "INPUT_ERROR_ROWS", SHRUNK),
        (hessian, "CHOLESKY_COLUMNS", SHRUNK),
        (hessian, "CORRECTION_ROWS", SHRUNK),
        (gptq, "PRODUCT_COLUMNS", SHRUNK),
        (moe_calibration, "TOKENS", SHRUNK),
        (scaling, "SAMPLE_ROWS", SHRUNK),
        (pipeline, "BATCH_TOKENS", SHRUNK),
        (pipeline, "BATCH_FEATURES", SHRUNK**2),
        (gpu_memory, "GPU_WEIGHTS", SHRUNK**2),
        (gpu_memory, "GPU_GRID_WEIGHTS", SHRUNK**2),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // by)
    chunk, grid = quantize_with_hessian.GPU_CHUNK_WEIGHTS // SHRUNK**2, quantize_with_hessian._scale_zero
    for module in (quantize_with_hessian, layer_quantizer, gpu_memory):
        monkeypatch.setattr(module, "chunk_rows", lambda columns, _: max(1, chunk // columns))

    def in_parts(weights: torch.Tensor, *given: Any) -> Any:
        some = torch.split(weights, gpu_memory.GPU_GRID_WEIGHTS // weights.shape[1])
        found = [grid(rows, *given) for rows in some]
        zeros = [zero for _, zero in found if zero is not None]
        return torch.cat([scale for scale, _ in found]), torch.cat(zeros) if zeros else None

    monkeypatch.setattr(quantize_with_hessian, "_scale_zero", in_parts)
    monkeypatch.setattr(
        awq,
        "measured_at_once",
        lambda columns, _: gpu_memory.GPU_WEIGHTS // (scaling.SAMPLE_ROWS * columns),
    )
    # What other threads make is not counted.
    monkeypatch.setattr(blocks, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(refine_block, "STEPS", 2)


def counted(live: LiveBytes, function: Callable[[Suspended], Any]) -> Suspended:
    """A suspended function whose tensors are counted too."""

    def run(suspended: Suspended) -> Any:
        with live:
            return function(suspended)

    return Suspended(run)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("family", "sizes", "method", "format", "samples"),
    [
        ("llama", EIGHT, "gptq", "int4", 32),
        ("llama", EIGHT, "gptq", "nvfp4", 16),
        ("llama", EIGHT, "awq", "int4", 64),
        ("llama", EIGHT, "best", "int4", 16),
        ("llama", EIGHT, "signround", "int4", 8),
        ("llama", SEVENTY, "awq", "int4", 8),
        ("qwen3_moe", EXPERTS, "gptq", "int4", 32),
    ],
)
@pytest.mark.sampled(2, "family", "method")
def test_blocks_hold_what_the_plan_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sizes: dict[str, int],
    method: str,
    format: str,
    samples: int,
) -> None:
    source = write(tmp_path, family, num_hidden_layers=1, max_position_embeddings=64, **sizes)
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + (i * i * 7 + i // 3) % 90) for i in range(64 * (samples + 1))))
    checkpoint, planned = plan(source, QuantizeOptions(RecipeOptions(format=format, method=method)))
    options = CalibrationOptions(str(text), samples, 64)
    calibration = Calibration.of(checkpoint, planned, options, CPU)
    assert calibration is not None
    bound = gpu_memory.calibrated_bytes(checkpoint, planned, (samples, 64), CPU, None)
    out = OutputDirectory.open(tmp_path / "out", checkpoint.directory, Mode.NEW, {}, 1 << 20)
    with out as output, LiveBytes() as live:
        # Passes of the model have threads of their own, which run while this one waits.
        monkeypatch.setattr(model_pass, "Suspended", partial(counted, live))
        pipeline.quantize_blocks(
            calibration.blocks,
            calibration.decoder,
            output,
            calibration.samples,
            AtOnce(),  # type: ignore[arg-type]
            1,
            Ranks(),
            lambda *_: None,
        )
    # Learned rounding has no measurement of a GPU yet, and more room.
    assert (0.7 if method == "signround" else 0.8) * bound < live.most <= bound


@pytest.mark.parametrize("method", ["rtn", "mse", "hqq"])
@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("int4", {}),
        ("int8", {}),
        ("int2", {"group_size": 16}),
        ("int4", {"zero_point": "integer"}),
        ("int4", {"zero_point": "float"}),
        ("fp6", {}),
        ("nf4", {}),
        ("nvfp4", {}),
    ],
)
def test_rows_without_data_hold_what_the_plan_says(
    method: str, format: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scale_search.HISTOGRAM_CELLS, "cpu", scale_search.HISTOGRAM_CELLS["cuda"])
    weights = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    chosen = scheme(format, **options).for_columns(256)
    if method == "hqq" and not chosen.format.name.startswith("int"):
        return
    task: Any = type(
        "",
        (),
        {"scheme": chosen, "method": METHODS[method], "source": weights, "needs": METHODS[method].needs},
    )
    shared = fit_parameters(lambda: iter([weights]), (1024, 256), chosen, METHODS[method].scale_search.fit)
    with LiveBytes() as live:
        quantize_rows(weights, chosen, METHODS[method], shared)
    # On a GPU the rows are copied to float32 first.
    bound = gpu_memory._rows_bytes(task, weights.numel(), CPU)
    assert 0.35 * bound < live.most + weights.nbytes <= bound


def test_quantize_says_where_a_gpu_has_less_than_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, planned = plan(write(tmp_path), QuantizeOptions(RecipeOptions(method="gptq")))
    for free in (1 << 40, 1 << 28):
        for module in (quantizing, memory):
            monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        quantizing._say_if_short(checkpoint, planned, CalibrationOptions(), torch.device("cuda"))
    (said,) = caplog.messages
    assert "and cuda has 268.44 MB free" in said


def test_passes_that_measure_scales_count(tmp_path):
    source = write(tmp_path, "llama", num_hidden_layers=2)
    options = CalibrationOptions(samples=4, length=16)
    sizes = []
    for recipe in (RecipeOptions(scheme="FP8_DYNAMIC"), RecipeOptions(scheme="FP8")):
        checkpoint, planned = plan(source, QuantizeOptions(recipe=recipe, calibration=options))
        sizes.append(gpu_memory.measured_bytes(checkpoint, planned, (4, 16), torch.device("cuda"), None))
    assert sizes[0] == 0 < sizes[1]


def test_a_calibration_on_a_cpu_holds_more_with_more_samples(tmp_path: Path) -> None:
    source = write(tmp_path)

    def held(method: str, count: int) -> int | None:
        asked = QuantizeOptions(recipe=RecipeOptions(method=method))
        checkpoint, planned = plan(source, asked)
        return gpu_memory.host_bytes(checkpoint, planned, CalibrationOptions(samples=count))

    sizes = [held("gptq", count) for count in (8, 4096, 1 << 20, 1 << 21)]
    assert None not in sizes and sizes == sorted(set(sizes))  # type: ignore[type-var]
    best = held("best", 1 << 20)
    assert best is not None and sizes[2] is not None and best > sizes[2]
    # Two copies of float32 hidden states at least, before and after a block.
    assert sizes[3] - sizes[2] >= 2 * 4 * (1 << 20)  # type: ignore[operator]
    assert held("mse", 8) is None and held("best,distill", 8) is None
