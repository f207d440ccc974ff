"""Say why an output is larger than its source, and which options make it smaller."""

from collections.abc import Sequence

from quantkit.files import size_text
from quantkit.model.structure import Linear, Structure
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task

#: Part of all growth from which a cause is named.
_NAMED = 0.05
#: Remedy for a tensor that is written beside another one with the same stored bytes.
_NO_HEAD = "to leave --lm-head out"


def larger_than_source(planned: Plan, structure: Structure) -> tuple[str, ...]:
    """Return a warning if the output has more bytes than the source.

    Low-bit sources allow that, and a head that is packed beside the embedding whose table it shares.
    """
    if planned.output_bytes <= planned.source_bytes:
        return ()
    causes: dict[str, list[Task]] = {}
    shared = _sharing(planned)
    for task in (task for shard in planned.shards for task in shard.tasks):
        cause = _NO_HEAD if task.outputs[0].name in shared else _cause(task, structure)
        causes.setdefault(cause, []).append(task)
    growth = {
        remedy: _written(tasks) - (0 if remedy == _NO_HEAD else _stored(tasks))
        for remedy, tasks in causes.items()
    }
    added = sum(more for more in growth.values() if more > 0)
    largest = sorted((one for one in causes if growth[one] > _NAMED * added), key=lambda one: -growth[one])
    why = "; ".join(_text(causes[one], one == _NO_HEAD) for one in largest)
    helps = " or ".join(one for one in largest if one)
    return (
        f"the output is larger than the source, {size_text(planned.output_bytes)} and not "
        f"{size_text(planned.source_bytes)}{why and ': ' + why}."
        + (f" What helps: {helps}." if helps else ""),
    )


def _cause(task: Task, structure: Structure) -> str:
    """Return the option that makes the output of `task` smaller; "" if there is none."""
    if task.scheme is not None:
        return "a --format of fewer bits"
    if task.source.name == structure.embedding:
        return "--embeddings int8" if isinstance(structure.table, Linear) else ""
    heads = [linear for linear in structure.linears.values() if linear.kind == "lm_head"]
    is_head = any(task.source.name == f"{one}.weight" for linear in heads for one in linear.stored)
    return "--lm-head int8" if is_head else ""


def _sharing(planned: Plan) -> set[str]:
    """Return the first outputs of packed tensors whose stored bytes an earlier tensor has too."""
    seen, found = set[object](), set[str]()
    for task in (task for shard in planned.shards for task in shard.tasks):
        if task.scheme is not None and task.source.location in seen:
            found.add(task.outputs[0].name)
        seen.add(task.source.location)
    return found


def _text(tasks: Sequence[Task], shares: bool) -> str:
    if shares:
        name = tasks[0].outputs[0].name.rpartition(".")[0]
        return f"{name} takes {size_text(_written(tasks))} beside the table that it shared"
    sizes = f"{size_text(_written(tasks))} here and {size_text(_stored(tasks))} there"
    if tasks[0].scheme is not None:
        return f"the packed linears take {sizes}"
    first = max(tasks, key=lambda task: task.nbytes)
    dtype = str(first.outputs[0].torch_dtype).removeprefix("torch.")
    there = "" if first.source.stored_as is None else f", {first.source.stored_as} there"
    more = f" and {len(tasks) - 1} more tensors" if len(tasks) > 1 else ""
    return f"{first.source.name}{more}, {dtype} here{there}, {'take' if more else 'takes'} {sizes}"


def _written(tasks: Sequence[Task]) -> int:
    return sum(task.nbytes for task in tasks)


def _stored(tasks: Sequence[Task]) -> int:
    return sum(nbytes for *_, nbytes in {task.source.location for task in tasks})
