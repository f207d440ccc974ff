"""Run the decoder of a checkpoint block by block, with the weights of only one block in memory.

The model is built on the meta device from the classes of transformers. Real weights replace its parameters
while a block runs. The other arguments of a block (positions, masks) are captured from the decoder's own
forward, so no architecture is named here.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.hidden_states import Home
from quantkit.model.model_class import meta_model
from quantkit.model.names import ExpertPart, expert_parts, model_names


@dataclass(frozen=True, eq=False)
class Block:
    """Block of the decoder: a module on the meta device, and its arguments beside the hidden states.

    `name` is its name in the model; parameters are called `{name}.{name inside the block}`.
    """

    name: str
    module: nn.Module
    arguments: Mapping[str, Any]

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states [B, T, d] after the block from those before, of the same dtype."""
        output = self.module(hidden, **self.arguments)
        after: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return after


#: Tensors of a block that are read in parallel.
READERS = 4


class Decoder:
    """Blocks of the decoder of a checkpoint, computing on `device` in `dtype`.

    Raises `CheckpointError` if the decoder is not a list of blocks between an embedding and a norm.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._checkpoint = checkpoint
        self._cached: dict[str, torch.Tensor] = {}
        self._reads: dict[str, Future[torch.Tensor]] = {}
        self._model: Any = meta_model(checkpoint.config, checkpoint.directory, buffers=True)
        self._model.eval()
        names = model_names(self._model, checkpoint.tensors)
        self._stored = {parameter: stored for stored, (parameter, fused) in names.items() if not fused}
        self._parts = expert_parts(self._model, checkpoint.tensors)
        get_decoder = getattr(self._model, "get_decoder", None)
        self._decoder: Any = None if get_decoder is None else get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            raise self._refusal("its decoder has no list of blocks called 'layers'")
        self._layers: nn.ModuleList = layers
        self._place_buffers()
        self._run_experts_one_by_one()
        modules = {module: name for name, module in self._model.named_modules()}
        self._names = [modules[layer] for layer in layers]
        self._prefix = f"{modules[self._decoder]}." if modules[self._decoder] else ""

    def _place_buffers(self) -> None:
        """Move buffers to the device: stored ones from the checkpoint, others as the classes compute them."""
        for name, buffer in list(self._model.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            stored = self._stored.get(name)
            tensor = buffer if stored is None else self._checkpoint.read(stored).to(buffer.dtype)
            setattr(self._model.get_submodule(owner), leaf, tensor.to(self.device))

    def _run_experts_one_by_one(self) -> None:
        """Select eager experts: grouped GEMMs, the default, refuse rows that are no multiple of 16 bytes."""
        self._model.set_experts_implementation("eager")

    def _refusal(self, why: str) -> CheckpointError:
        kind = self._checkpoint.config.get("model_type")
        return CheckpointError(
            f"{self._checkpoint.directory}: quantkit cannot calibrate models of type {kind!r}: {why}. Take "
            "a method without data, such as --method mse."
        )

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks in the model, in order."""
        return tuple(self._names)

    def parameters(self, block: int) -> tuple[str, ...]:
        """Return the names of the parameters of a block inside it, as its class lists them."""
        return tuple(name for name, _ in self._layers[block].named_parameters())

    def stored_name(self, parameter: str) -> str | None:
        """Return the name of a parameter in the file; None if it is not a single tensor there."""
        return self._stored.get(parameter)

    def expert_part(self, stored: str) -> ExpertPart | None:
        """Return the place of a stored matrix in fused experts; None for other tensors."""
        return self._parts.get(stored)

    @property
    def config(self) -> Mapping[str, Any]:
        """The config.json of the model."""
        return self._checkpoint.config

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding: one more than the largest token."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Size d of a hidden state."""
        return int(self._model.get_input_embeddings().weight.shape[1])

    @torch.no_grad()
    def embed(self, batches: Sequence[torch.Tensor], home: Home) -> tuple[list[torch.Tensor], list[Block]]:
        """Return the hidden states [B, T, d] before the first block, stored at `home`, and the blocks.

        `batches` are tokens [B, T] int64, all of one shape. The blocks have the arguments for that shape.
        """
        hidden: list[torch.Tensor] = []
        arguments: list[dict[str, Any]] = []

        def record(states: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
            arguments.append(call)
            if len(arguments) == len(self._layers):
                raise _LastBlock(states)
            return states

        with self._without_blocks(record):
            for tokens in batches:
                arguments.clear()
                try:
                    self._decoder(input_ids=tokens.to(self.device), use_cache=False)
                except _LastBlock as reached:
                    hidden.append(home.store(reached.hidden))
        return hidden, [
            Block(name, layer, call)
            for name, layer, call in zip(self._names, self._layers, arguments, strict=True)
        ]

    @torch.no_grad()
    def head_inputs(
        self, batches: Sequence[torch.Tensor], hidden: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the inputs of lm_head, [B * T, d], on the device of `hidden`: final states, normalized.

        `hidden` are the states [B, T, d] after the last block, one per batch of tokens.
        """
        results: list[torch.Tensor] = []
        calls = 0

        def replace(states: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
            nonlocal calls
            calls += 1
            last = calls == len(self._layers) * (len(results) + 1)
            return hidden[len(results)].to(self.device) if last else states

        def stop(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            raise Stopped(inputs)

        hook = self._model.get_output_embeddings().register_forward_pre_hook(stop)
        try:
            with self._without_blocks(replace):
                for tokens, after in zip(batches, hidden, strict=True):
                    try:
                        self._model(input_ids=tokens.to(self.device), use_cache=False)
                    except Stopped as stopped:
                        inputs = stopped.inputs[0].to(after.device)
                        if inputs.numel() != after.numel():
                            raise self._refusal(
                                f"its lm_head sees {tuple(inputs.shape)} of states {tuple(after.shape)}"
                            ) from None
                        results.append(inputs.reshape(-1, inputs.shape[-1]))
        finally:
            hook.remove()
        return results

    @contextmanager
    def _without_blocks(
        self, forward: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
    ) -> Iterator[None]:
        """Replace each block by `forward(hidden, arguments)`, and load the other weights of the decoder."""
        outer = [name for name, _ in self._decoder.named_parameters() if not name.startswith("layers.")]
        self._decoder.layers = nn.ModuleList(_StandIn(layer, forward) for layer in self._layers)
        try:
            with self._lent(self._decoder, {name: self._read(f"{self._prefix}{name}") for name in outer}):
                yield
        finally:
            self._decoder.layers = self._layers

    @contextmanager
    def loaded(self, block: Block, overrides: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """Load the weights of `block`: `overrides` by name in the block, others from the checkpoint."""
        weights = dict(overrides or {})
        for name, _ in block.module.named_parameters():
            if name not in weights:
                weights[name] = self._read(f"{block.name}.{name}")
        with self._lent(block.module, weights):
            yield

    @contextmanager
    def cached(self, block: Block) -> Iterator[None]:
        """Read the tensors of `block`, except stacked experts, in parallel; keep them on the device."""
        stored = self._stored_of(block)
        try:
            with ThreadPoolExecutor(READERS, "read") as readers:
                self._cached.update(zip(stored, readers.map(self.read, stored), strict=True))
            yield
        finally:
            self._cached.clear()

    def read_ahead(self, block: Block) -> None:
        """Start to read the tensors of `block` into host memory, for a later `cached`."""
        readers = ThreadPoolExecutor(READERS, "read-ahead")
        for name in self._stored_of(block):
            self._reads[name] = readers.submit(self._checkpoint.read, name)
        readers.shutdown(wait=False)

    def _stored_of(self, block: Block) -> list[str]:
        names = [self._stored.get(f"{block.name}.{name}") for name, _ in block.module.named_parameters()]
        return [name for name in names if name is not None]

    def read(self, stored: str) -> torch.Tensor:
        """Return a tensor of the checkpoint on the device, in its stored dtype. Do not modify it."""
        if stored in self._cached:
            return self._cached[stored]
        pending = self._reads.pop(stored, None)
        return (self._checkpoint.read(stored) if pending is None else pending.result()).to(self.device)

    def drop(self, stored: str) -> None:
        """Drop a cached tensor."""
        self._cached.pop(stored, None)

    def duplicate(self, block: Block) -> Block:
        """Copy the module of `block`, to load other weights into the copy."""
        return Block(block.name, copy.deepcopy(block.module), block.arguments)

    def _read(self, parameter: str) -> torch.Tensor:
        stored = self._stored.get(parameter)
        if stored is not None:
            return self.read(stored).to(self.dtype)
        parts = {name: part for name, part in self._parts.items() if part.parameter == parameter}
        if not parts:
            raise self._refusal(
                f"its parameter {parameter!r} is neither a tensor of the checkpoint nor its experts one "
                "after the other"
            )
        fused = self.empty(parameter)
        for name, part in parts.items():
            part.of(fused).copy_(self._checkpoint.read(name))
        return fused

    def empty(self, parameter: str) -> torch.Tensor:
        """Allocate memory for a parameter, in its shape."""
        shape = self._model.get_parameter(parameter).shape
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Load the modules after the blocks; yield a function from hidden states to logits.

        The function takes the states [B, T, d] after the last block and returns logits [B, T, V]. Several
        threads may call it.
        """
        inside = set(self._layers.parameters())
        outer = [
            (name, parameter)
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if parameter not in inside
        ]
        stored = {parameter: name for name, parameter in outer if self.stored_name(name) is not None}
        embedding, output = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if output is not None and embedding.weight in stored:
            # A tied head has no tensor of its own.
            stored.setdefault(output.weight, stored[embedding.weight])
        names = {name: stored.get(parameter, name) for name, parameter in outer}
        tensors = {name: self._read(name) for name in dict.fromkeys(names.values())}
        layers, fixed = self._layers, _FixedOutput(self._layers[-1])

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
            fixed.states.hidden = hidden
            result: torch.Tensor = self._model(input_ids=tokens, use_cache=False).logits
            return result

        with self._lent(self._model, {name: tensors[one] for name, one in names.items()}):
            self._decoder.layers = nn.ModuleList([fixed] * len(layers))
            try:
                yield logits
            finally:
                self._decoder.layers = layers

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
    """Replace the parameter `name` of `module` by `tensor`."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


class _LastBlock(Exception):
    """Raised at the last block; `hidden` are the hidden states before the first one."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Stopped(Exception):
    """Raised to end a forward; `inputs` are the inputs of the module at which it ended."""

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.inputs = inputs


class _StandIn(nn.Module):
    """Replacement for a block: calls a function with the hidden states and the other arguments."""

    def __init__(
        self, layer: nn.Module, function: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
    ) -> None:
        super().__init__()
        # Avoid nn.Module's own setattr, which would make the layer a child.
        self.__dict__.update(layer=layer, function=function)

    def __getattr__(self, name: str) -> Any:
        # Decoders read attributes of their blocks, such as the type of attention.
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        result: torch.Tensor = self.__dict__["function"](hidden, arguments)
        return result


class _FixedOutput(nn.Module):
    """Replacement for a block that returns the hidden states set for the current thread."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, states=threading.local())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        result: torch.Tensor = self.__dict__["states"].hidden
        return result
