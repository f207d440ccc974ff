"""`quantkit plan`: what quantizing would write, from headers alone."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli import options
from quantkit.cli.collector import collector_paused
from quantkit.cli.console import note, print_json, print_table, progress, say, warn
from quantkit.cli.layers import print_allocation, print_layers, print_readers, totals
from quantkit.cli.parsing import parse_list, parse_size
from quantkit.cli.records import with_fields
from quantkit.errors import UsageError
from quantkit.files import size_text
from quantkit.progress import duration_text
from quantkit.quantization.quantize_options import QuantizeOptions

if TYPE_CHECKING:
    from quantkit.checkpoint.model_record import Measured
    from quantkit.checkpoint.source import Checkpoint
    from quantkit.quantization.duration import Duration
    from quantkit.quantization.gpu_memory import GpuMemory
    from quantkit.quantization.plan import Plan

#: Tokens that a model is taken to be used with.
CONTEXT = 8192
#: Bytes of a `--fit` without a unit below which that was forgotten.
LEAST_MEMORY = 10**6


@with_fields
def plan(
    source: options.Source,
    given: options.QuantizeArguments,
    fit: Annotated[
        str | None,
        typer.Option(
            "--fit",
            metavar="SIZE",
            help="Show in which formats the model fits a memory such as 24GB with the KV cache of --context "
            "and --batch; --formats says which to try.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, help="With --fit, tokens of prompt and answer.", show_default=str(CONTEXT)
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="With --fit, sequences at a time.", show_default="1")
    ] = None,
    kv_cache: options.KvCache = None,
) -> None:
    """Show what quantizing would write, without doing it.

    Bytes, bits per weight, peak memory and what becomes of every layer and why. Reads no weights, and of a
    model on the hub downloads only headers, unless --bits-per-weight or --milliseconds-per-token has
    sensitivities measured.
    """
    measures = given.bits_per_weight is not None or given.milliseconds_per_token is not None
    with nullcontext() if measures else collector_paused():
        _show(source, given, fit, context, batch, kv_cache)


def _show(
    source: str,
    given: options.QuantizeArguments,
    fit: str | None,
    context: int | None,
    batch: int | None,
    kv_cache: str | None,
) -> None:
    """Plan, and print that."""
    from quantkit.planning import plan_checkpoint

    if fit is not None:
        _show_fits(source, given, fit, context, batch, kv_cache)
        return
    for option, value in (("--context", context), ("--batch", batch), ("--kv-cache", kv_cache)):
        if value is not None:
            raise UsageError(f"{option} is for --fit, the memory that the model must fit. Give that too.")
    asked = given.to_options()
    with progress("measuring", shown=asked.budget is not None) as report:
        checkpoint, planned = plan_checkpoint(source, asked, progress=report)
    memory = gpu_memory_of(checkpoint, planned, asked)
    time = _duration_of(checkpoint, planned, asked)
    if given.json:
        print_json(
            {**plan_dict(planned), **memory_dict(memory), **({} if time is None else {"time": asdict(time)})}
        )
        return
    for warning in checkpoint.warnings:
        note(warning)
    print_plan(planned, every_layer=given.every_layer)
    say(f"peak memory beyond the libraries: {_host_text(checkpoint, planned, asked, memory is None)}")
    print_memory(memory)
    if time is not None:
        say(
            f"time on this machine: about {duration_text(time.seconds)}, by a sample measured now; between 1/"
            f"{time.factor:g} and {time.factor:g} times that, without loading, reading, writing and the check"
        )
    print_warnings(planned)


def _host_text(checkpoint: "Checkpoint", planned: "Plan", asked: QuantizeOptions, on_cpu: bool) -> str:
    """Host memory that the run takes, in words; `on_cpu` is True if no GPU quantizes."""
    from quantkit.quantization.blockwise.block_tasks import needs_data
    from quantkit.quantization.stream import peak_bytes

    held = None
    if on_cpu and needs_data(planned):
        from quantkit.quantization.gpu_memory import host_bytes

        held = host_bytes(checkpoint, planned, asked.calibration)
    if held is None:
        more = ", more where calibration data is used" if needs_data(planned) else ""
        return f"about {size_text(peak_bytes(planned))}{more}"
    kept = "and up to half of what is free for activations that are kept between linears"
    return f"at least {size_text(held)}, {kept}"


def _duration_of(checkpoint: "Checkpoint", planned: "Plan", asked: QuantizeOptions) -> "Duration | None":
    """How long the run takes here; None if its device is not here, or if it cannot be told."""
    import torch

    from quantkit.devices import named_device
    from quantkit.quantization.duration import estimate

    device = named_device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    return estimate(checkpoint, planned, asked.calibration, device, asked.distillation)


def _show_fits(
    source: str,
    given: options.QuantizeArguments,
    fit: str,
    context: int | None,
    batch: int | None,
    kv_cache: str | None,
) -> None:
    """Print the formats in which a model fits, and the command for the one with the most bits."""
    from quantkit import fitting

    for option in ("bits_per_weight", "milliseconds_per_token", "engine", "gpu"):
        if getattr(given, option) is not None:
            raise UsageError(
                f"--fit tries formats one by one, so it does not go with --{option.replace('_', '-')}. Leave "
                "one out."
            )
    memory = parse_size(fit)
    if memory < LEAST_MEMORY and fit.strip().isdigit():
        raise UsageError(f"--fit is {fit!r}, which is {memory} bytes: give a unit too, such as {memory}GB.")
    need = fitting.Need(
        memory, context or CONTEXT, batch or 1, kv_cache, on_gpu=not given.device.startswith("cpu")
    )
    formats = None if given.formats is None else parse_list(given.formats, "--formats")
    asked = replace(given, formats=None).to_options()
    checkpoint, found = fitting.fits(source, asked, need, formats)
    fitting_ones = [one for one in found if one.total <= need.memory]
    if given.json:
        rows = [
            {
                "format": None if one.choice is None else one.choice.format,
                "options": one.options,
                "weights": one.weights,
                "kv_cache": one.cache,
                "beside": one.beside,
                "total": one.total,
                "bits_per_weight": one.bits_per_weight,
                "readers": list(one.readers),
                "fits": one.total <= need.memory,
            }
            for one in found
        ]
        print_json({"memory": need.memory, "context": need.context, "batch": need.batch, "formats": rows})
        return
    for warning in checkpoint.warnings:
        note(warning)
    headings = ("options of quantize", "size", "KV cache", "total", "bits", "read by", "fits")
    table = [
        (
            one.options or "(16 bits, not packed)",
            *map(size_text, (one.weights, one.cache, one.total)),
            f"{one.bits_per_weight:.2f}",
            "engines" if one.readers else "quantkit",
            "yes" if one.total <= need.memory else "no",
        )
        for one in found
    ]
    print_table(headings, table, words=(headings[0], "read by", "fits"), folded=(headings[0],), narrow=True)
    many = f"{need.batch} x " if need.batch > 1 else ""
    say(f"KV cache of {many}{need.context} tokens in {need.kv_cache or '16 bits'}; bits of the whole model")
    if need.beside:
        say(f"total has {size_text(need.beside)} of CUDA's context and workspaces, as counted on an H200")
    if fitting_ones:
        best = fitting_ones[0]
        method = "" if given.method is None else f" --method {given.method}"
        command = f"quantkit quantize {source} OUT {best.options}{method}"
        say(
            f"most bits that fit {fit}: " + ("16 bits, not packed" if best.choice is None else f"`{command}`")
        )
    else:
        say(f"nothing fits {fit}: try a shorter --context, --kv-cache int8 or int4, or --formats all")


def gpu_memory_of(checkpoint: "Checkpoint", planned: "Plan", options: QuantizeOptions) -> "GpuMemory | None":
    """What the run that was asked for takes of a GPU; None on a CPU. No GPU need be there if one is named."""
    from quantkit.devices import named_device

    if named_device(options.device).type != "cuda":
        return None
    from quantkit.quantization.gpu_memory import gpu_memory

    return gpu_memory(checkpoint, planned, options.calibration)


def print_memory(memory: "GpuMemory | None") -> None:
    """Print the GPU memory to quantize and to run the result once; nothing for None, a run on a CPU."""
    if memory is not None:
        quantizing, checking = size_text(memory.quantizing), size_text(memory.checking)
        work = f"at most {quantizing} to quantize"
        if memory.fastest is not None:
            most = size_text(max(memory.quantizing, memory.fastest))
            free = f"up to {most} where that is free, for shorter steps"
            work = f"{quantizing} to quantize and train, {free}, on each GPU if several train"
        say(
            f"GPU memory, as nvidia-smi counts it: {work}, {checking} to run the "
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
