"""Calibrating fused experts: each with the tokens that chose it.

The moments of gate and up are those of the tokens that the router gave the expert, and the moments of down
those of what its quantized gate and up make of them. A token counts the same whatever its weight in the sum
of the experts.

An expert that fewer tokens chose than its inputs have features is given others, evenly spaced over all
tokens, until it has as many: its own moments would be singular, and an expert without tokens has none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from quantkit.errors import CheckpointError
from quantkit.model.block_tasks import MATRICES, BlockTasks
from quantkit.model.experts import DOWN, FusedExperts
from quantkit.model.plan import Task
from quantkit.model.solver import Quantized, Solver

#: Tokens whose moments are computed at a time.
TOKENS = 4096
#: Bytes of an expert in work by the square of the features of its inputs: H, its factors and what they are
#: made from.
WORK_BYTES = 48


@dataclass(frozen=True, eq=False)
class Routed:
    """What fused experts are called with: inputs [T, K] and the experts that each token chose, int64 [T, k].

    `originals` are the inputs [T, K] in the original model, where a method corrects for drift.
    """

    inputs: torch.Tensor
    chosen: torch.Tensor
    originals: torch.Tensor | None

    @classmethod
    def of(
        cls, calls: Sequence[tuple[torch.Tensor, ...]], originals: Sequence[torch.Tensor], name: str
    ) -> "Routed":
        """Of the calls with all micro-batches; `originals` are empty without drift.

        `CheckpointError` if they are not inputs and choices.
        """
        for call in calls:
            if len(call) < 2 or len(call[0]) != len(call[1]) or call[1].is_floating_point():
                raise CheckpointError(
                    f"{name} is called with {[tuple(one.shape) for one in call]}; quantkit calibrates "
                    "experts that are called with hidden states and the numbers of the chosen ones. Keep them"
                    " dense with a rule, or take a method without data, such as --method mse."
                )
        return cls(
            torch.cat([call[0] for call in calls]),
            torch.cat([call[1].to("cpu", torch.int64) for call in calls]),
            torch.cat(list(originals)) if originals else None,
        )

    def tokens(self, expert: int) -> torch.Tensor:
        """The tokens that chose an expert, int64 [n]."""
        return (self.chosen == expert).any(1).nonzero().flatten()

    def filled(self, expert: int, least: int) -> torch.Tensor:
        """Those that its moments are of: those that chose it, and others if they are fewer than `least`."""
        own = self.tokens(expert)
        missing = min(least, len(self.chosen)) - len(own)
        if missing <= 0:
            return own
        others = (self.chosen != expert).all(1).nonzero().flatten()
        return torch.cat([own, others[torch.arange(missing) * len(others) // missing]])


def quantize_experts(
    solver: Solver,
    experts: FusedExperts,
    originals: FusedExperts | None,
    name: str,
    todo: BlockTasks,
    routed: Routed,
    free: int,
    store: Callable[[Mapping[str, Quantized]], None],
) -> None:
    """Quantize the experts of the module called `name` that take data, some at a time, as `free` bytes allow.

    `store` makes what is finished the weights of `experts`; `originals` keep theirs, for drift.
    """
    calibrated = todo.calibrated
    numbers = todo.experts[name]
    widest = max(task.source.shape[1] for key, task in calibrated.items() if key in todo.parts)
    size = max(1, min(2 * solver.lanes, free // (WORK_BYTES * widest**2)))
    for at in range(0, len(numbers), size):
        for leaf, matrices in MATRICES.items():
            group = {
                expert: {
                    matrix: calibrated[matrix]
                    for matrix in (f"{name}.{expert}.{one}" for one in matrices)
                    if matrix in calibrated
                }
                for expert in numbers[at : at + size]
            }
            read = partial(_read, solver.device, experts, originals, routed, leaf)
            store(_solve(solver, todo.name, {e: tasks for e, tasks in group.items() if tasks}, routed, read))


def _solve(
    solver: Solver,
    block: str,
    group: Mapping[int, Mapping[str, Task]],
    routed: Routed,
    read: Callable[[int, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor | None]],
) -> dict[str, Quantized]:
    """Quantize matrices of some experts, those of each with one input."""
    names = {expert: f"{block}.{next(iter(tasks))}" for expert, tasks in group.items()}
    methods = {
        names[expert]: [task.method for task in tasks.values() if task.method is not None]
        for expert, tasks in group.items()
    }
    jobs = []
    for expert, tasks in group.items():
        columns = next(iter(tasks.values())).source.shape[1]
        corrects = any(method.corrects for method in methods[names[expert]])
        for tokens in torch.split(routed.filled(expert, columns), TOKENS):
            jobs.append((names[expert], partial(read, expert, tokens, corrects)))
    inputs = solver.prepare(solver.moments(jobs), methods)
    finished = solver.solve(
        {matrix: task for tasks in group.values() for matrix, task in tasks.items()},
        {matrix: inputs[names[expert]] for expert, tasks in group.items() for matrix in tasks},
    )
    for expert, tasks in group.items():
        # Errors of an expert count by how many tokens choose it.
        count = len(routed.tokens(expert))
        for matrix in tasks:
            finished[matrix].detail["output"] = [count * one for one in finished[matrix].detail["output"]]
    return finished


@torch.no_grad()
def _read(
    device: torch.device,
    experts: FusedExperts,
    originals: FusedExperts | None,
    routed: Routed,
    leaf: str,
    expert: int,
    tokens: torch.Tensor,
    corrects: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The inputs of a matrix of an expert from some tokens, and the original's."""

    def of(module: FusedExperts, inputs: torch.Tensor) -> torch.Tensor:
        found = inputs[tokens.to(inputs.device)].to(device)
        return intermediate(module, expert, found) if leaf == DOWN else found

    if not corrects:
        return of(experts, routed.inputs), None
    assert originals is not None and routed.originals is not None
    return of(experts, routed.inputs), of(originals, routed.originals)


def intermediate(experts: FusedExperts, expert: int, inputs: torch.Tensor) -> torch.Tensor:
    """What the down projection of an expert sees: [n, I] from [n, K]."""
    gate, up = F.linear(inputs, experts.gate_up_proj[expert]).chunk(2, -1)
    found: torch.Tensor = experts.act_fn(gate) * up
    return found


def coverage(routed: Routed, numbers: Sequence[int], columns: int) -> tuple[list[int], str | None]:
    """How many tokens chose each expert, and a note if some were fewer than the features of its inputs."""
    counts = [len(routed.tokens(expert)) for expert in numbers]
    few = [expert for expert, count in zip(numbers, counts, strict=True) if count < columns]
    if not few:
        return counts, None
    shown = ", ".join(map(str, few[:4])) + (f" and {len(few) - 4} more" if len(few) > 4 else "")
    none = counts.count(0)
    return counts, (
        f"fewer calibration tokens chose experts {shown} of {len(numbers)} than the {columns} features of "
        f"their inputs{f' ({none} of them no token)' if none else ''}, so others, evenly spaced, make up for "
        "them; more calibration samples give them their own"
    )
