"""Tasks with calibration data: which linears of each decoder block are quantized, and how."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from quantkit.calibrate.data.samples import Samples
from quantkit.calibrate.steps import Refinement
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import UsageError
from quantkit.model.architectures import LLAMA_LIKE
from quantkit.model.blocks import Decoder
from quantkit.model.experts import MATRICES
from quantkit.model.names import ExpertPart
from quantkit.packing.activations import ActivationScheme
from quantkit.quantization.blockwise.fold_scales import FOLDS, Fold
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task, needs_of


@dataclass(frozen=True)
class BlockTasks:
    """Linears of one block that are quantized with it, by name inside the block.

    tasks     the linears; a matrix of fused experts has a name such as `mlp.experts.3.gate`
    parts     place of each expert matrix in the parameters of the block
    folds     parameters that absorb the scales of input features
    changed   the dense tensors that folding changes, by parameter
    number    index of the block in the model
    is_head   True for the lm_head, which is treated as a block
    idle      linears that do not run on tokens: quantized without data
    kept      functions that read parameters which run in place of the checkpoint's, by parameter
    rounded   activation schemes of modules without tasks, by name
    """

    name: str
    tasks: Mapping[str, Task]
    number: int = 0
    parts: Mapping[str, ExpertPart] = field(default_factory=dict)
    folds: tuple[Fold, ...] = ()
    changed: Mapping[str, Task] = field(default_factory=dict)
    is_head: bool = False
    idle: frozenset[str] = frozenset()
    kept: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    rounded: Mapping[str, ActivationScheme] = field(default_factory=dict)

    @property
    def filename(self) -> str:
        """Return the name of the block's work file."""
        return f"calibrated-{self._label}.safetensors"

    @property
    def hidden_filename(self) -> str:
        """Return the name of the work file for the hidden states after the block."""
        return f"hidden-{self._label}.safetensors"

    @property
    def _label(self) -> str:
        return "head" if self.is_head else f"{self.number:05d}"

    @property
    def specs(self) -> list[TensorSpec]:
        """Return the tensors of the work file, roughly in the order of writing, for hashing meanwhile."""
        every = (*self.changed.values(), *self.tasks.values())
        return [spec for task in every for spec in task.outputs]

    @property
    def calibrated(self) -> dict[str, Task]:
        """Return the tasks that run and whose method takes their inputs."""
        return {
            name: task for name, task in self.tasks.items() if task.needs_inputs and name not in self.idle
        }

    def kept_weights(self) -> dict[str, torch.Tensor]:
        """Read the parameters `kept`, by name."""
        return {parameter: read() for parameter, read in self.kept.items()}

    def without(self, modules: Collection[str]) -> "BlockTasks":
        """Return these tasks with the linears and experts in `modules` marked as idle."""
        experts = [name for module in modules if module in self.experts for name in self.of_experts(module)]
        return replace(self, idle=frozenset([*modules, *experts]))

    @property
    def refined(self) -> dict[str, Refinement]:
        """Return the refinement of the codes of each linear; experts and head have none."""
        if self.is_head:
            return {}
        refinements = {
            name: None if task.method is None else task.method.refine for name, task in self.tasks.items()
        }
        return {
            name: step
            for name, step in refinements.items()
            if step is not None and name not in self.parts and name not in self.idle
        }

    @property
    def experts(self) -> dict[str, tuple[int, ...]]:
        """Return the fused experts with tasks: the module, and the indices of its experts."""
        found: dict[str, set[int]] = {}
        for part in self.parts.values():
            found.setdefault(part.parameter.rpartition(".")[0], set()).add(part.expert)
        return {module: tuple(sorted(numbers)) for module, numbers in found.items()}

    def of_expert(self, module: str, expert: int, leaf: str) -> dict[str, Task]:
        """Return the tasks with data for an expert's matrices in a fused parameter."""
        names = [f"{module}.{expert}.{matrix}" for matrix in MATRICES[leaf]]
        return {
            name: self.tasks[name]
            for name in names
            if name in self.tasks
            and self.tasks[name].needs_inputs
            and self.parts[name].parameter == f"{module}.{leaf}"
        }

    def of_experts(self, module: str) -> dict[str, Task]:
        """Return the tasks with data for the matrices of all experts of a module."""
        found: dict[str, Task] = {}
        for expert in self.experts[module]:
            for leaf in MATRICES:
                found |= self.of_expert(module, expert, leaf)
        return found


def weight_of(name: str) -> str:
    """Return the weight parameter of a linear, by its name inside a block; "" is the block itself."""
    return f"{name}.weight" if name else "weight"


def needs_data(planned: Plan) -> bool:
    """Return True if a linear of the plan takes calibration data, for its method or for measured scales."""
    return bool(needs_of(_packing(planned))) or any(task.is_measured for task in _packing(planned))


def block_tasks(planned: Plan, decoder: Decoder, model_type: str) -> list[BlockTasks]:
    """Return the tasks of each block up to the last one with a method that takes data, lm_head included.

    Raises `UsageError` for a method with data on a linear outside of blocks.
    """
    kinds = {layer.linear.module: layer.linear.kind for layer in planned.layers}
    block_names = decoder.block_names
    found: list[dict[str, Task]] = [{} for _ in block_names]
    parts: list[dict[str, ExpertPart]] = [{} for _ in block_names]
    head: BlockTasks | None = None
    last = -1
    for task in _packing(planned):
        module = task.module
        assert module is not None
        at = next((i for i, name in enumerate(block_names) if f"{module}.".startswith(f"{name}.")), None)
        if at is None:
            if task.needs and kinds[module] != "lm_head":
                raise UsageError(_no_inputs(module, "a linear outside the decoder's blocks", task))
            if task.needs:
                head = BlockTasks(module, {module: task}, is_head=True)
            continue
        if task.needs:
            last = max(last, at)
        # "" for a linear that is a block of its own.
        name = module.removeprefix(block_names[at]).removeprefix(".")
        if kinds[module] == "experts":
            part = decoder.expert_part(task.source.name)
            if part is None:
                raise UsageError(_no_inputs(module, "a set of experts of an unknown layout", task))
            owner, _, leaf = name.rpartition(".")
            matrix = f"{owner}.{part.expert}.{MATRICES[leaf][part.part]}"
            parts[at][matrix] = replace(part, parameter=name)
            name = matrix
        found[at][name] = task
    dense = {
        task.source.name: task for shard in planned.shards for task in shard.tasks if task.scheme is None
    }
    blocks = []
    count = last + 1 if head is None else len(block_names)
    for at, (name, of_experts) in enumerate(zip(block_names[:count], parts, strict=False)):
        tasks = as_listed(found[at], of_experts, decoder.parameters(name))
        folds = _folds(tasks) if model_type in LLAMA_LIKE else ()
        stored = {fold.changed: decoder.stored_name(f"{name}.{fold.changed}") for fold in folds}
        changed = {parameter: dense[one] for parameter, one in stored.items() if one is not None}
        blocks.append(BlockTasks(name, tasks, at, of_experts, folds, changed))
    return [*blocks, *([] if head is None else [head])]


def as_listed(
    tasks: Mapping[str, Task], parts: Mapping[str, ExpertPart], parameters: Sequence[str]
) -> dict[str, Task]:
    """Return the tasks of a block in the order of its parameters."""
    places = {parameter: at for at, parameter in enumerate(parameters)}

    def place(name: str) -> int:
        return places[parts[name].parameter if name in parts else weight_of(name)]

    return {name: tasks[name] for name in sorted(tasks, key=place)}


def work_bytes(blocks: Sequence[BlockTasks], samples: Samples, hidden_size: int) -> int:
    """Return an upper bound on the bytes of all work files.

    The files hold the blocks, and hidden states twice, while new ones replace old ones.
    """
    hidden = samples.tokens.numel() * hidden_size * 4
    return sum(spec.nbytes for block in blocks for spec in block.specs) + 4 * hidden


def _no_inputs(module: str, what: str, task: Task) -> str:
    assert task.method is not None
    return (
        f"{module} is {what}, for which method {task.method.name!r} has no inputs. Choose a method without "
        f"data for it with a rule, such as --rule '{module}=int8::mse'."
    )


def _folds(tasks: Mapping[str, Task]) -> tuple[Fold, ...]:
    """Return the folds for which all consumers are packed by methods with the same scaling."""

    def scaled(fold: Fold) -> bool:
        methods = [tasks[name].method for name in fold.consumers if name in tasks]
        scalings = {None if method is None else method.input_scaling for method in methods}
        return len(methods) == len(fold.consumers) and len(scalings) == 1 and None not in scalings

    return tuple(fold for fold in FOLDS if scaled(fold) and (fold.is_norm or fold.producer in tasks))


def _packing(planned: Plan) -> Iterator[Task]:
    """Yield the tasks that pack a linear."""
    for shard in planned.shards:
        yield from (task for task in shard.tasks if task.scheme is not None)
