"""Calibrate fused experts: each on the tokens that chose it, with all tokens as a prior.

The tokens of an expert are often fewer than a Hessian needs. So its Hessian is

    H = (n H_own + m H_all) / (n + m),

with n tokens that chose it, and H_all the Hessian of all tokens of the layer. The prior m is twice the number
of its input features. H is the posterior mean given n samples, for an inverse Wishart prior with mean H_all.
An expert that no token chose has H_all. The inputs of down are computed by the quantized gate and up of the
expert, for both kinds of tokens. All tokens count the same, whatever their router weight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from quantkit.calibrate.hessian import Hessian
from quantkit.calibrate.methods import Method
from quantkit.errors import CheckpointError, first_of
from quantkit.model.experts import DOWN, MATRICES, chosen_rows, spec_of
from quantkit.quantization.blockwise.block_tasks import BlockTasks
from quantkit.quantization.blockwise.layer_quantizer import Quantized, ReadInputs, Solver
from quantkit.quantization.task import Task

#: Weight of H_all, in tokens per input feature.
PRIOR = 2
#: Tokens per feature, evenly spaced, that represent all tokens: each runs through every expert to get the
#: inputs of down.
EVERYONE = 16
#: Tokens per step of a Hessian sum.
TOKENS = 4096
#: Bytes per squared input feature for an expert in progress: H, its factors and temporaries.
WORK_BYTES = 56


@dataclass(frozen=True, eq=False)
class Routed:
    """Arguments of fused experts: inputs [T, K] and the experts that each token chose, int64 [T, k].

    `originals` are the inputs [T, K] in the original model, for methods that correct the input error.
    """

    inputs: torch.Tensor
    chosen: torch.Tensor
    originals: torch.Tensor | None

    @classmethod
    def of(
        cls, calls: Sequence[tuple[torch.Tensor, ...]], originals: Sequence[torch.Tensor], name: str
    ) -> "Routed":
        """Collect the calls of all micro-batches; `originals` is empty unless a method corrects input errors.

        Raises `CheckpointError` for arguments other than inputs and chosen experts.
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
        """Return the indices of the tokens that chose an expert, int64 [n]."""
        return (self.chosen == expert).any(1).nonzero().flatten()

    def everyone(self, features: int) -> torch.Tensor:
        """Return the indices int64 [n] of evenly spaced tokens, a sample of all for the Hessian H_all."""
        total = len(self.chosen)
        count = min(total, EVERYONE * features)
        return torch.arange(count) * total // count


def call_tensors(
    experts: nn.Module, call: Sequence[torch.Tensor], original: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a call for `Routed.of`, by number, and the inputs of the `original` model."""
    tensors, rows = chosen_rows(experts, call)
    found = {str(at): one for at, one in enumerate(tensors)}
    if original is not None:
        # Zero rows belong to experts that the original model did not choose: ignore them.
        chosen = original[rows].any(-1, keepdim=True) | spec_of(experts).routed
        found["original"] = torch.where(chosen, original[rows], tensors[0])
    return found


def quantize_experts(
    solver: Solver,
    experts: nn.Module,
    originals: nn.Module | None,
    name: str,
    todo: BlockTasks,
    routed: Routed,
    free: int,
    store: Callable[[Mapping[str, Quantized]], None],
) -> None:
    """Quantize all experts of module `name` that take data, as many at a time as `free` bytes allow.

    `store` sets quantized weights in `experts`. `originals` are experts with the original weights, for the
    input error.
    """
    numbers = todo.experts[name]
    kinds = [
        _Kind(solver, leaf, {e: todo.of_expert(name, e, leaf) for e in numbers}, routed, experts, originals)
        for leaf in MATRICES
        if todo.of_expert(name, numbers[0], leaf)
    ]
    widest = max(kind.features for kind in kinds)
    # The rank with the least memory sets the number of experts in progress for all.
    size = min(solver.ranks.all_gather(max(1, min(2 * solver.lanes, free // (WORK_BYTES * widest**2)))))
    size *= solver.ranks.size
    for at in range(0, len(numbers), size):
        for kind in kinds:
            store(kind.solve(todo.name, numbers[at : at + size]))


class _Kind:
    """Expert matrices of one fused parameter, which share a method, and their Hessians."""

    def __init__(
        self,
        solver: Solver,
        leaf: str,
        tasks: Mapping[int, Mapping[str, Task]],
        routed: Routed,
        experts: nn.Module,
        originals: nn.Module | None,
    ) -> None:
        self._solver, self._leaf, self._tasks, self._routed = solver, leaf, tasks, routed
        self._experts, self._originals = experts, originals
        first = next(iter(next(iter(tasks.values())).values()))
        assert first.method is not None
        self._method: Method = first.method
        self._activations = None if first.scheme is None else first.scheme.activations
        self.features = first.source.shape[1]
        self._shared: Hessian | None = None

    def solve(self, block: str, group: Sequence[int]) -> dict[str, Quantized]:
        """Quantize the matrices of a group of experts; each rank its share."""
        own_group = [group[at] for at in self._solver.ranks.share(len(group))]
        tasks = {matrix: task for expert in group for matrix, task in self._tasks[expert].items()}
        return self._solver.exchange(tasks, self._solve(block, own_group) if own_group else {})

    def _solve(self, block: str, group: Sequence[int]) -> dict[str, Quantized]:
        solver = self._solver
        names = {expert: f"{block}.{next(iter(self._tasks[expert]))}" for expert in group}
        own = self._hessians({names[expert]: (expert, self._routed.tokens(expert)) for expert in group})
        hessians = {
            name: every.joined(own.get(name), PRIOR * self.features)
            for name, every in self._everyone(names).items()
        }
        stats = solver.prepare(hessians, dict.fromkeys(hessians, self._method.needs))
        # The corrections are computed: free their inputs before the factors are allocated.
        hessians.clear()
        tasks = {matrix: task for expert in group for matrix, task in self._tasks[expert].items()}
        owners = {matrix: names[expert] for expert in group for matrix in self._tasks[expert]}
        finished = solver.solve(tasks, {matrix: stats[owner] for matrix, owner in owners.items()})

        def measure(matrix: str) -> list[float]:
            sums = own.get(owners[matrix])
            return [0.0, 0.0] if sums is None else _output(solver, tasks[matrix], finished[matrix], sums)

        for matrix, output in zip(tasks, solver.workers.map(measure, tasks), strict=True):
            finished[matrix].detail["output"] = output
        return finished

    def _everyone(self, names: Mapping[int, str]) -> dict[str, Hessian]:
        """Return the Hessian of all tokens for each expert; gate and up of all experts share one."""
        tokens = self._routed.everyone(self.features)
        if self._leaf == DOWN:
            return self._hessians({name: (expert, tokens) for expert, name in names.items()})
        if self._shared is None:
            expert, name = next(iter(names.items()))
            self._shared = self._hessians({name: (expert, tokens)})[name]
        return dict.fromkeys(names.values(), self._shared)

    def _hessians(self, tokens_of: Mapping[str, tuple[int, torch.Tensor]]) -> dict[str, Hessian]:
        """Return the Hessians of experts from their own tokens, by name; none for unchosen experts.

        `tokens_of` has the number of each expert and the numbers of its tokens, int64 [T].
        """
        pieces: dict[str, list[ReadInputs]] = {
            name: [partial(self._read, expert, some) for some in torch.split(tokens, TOKENS)]
            for name, (expert, tokens) in tokens_of.items()
            if len(tokens)
        }
        return self._solver.hessians(pieces)

    @torch.no_grad()
    def _read(self, expert: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the inputs [tokens, K] of an expert's matrices for the tokens numbered `tokens`.

        Also returns the inputs in the original model, or None unless the method needs the input error.
        """

        def of(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
            found = inputs[tokens.to(inputs.device)].to(self._solver.device)
            return spec_of(module).between(module, expert, found) if self._leaf == DOWN else found

        x = of(self._experts, self._routed.inputs)
        if self._leaf == DOWN and self._activations is not None:
            # Those of gate and up are rounded when the experts are called.
            x = self._activations.round(x)
        if "input_error" not in self._method.needs:
            return x, None
        assert self._originals is not None and self._routed.originals is not None
        return x, of(self._originals, self._routed.originals)


def _output(solver: Solver, task: Task, quantized: Quantized, own: Hessian) -> list[float]:
    """Return [squared output error, squared output] of an expert over its tokens; `own` is its Hessian."""
    weight = solver.weight(task.source.name).to(torch.float32)
    errors = weight - quantized.packed.dequantize(torch.float32)
    return [own.tokens * own.output_energy(errors), own.tokens * own.output_energy(weight)]


def coverage(routed: Routed, numbers: Sequence[int], columns: int) -> tuple[list[int], str | None]:
    """Return the tokens that chose each expert of `numbers`, and a note if some have fewer than `columns`.

    These are their input features. The note is None if none has.
    """
    counts = [len(routed.tokens(expert)) for expert in numbers]
    few = [expert for expert, count in zip(numbers, counts, strict=True) if count < columns]
    if not few:
        return counts, None
    none = counts.count(0)
    return counts, (
        f"fewer calibration tokens chose experts {first_of(map(str, few), 4)} of {len(numbers)} than the "
        f"{columns} features of their inputs{f' ({none} of them no token)' if none else ''}, so the tokens "
        "of other experts count for most of their Hessians; more calibration samples give them more of their "
        "own"
    )
