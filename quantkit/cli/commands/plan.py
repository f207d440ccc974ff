"""`quantkit plan`: what quantizing would write, from headers alone."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quantkit.cli import options
from quantkit.cli.console import note, print_json, progress, say, warn
from quantkit.cli.layers import print_allocation, print_layers, print_readers, totals
from quantkit.cli.records import with_fields
from quantkit.files import size_text
from quantkit.quantization.quantize_options import QuantizeOptions

if TYPE_CHECKING:
    from quantkit.checkpoint.model_record import Measured
    from quantkit.checkpoint.source import Checkpoint
    from quantkit.quantization.gpu_memory import GpuMemory
    from quantkit.quantization.plan import Plan


@with_fields
def plan(
    source: options.Source,
    given: options.QuantizeArguments,
) -> None:
    """Show what quantizing would write, without doing it.

    Bytes, bits per weight, peak memory and what becomes of every layer and why. Reads no weights, and of a
    model on the hub downloads only headers, unless --bits-per-weight or --milliseconds-per-token has
    sensitivities measured.
    """
    from quantkit import quantizing
    from quantkit.quantization.stream import peak_bytes

    asked = given.to_options()
    with progress("measuring") as report:
        checkpoint, planned = quantizing.plan(source, asked, progress=report)
    memory = gpu_memory_of(checkpoint, planned, asked)
    if given.json:
        print_json({**plan_dict(planned), **memory_dict(memory)})
        return
    for warning in checkpoint.warnings:
        note(warning)
    print_plan(planned, every_layer=given.every_layer)
    say(f"peak memory beyond the libraries: about {size_text(peak_bytes(planned))}")
    print_memory(memory)
    print_warnings(planned)


def gpu_memory_of(checkpoint: "Checkpoint", planned: "Plan", options: QuantizeOptions) -> "GpuMemory | None":
    """What the run that was asked for takes of a GPU; None on a CPU. No GPU need be there if one is named."""
    from quantkit.devices import named_device
    from quantkit.quantization.gpu_memory import gpu_memory

    if named_device(options.device).type != "cuda":
        return None
    return gpu_memory(checkpoint, planned, options.calibration)


def print_memory(memory: "GpuMemory | None") -> None:
    """The line about the memory of a GPU."""
    if memory is not None:
        quantizing, checking = size_text(memory.quantizing), size_text(memory.checking)
        say(
            f"GPU memory, as nvidia-smi counts it: at most {quantizing} to quantize, {checking} to run the "
            "result once, which is left out where less is free and with --no-check"
        )


def memory_dict(memory: "GpuMemory | None") -> dict[str, Any]:
    """The same as JSON."""
    return {} if memory is None else {"gpu_memory": asdict(memory)}


def print_plan(planned: "Plan", *, every_layer: bool) -> None:
    """The fate of every tensor, sizes, and whether other tools can read the result."""
    print_layers(planned.layer_records({}), planned.dense, every_layer=every_layer)
    say(totals(planned.source_bytes, planned.output_bytes, planned.bits_per_weight))
    if planned.allocation is not None:
        print_allocation(planned.allocation, every_layer=every_layer)
    print_readers(planned.config.container, planned.not_portable, planned.readers)
    for text in planned.notes:
        note(text)


def print_warnings(planned: "Plan") -> None:
    """The last lines: what of the model is not packed though it is much of it."""
    for text in planned.warnings:
        warn(text)


def plan_dict(planned: "Plan", measured: "Mapping[str, Measured] | None" = None) -> dict[str, Any]:
    """The plan as JSON."""
    return {
        "source_bytes": planned.source_bytes,
        "output_bytes": planned.output_bytes,
        "bits_per_weight": planned.bits_per_weight,
        "container": planned.config.container,
        "needs_quantkit": list(planned.not_portable),
        "readers": list(planned.readers),
        "notes": list(planned.notes),
        "warnings": list(planned.warnings),
        "files": {shard.filename: sum(task.nbytes for task in shard.tasks) for shard in planned.shards},
        "layers": {name: asdict(layer) for name, layer in planned.layer_records(measured or {}).items()},
        "dense": dict(planned.dense),
        **({} if planned.allocation is None else {"allocation": planned.allocation.to_dict()}),
    }
