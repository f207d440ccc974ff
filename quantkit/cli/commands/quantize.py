"""`quantkit quantize`: a checkpoint in, a packed checkpoint out."""

from collections.abc import Mapping
from statistics import median_low
from typing import TYPE_CHECKING, Any

from quantkit.cli import options
from quantkit.cli.console import note, note_unchecked, print_json, progress, say
from quantkit.cli.records import with_fields
from quantkit.errors import first_of
from quantkit.files import size_text
from quantkit.signals import advising

if TYPE_CHECKING:
    from quantkit.checkpoint.model_record import Measured
    from quantkit.checkpoint.source import Checkpoint
    from quantkit.quantization.gpu_memory import GpuMemory
    from quantkit.quantization.plan import Plan


#: Relative squared error above which a layer is hardly the one it was.
LOST = 0.5


@with_fields
def quantize(
    source: options.Source,
    out_directory: options.OutDirectory,
    given: options.QuantizeArguments,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    check: options.CheckOutput = True,
) -> None:
    """Quantize a checkpoint to a packed one.

    Every linear of the decoder gets --format, or what --bits-per-weight or --milliseconds-per-token allocates
    to it, unless a --rule, --lm-head or the --recipe says otherwise, in that order. Prints what
    becomes of every layer and why, then writes OUT. A run that is interrupted continues with --resume.
    """
    from quantkit import quantizing
    from quantkit.checkpoint.manifest import read_manifest
    from quantkit.cli.commands.plan import (
        gpu_memory_of,
        memory_dict,
        plan_dict,
        print_memory,
        print_plan,
        print_warnings,
    )
    from quantkit.cli.files import resume_advice
    from quantkit.model.distributed import join_ranks

    # Until then, what is to be overwritten may look like an unfinished run.
    begun = not overwrite
    memory: list[GpuMemory | None] = [None]

    def show(checkpoint: "Checkpoint", plan: "Plan") -> None:
        nonlocal begun
        begun = True
        for warning in checkpoint.warnings:
            note(warning)
        memory[0] = gpu_memory_of(checkpoint, plan, asked)
        if not given.json:
            print_plan(plan, every_layer=given.every_layer)
            print_memory(memory[0])

    def advice() -> str | None:
        return resume_advice(out_directory, overwrite=overwrite) if begun else None

    with advising(advice), join_ranks() as ranks:
        asked = given.to_options(resume=resume, overwrite=overwrite, check=check)
        with progress("quantizing", shown=ranks.first) as report:
            result = quantizing.quantize_checkpoint(
                source,
                out_directory,
                asked,
                progress=report,
                measuring=lambda done, total, label: report(done, total, f"sensitivity, {label}"),
                on_plan=show,
                ranks=ranks,
            )
    if not ranks.first:
        return
    note_unchecked(result.unchecked)
    trained = read_manifest(result.directory).get("distillation")
    if given.json:
        planned = plan_dict(result.plan, result.measured)
        facts = {} if trained is None else {"distillation": trained}
        print_json({"directory": str(result.directory), **planned, **memory_dict(memory[0]), **facts})
        return
    noted: dict[str, list[str]] = {}
    for name, measured in result.measured.items():
        if measured.note is not None:
            noted.setdefault(measured.note, []).append(name)
    for text, names in noted.items():
        note(f"{first_of(names)}: {text}.")
    lost = [name for name, error in result.relative_errors.items() if error > LOST]
    if lost:
        note(
            f"{len(lost)} linears lost more than half of their squared weights, such as {lost[0]}: its "
            "weights are too small for the scale dtype, or the format is too coarse."
        )
    outputs = {
        name: one.output_error for name, one in result.measured.items() if one.output_error is not None
    }
    for line in (
        trained_line(trained),
        errors_line("relative error", result.relative_errors),
        errors_line("relative error of outputs", outputs),
        learned_line(result.measured),
        coverage_line(result.measured),
    ):
        if line is not None:
            say(line)
    say(f"wrote {result.directory} ({size_text(result.plan.output_bytes)})")
    print_warnings(result.plan)


def trained_line(facts: "Mapping[str, Any] | None") -> str | None:
    """What a training made of the divergence, by the `facts` of the manifest; None without one."""
    if facts is None:
        return None
    before, after, steps = (facts[key] for key in ("kl_before", "kl_after", "steps"))
    return f"KL on held out text: {before:.3g} nats before the training, {after:.3g} after {steps} steps"


def errors_line(what: str, errors: "Mapping[str, float]") -> str | None:
    """The mean of errors by linear, and the worst; None without any."""
    if not errors:
        return None
    worst = max(errors, key=lambda name: errors[name])
    mean = sum(errors.values()) / len(errors)
    return f"{what}: mean {mean:.2e}, worst {errors[worst]:.2e} in {worst}"


def learned_line(measured: "Mapping[str, Measured]") -> str | None:
    """What learning the rounding of blocks made of the errors of their outputs; None without any learned."""
    # Of each linear of a block the same.
    errors = {one.block_error for one in measured.values() if one.block_error is not None}
    if not errors:
        return None
    before, after = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    return f"relative error of the outputs of blocks: mean {after:.2e}, {before:.2e} before learned rounding"


def coverage_line(measured: "Mapping[str, Measured]") -> str | None:
    """How many calibration tokens the experts of a model have; None without calibrated experts."""
    # Of gate and up, and of down: the same tokens.
    tokens = {
        name.rpartition(".")[0]: one.expert_tokens for name, one in measured.items() if one.expert_tokens
    }
    counts = sorted(count for of_layer in tokens.values() for count in of_layer or ())
    if not counts:
        return None
    return (
        f"calibration tokens per expert: {counts[0]} to {counts[-1]}, median {median_low(counts)}; "
        f"{counts.count(0)} of {len(counts)} experts without any"
    )
