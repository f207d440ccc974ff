"""Check a plan before a run, for `plan` and for `quantize`."""

from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.model.structure import Structure
from quantkit.quantization.growth import larger_than_source
from quantkit.quantization.plan import Plan
from quantkit.quantization.plan_warnings import why_nothing
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.verification.engine import for_engine
from quantkit.verification.readers import with_readers


def checked(
    planned: Plan, checkpoint: Checkpoint, structure: Structure, options: QuantizeOptions, source: str | Path
) -> Plan:
    """Check a plan before its run; return it with its readers, the tools that can load its output.

    An output that is larger than its source is a warning of the plan.

    Raises `UsageError` if there is nothing to quantize in `source`, or if `options.engine` cannot load or
    misreads a linear of the result. Raises `CheckpointError` if the model's own class cannot load it with
    quantkit.
    """
    if not planned.quantized_weights:
        reason = why_nothing(structure, checkpoint.tensors)
        raise UsageError(f"there is nothing to quantize in {source}: {reason}")
    larger = larger_than_source(planned, structure)
    return _with_readers(replace(planned, warnings=(*planned.warnings, *larger)), checkpoint, options)


def _with_readers(planned: Plan, checkpoint: Checkpoint, options: QuantizeOptions) -> Plan:
    if options.engine is not None:
        planned = for_engine(planned, options.engine)
    try:
        return with_readers(planned, checkpoint)
    except CheckpointError as error:
        if not options.to_recipe().model_free:
            raise
        raise CheckpointError(
            "names and shapes do not tell the linears of a class that transformers has. Leave out "
            f"--model-free. ({error})"
        ) from error
