"""Importing quantkit is free: no transformers, no triton, no torch, no GPU, until something needs them."""

import subprocess
import sys
from pathlib import Path

STORIES = Path(__file__).parents[1] / "examples" / "stories260K"


def imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "triton", "lm_eval", "huggingface_hub"}
    assert not imported_by("import quantkit") & heavy


def test_the_command_line_loads_nothing_heavy_for_help() -> None:
    assert not imported_by("import quantkit.cli.app") & {"torch", "transformers", "triton", "matplotlib"}


def test_a_plan_imports_neither_calibration_nor_allocation() -> None:
    modules = imported_by("import quantkit; quantkit.plan")
    parts = {
        "quantkit.quantizing",
        "quantkit.quantization.allocate.allocate",
        "quantkit.quantization.distill.distill",
    }
    assert "quantkit.planning" in modules and not modules & {*parts, "transformers"}


def test_quantize_tensor_needs_no_transformers() -> None:
    modules = imported_by("import quantkit; quantkit.quantize_tensor")
    assert "torch" in modules
    assert not modules & {"transformers", "triton", "lm_eval", "huggingface_hub"}


def test_a_plan_runs_without_what_only_other_commands_need() -> None:
    modules = imported_by(f"import quantkit; quantkit.plan({str(STORIES)!r})")
    parts = {
        "quantkit.quantizing",
        "quantkit.converting",
        "quantkit.quantization.allocate.allocate",
        "quantkit.quantization.distill.distill",
        "quantkit.quantization.blockwise.calibration_data",
        "quantkit.runtime.generate",
        "quantkit.runtime.cuda_graphs.capture",
        "quantkit.eval.evaluate",
        "quantkit.bench.speed",
    }
    assert "quantkit.planning" in modules
    assert not modules & {*parts, "matplotlib", "datasets", "lm_eval", "peft", "gguf", "pandas"}
