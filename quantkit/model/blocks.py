"""Run a model block by block, with the weights of only one block in memory.

The model is built on the meta device from the classes of transformers. Real weights replace its parameters
while a block runs. The model's own forward calls the blocks (`model/forward/model_pass.py`), so this module
depends neither on architectures nor on the arguments and results of blocks.
"""

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import BlocksError, QuantkitError
from quantkit.model.conversions import conversions
from quantkit.model.experts import is_fused_experts
from quantkit.model.forward.lazy_weights import LazyWeights
from quantkit.model.forward.model_pass import Call, ModelPass, returning, waiting_at
from quantkit.model.forward.trees import hidden_in, with_hidden
from quantkit.model.forward.weight_changes import Change, WeightChanges, apply_changes
from quantkit.model.hidden_states import Home
from quantkit.model.linears import is_linear, plain_linear, transposed_linears
from quantkit.model.names import ExpertPart, as_matrices, expert_parts, model_names, tied_parameters
from quantkit.model.parts import Parts, embeddings, packed_parts, why_no_tokens
from quantkit.model.structure import stored_model


@dataclass(frozen=True, eq=False)
class Block:
    """Block of a model: a module on the meta device.

    `name` is its name in the model; parameters are called `{name}.{name inside the block}`.
    """

    name: str
    module: nn.Module

    @property
    def is_linear(self) -> bool:
        """Return True if the block is a linear outside of lists of modules."""
        return _is_linear(self.module)

    def full(self, name: str) -> str:
        """Return the name in the model of a module inside the block; "" is the block itself."""
        return f"{self.name}.{name}" if name else self.name

    def run(self, call: Call) -> Any:
        """Run the module on `call` and return its output."""
        return self.module(*call.args, **call.kwargs)

    def hidden(self, call: Call) -> torch.Tensor:
        """Compute the hidden states after the block, such as [B, T, d]."""
        found = hidden_in(self.run(call))
        assert found is not None, f"{self.name} returns no tensor"
        return found


#: Tensors of a block that are read in parallel.
READERS = 4

#: Inputs of a model besides tokens, such as pixels, by argument name.
Beside = Mapping[str, torch.Tensor]
#: Starts a pass on tokens int64 [B, T] whose hidden states are stored at a home; True enables gradients.
StartPass = Callable[..., ModelPass]
#: Returns logits [B, T, V] from hidden states after the last block and the shape [B, T].
Logits = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


class Decoder:
    """Blocks of a checkpoint's model, computing on `device` in `dtype`.

    A block is a member of a module list that holds linears, or a linear outside of such lists. Raises
    `BlocksError` if there are none.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._checkpoint = checkpoint
        self._cached: dict[str, torch.Tensor] = {}
        self._reads: dict[str, Future[torch.Tensor]] = {}
        self._model: Any = stored_model(checkpoint, buffers=True)
        self._model.eval()
        # Models read the dtype of weights, to cast pixels to it.
        for parameter in self._model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        names = model_names(self._model, checkpoint.tensors)
        turned = {f"{name}.weight" for name, _ in transposed_linears(self._model)}
        self._checkpoint = as_matrices(
            checkpoint, [stored for stored, (parameter, _) in names.items() if parameter in turned]
        )
        for name, module in list(transposed_linears(self._model)):
            self._model.set_submodule(name, plain_linear(module))
        self._stored = {parameter: stored for stored, (parameter, fused) in names.items() if not fused}
        self._parts = expert_parts(self._model, checkpoint.tensors)
        self._conversions = conversions(self._model, checkpoint.tensors)
        self._tied = tied_parameters(self._model, self._stored)
        every = self._model.named_parameters(remove_duplicate=False)
        #: Shapes of all parameters by name.
        self.shapes = {name: tuple(one.shape) for name, one in every}
        self._place_buffers()
        # Grouped GEMMs, the default, require rows of a multiple of 16 bytes.
        self._model.set_experts_implementation("eager")
        self._blocks = {name: Block(name, module) for name, module in _blocks_of(self._model)}
        head = embeddings(self._model, "output")
        self.head_name = next((name for name, one in self._blocks.items() if one.module is head), None)
        self._embedding: Any = embeddings(self._model, "input")
        if not isinstance(self._embedding, nn.Embedding):
            raise self._refusal(why_no_tokens(self._model))
        if not self.block_names:
            raise self._refusal("it has no list of modules that hold linears")
        self._outer: LazyWeights | None = None
        self._changes: Mapping[str, Sequence[Change]] = {}
        self._take_no_cache()

    def _take_no_cache(self) -> None:
        for module in self._model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False

    def _place_buffers(self) -> None:
        """Move buffers to the device: from the checkpoint if stored, otherwise as the class computes them."""
        buffers: list[tuple[str, torch.Tensor]] = list(self._model.named_buffers())
        for name, buffer in buffers:
            owner, _, leaf = name.rpartition(".")
            stored = self._stored.get(name)
            tensor = buffer if stored is None else self._checkpoint.read(stored).to(buffer.dtype)
            setattr(self._model.get_submodule(owner), leaf, tensor.to(self.device))

    def _refusal(self, why: str) -> BlocksError:
        kind = self._checkpoint.config.get("model_type")
        return BlocksError(
            f"{self._checkpoint.directory}: quantkit cannot calibrate models of type {kind!r}: {why}. Take "
            "a method without data, such as --method mse."
        )

    @property
    def block_names(self) -> tuple[str, ...]:
        """Return the names of all blocks in the model except the lm_head, in the order of the model class."""
        return tuple(name for name in self._blocks if name != self.head_name)

    def block(self, name: str) -> Block:
        """Return the block `name`, which may be the lm_head."""
        return self._blocks[name]

    def parameters(self, block: str) -> tuple[str, ...]:
        """Return the names of the parameters of `block`, relative to it, in the order of its class."""
        return tuple(name for name, _ in self._blocks[block].module.named_parameters())

    def stored_name(self, parameter: str) -> str | None:
        """Return the name of a parameter in the file; None unless it is a single tensor there."""
        return self._stored.get(parameter)

    def expert_part(self, stored: str) -> ExpertPart | None:
        """Return the place of a stored matrix in fused experts; None for other tensors."""
        return self._parts.get(stored)

    @property
    def config(self) -> Mapping[str, Any]:
        """Return config.json of the model."""
        return self._checkpoint.config

    @property
    def embedding_rows(self) -> int:
        """Return the rows of the embedding: one more than the largest token."""
        return int(self._embedding.num_embeddings)

    @property
    def parts(self) -> Parts:
        """Return the parts of the model that are packed by default."""
        return packed_parts(self._model)

    @property
    def hidden_size(self) -> int:
        """Return the hidden size d."""
        return int(self._embedding.embedding_dim)

    @contextmanager
    def passes(self, read: Callable[[str], torch.Tensor] | None = None) -> Iterator[StartPass]:
        """Context manager: yield a function that starts a pass and runs it up to the first block.

        `read` returns parameters outside of blocks by name, by default from the checkpoint. Raises
        `BlocksError` if the model does not run on tokens alone.
        """
        started: list[ModelPass] = []
        # The head of a classifier comes after it, as a linear.
        last = next((name for name, one in reversed(self._blocks.items()) if not one.is_linear), None)

        def start(
            tokens: torch.Tensor, home: Home, grad: bool = False, beside: Beside | None = None
        ) -> ModelPass:
            forward = partial(self._forward, beside=beside)
            found = ModelPass(forward, tokens, home, self.device, grad=grad, plain=not beside, last=last)
            started.append(found)
            return found

        blocks = {name: block.module for name, block in self._blocks.items()}
        with ExitStack() as stack:
            self._outer = stack.enter_context(self._lazily(blocks.values(), read or self._read))
            stack.enter_context(waiting_at(blocks))
            try:
                yield start
            finally:
                for one in started:
                    one.abandon()
                self._outer = None

    def check_runs(self, tokens: torch.Tensor, beside: Beside | None = None) -> None:
        """Raise `BlocksError` if the model does not run on `tokens` int64 [B, T] up to its first block.

        `beside` are inputs besides tokens, such as pixels. No weight is read: weights outside of blocks are
        zeros. In-place changes to weights of blocks before they run, such as RWKV's scaling, are recorded and
        later applied to the weights read.
        """
        changes = WeightChanges(dict(self._model.named_parameters()))

        def forward(tokens: torch.Tensor) -> Any:
            with changes:
                return self._forward(tokens, beside)

        with self.passes(self._zeros):
            ModelPass(forward, tokens, Home(self.device), self.device).abandon()
        self._changes = changes.found

    def _lazily(self, blocks: Iterable[nn.Module], read: Callable[[str], torch.Tensor]) -> LazyWeights:
        """Make modules outside of `blocks` read their weights on first use."""
        inside = {module for block in blocks for module in block.modules()}
        outside = {name: module for name, module in self._model.named_modules() if module not in inside}
        return LazyWeights(outside, read, self.device, self.dtype)

    def _forward(self, tokens: torch.Tensor, beside: Beside | None = None) -> Any:
        """Run the model on tokens int64 [B, T]; an encoder-decoder gets them twice.

        `beside` are further inputs by name, such as images; inputs unknown to `forward` are left out.
        """
        inputs: dict[str, Any] = {"input_ids": tokens.to(self.device)}
        known = inspect.signature(self._model.forward).parameters
        for name, one in (beside or {}).items():
            if name in known:
                inputs[name] = one.to(self.device, self.dtype if one.is_floating_point() else None)
        if "decoder_input_ids" in known:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        if "use_cache" in known:
            inputs["use_cache"] = False
        try:
            return self._model(**inputs)
        except (QuantkitError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # Models may raise anything.
            main = getattr(self._model, "main_input_name", "input_ids")
            given = "tokens alone" if beside is None else "tokens and images"
            reason = f"it does not run on {given} ({type(error).__name__}: {error})"
            raise self._refusal(
                reason if main == "input_ids" else f"it runs on {main}, not on tokens"
            ) from error

    @contextmanager
    def loaded(self, block: Block, overrides: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """Context manager: load the weights of `block`, from `overrides` by name or the checkpoint."""
        if self._outer is not None:
            self._outer.release()
        weights = dict(overrides or {})
        for name, _ in block.module.named_parameters():
            if name not in weights:
                weights[name] = self._read(f"{block.name}.{name}")
        with self._lent(block.module, weights):
            yield

    @contextmanager
    def cached(self, block: Block) -> Iterator[None]:
        """Context manager: read the tensors of `block` in parallel, except stacked experts; cache them."""
        stored = self._stored_of(block)
        try:
            with ThreadPoolExecutor(READERS, "read") as readers:
                self._cached.update(zip(stored, readers.map(self.read, stored), strict=True))
            yield
        finally:
            self._cached.clear()

    def read_ahead(self, block: Block) -> None:
        """Start reading the tensors of `block` into host memory, for a later `cached`."""
        readers = ThreadPoolExecutor(READERS, "read-ahead")
        for name in self._stored_of(block):
            self._reads[name] = readers.submit(self._checkpoint.read, name)
        readers.shutdown(wait=False)

    def _stored_of(self, block: Block) -> list[str]:
        names = [self._stored.get(f"{block.name}.{name}") for name, _ in block.module.named_parameters()]
        return [name for name in names if name is not None]

    def read(self, stored: str) -> torch.Tensor:
        """Return tensor `stored` of the checkpoint on the device, in its stored dtype. Do not modify it."""
        if stored in self._cached:
            return self._cached[stored]
        pending = self._reads.pop(stored, None)
        return (self._checkpoint.read(stored) if pending is None else pending.result()).to(self.device)

    def drop(self, stored: str) -> None:
        """Remove a tensor from the cache."""
        self._cached.pop(stored, None)

    def duplicate(self, block: Block) -> Block:
        """Copy the module of `block`, to load other weights into the copy."""
        module = copy.deepcopy(block.module)
        # Without this, the copy would run the original's forward, and passes would wait there.
        vars(module).pop("forward", None)
        return Block(block.name, module)

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter of the model, as the checkpoint has it."""
        return self._read(name)

    def _read(self, parameter: str) -> torch.Tensor:
        stored = self._stored.get(parameter) or self._tied.get(parameter)
        if stored is not None:
            weight = self.read(stored).to(self.dtype)
            changes = self._changes.get(parameter, ())
            return apply_changes(weight, changes) if changes else weight
        parts = {name: part for name, part in self._parts.items() if part.parameter == parameter}
        if not parts and parameter in self._conversions:
            made = self._conversions[parameter].run(self._model, lambda name: self.read(name).to(self.dtype))
            return made[parameter]
        if not parts:
            return self._computed(parameter)
        fused = self.empty(parameter)
        for name, part in parts.items():
            part.of(fused).copy_(self._checkpoint.read(name))
        return fused

    def _zeros(self, parameter: str) -> torch.Tensor:
        """Return zeros without memory for a stored parameter, or else the value that its class computes."""
        stored = (self._stored, self._tied, self._conversions)
        is_part = any(part.parameter == parameter for part in self._parts.values())
        if not is_part and all(parameter not in one for one in stored):
            return self._computed(parameter)
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shapes[parameter])

    def _computed(self, parameter: str) -> torch.Tensor:
        """Return a parameter that no file has, computed by its class, such as sinusoidal positions."""
        owner, _, leaf = parameter.rpartition(".")
        found = []
        for seed in (0, 1):
            module = copy.copy(self._model.get_submodule(owner))
            module._parameters = {
                name: None if one is None else nn.Parameter(torch.full(one.shape, torch.nan), False)
                for name, one in module._parameters.items()
            }
            with torch.random.fork_rng(), suppress(Exception):  # Another model's code may fail in any way.
                torch.manual_seed(seed)
                self._model._init_weights(module)
            found.append(module.get_parameter(leaf).detach())
        # Two computations differ: random numbers are no values of the model, and NaN means not computed.
        if not torch.equal(*found):
            raise self._refusal(
                f"its parameter {parameter!r} is neither in the checkpoint nor computed from it"
            )
        value: torch.Tensor = found[0].to(self.device, self.dtype)
        return value

    def whole(self) -> Any:
        """Return a copy of the model with all weights of the checkpoint; tied ones are one parameter."""
        model, made = copy.deepcopy(self._model), dict[str, nn.Parameter]()
        for name in self.shapes:
            known = self._stored.get(name) or self._tied.get(name) or name
            if known not in made:
                made[known] = nn.Parameter(self._read(name).clone(), requires_grad=False)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, made[known])
        return model

    def empty(self, parameter: str) -> torch.Tensor:
        """Allocate uninitialised memory for `parameter`: its shape, on `self.device`, in `self.dtype`."""
        return torch.empty(self.shapes[parameter], dtype=self.dtype, device=self.device)

    @contextmanager
    def head(self, outputs: Mapping[str, Any]) -> Iterator[Logits]:
        """Load the modules after the blocks; yield a function from hidden states to logits.

        `outputs` are the results of blocks for any micro-batch, by name. The function takes the states after
        the last block, such as [B, T, d], and [B, T], and returns logits [B, T, V]. Several threads may call
        it.
        """
        here = threading.local()
        blocks = {name: self._blocks[name].module for name in outputs}

        def logits(hidden: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
            here.hidden = hidden
            tokens = torch.zeros(*shape, dtype=torch.int64, device=self.device)
            result: torch.Tensor = self._forward(tokens).logits
            return result

        with (
            self._lazily(blocks.values(), self._read),
            returning(blocks, lambda name: with_hidden(outputs[name], here.hidden)),
        ):
            yield logits

    @contextmanager
    def _lent(self, module: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        originals = dict(module.named_parameters(remove_duplicate=False))
        try:
            for name, tensor in weights.items():
                set_weight(module, name, tensor)
            yield
        finally:
            for name, parameter in originals.items():
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, parameter)


def set_weight(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace the parameter `name` of `module` by `tensor`, as a parameter without gradients."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


class Stopped(Exception):
    """Exception that ends a forward before a module; `inputs` are the inputs of that module."""

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def _blocks_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of `model` with their names: members of lists with linears, and linears outside."""
    is_list = isinstance(model, nn.ModuleList) and any(map(_holds_linears, model))
    for leaf, child in model.named_children():
        name = f"{prefix}{leaf}"
        if _is_linear(child) or (is_list and not isinstance(child, nn.ModuleList)):
            yield name, child
        else:
            yield from _blocks_of(child, f"{name}.")


def _holds_linears(module: nn.Module) -> bool:
    return not _is_linear(module) and any(map(_is_linear, module.modules()))


def _is_linear(module: nn.Module) -> bool:
    return is_linear(module) or is_fused_experts(module)
