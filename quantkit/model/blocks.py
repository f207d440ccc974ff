"""The decoder of a checkpoint one block at a time: only the weights of the block in work are in memory.

The model is built on the meta device, from transformers' own classes, and its parameters are lent real
weights while they are needed. What a block is called with beside the hidden states (positions, masks) is
recorded from the decoder's own forward, so that nothing here knows an architecture.
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
from quantkit.model.names import ExpertPart, expert_parts, model_names
from quantkit.model.structure import meta_model


@dataclass(frozen=True, eq=False)
class Block:
    """One step of the decoder: a module on the meta device, and what it is called with beside hidden states.

    `name` is its name in the model; a parameter's is `name`, a dot and its name inside the block.
    """

    name: str
    module: nn.Module
    arguments: Mapping[str, Any]

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states [B, T, d] after the block."""
        output = self.module(hidden, **self.arguments)
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found


#: Tensors of a block that are read at a time.
READERS = 4


class Decoder:
    """The blocks of a checkpoint's decoder, computing on `device` in `dtype`.

    Raises `CheckpointError` for a model whose decoder is not a list of blocks between an embedding and a
    norm.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._checkpoint = checkpoint
        self._kept: dict[str, torch.Tensor] = {}
        self._ahead: dict[str, Future[torch.Tensor]] = {}
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
        """Buffers to the device: as the model's classes made them, or as they are stored."""
        for name, buffer in list(self._model.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            stored = self._stored.get(name)
            tensor = buffer if stored is None else self._checkpoint.read(stored).to(buffer.dtype)
            setattr(self._model.get_submodule(owner), leaf, tensor.to(self.device))

    def _run_experts_one_by_one(self) -> None:
        """Grouped products, the default, refuse rows that are no multiple of 16 bytes."""
        self._model.set_experts_implementation("eager")

    def _refusal(self, why: str) -> CheckpointError:
        kind = self._checkpoint.config.get("model_type")
        return CheckpointError(
            f"{self._checkpoint.directory}: quantkit cannot calibrate models of type {kind!r}: {why}. Take "
            "a method without data, such as --method mse."
        )

    @property
    def block_names(self) -> tuple[str, ...]:
        """The names of the blocks in the model, in order."""
        return tuple(self._names)

    def parameters(self, block: int) -> tuple[str, ...]:
        """The names that parameters of a block have inside it, as its class lists them."""
        return tuple(name for name, _ in self._layers[block].named_parameters())

    def stored_name(self, parameter: str) -> str | None:
        """The name that a parameter has in the file; None if it is no single tensor there."""
        return self._stored.get(parameter)

    def expert_part(self, stored: str) -> ExpertPart | None:
        """Where a stored matrix goes in fused experts; None for any other tensor."""
        return self._parts.get(stored)

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's `config.json`."""
        return self._checkpoint.config

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding: one more than the largest token."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Features of a hidden state."""
        return int(self._model.get_input_embeddings().weight.shape[1])

    @torch.no_grad()
    def embed(self, batches: Sequence[torch.Tensor], home: Home) -> tuple[list[torch.Tensor], list[Block]]:
        """The hidden states before the first block, on `home`, for batches of tokens (int64 [B, T], of one
        shape).

        And the blocks, with what the decoder calls them with for such batches.
        """
        hidden: list[torch.Tensor] = []
        arguments: list[dict[str, Any]] = []

        def record(of_one: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
            arguments.append(call)
            if len(arguments) == len(self._layers):
                raise _LastBlock(of_one)
            return of_one

        with self._without_blocks(record):
            for tokens in batches:
                arguments.clear()
                try:
                    self._decoder(input_ids=tokens.to(self.device), use_cache=False)
                except _LastBlock as reached:
                    hidden.append(home.hold(reached.hidden))
        return hidden, [
            Block(name, layer, of_one)
            for name, layer, of_one in zip(self._names, self._layers, arguments, strict=True)
        ]

    @torch.no_grad()
    def head_inputs(
        self, batches: Sequence[torch.Tensor], hidden: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What the model's lm_head sees, [tokens, d] where `hidden` is: the states [B, T, d] after the last
        block.
        """
        found: list[torch.Tensor] = []
        seen = 0

        def replace(of_one: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
            nonlocal seen
            seen += 1
            last = seen == len(self._layers) * (len(found) + 1)
            return hidden[len(found)].to(self.device) if last else of_one

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
                        found.append(inputs.reshape(-1, inputs.shape[-1]))
        finally:
            hook.remove()
        return found

    @contextmanager
    def _without_blocks(
        self, forward: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
    ) -> Iterator[None]:
        """The decoder with `forward(hidden, arguments)` in place of each block, and its own weights."""
        outer = [name for name, _ in self._decoder.named_parameters() if not name.startswith("layers.")]
        self._decoder.layers = nn.ModuleList(_StandIn(layer, forward) for layer in self._layers)
        try:
            with self._lent(self._decoder, {name: self._read(f"{self._prefix}{name}") for name in outer}):
                yield
        finally:
            self._decoder.layers = self._layers

    @contextmanager
    def loaded(self, block: Block, given: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """Lend a block its weights; `given` by parameter name inside the block, the others from the
        checkpoint.
        """
        weights = dict(given or {})
        for name, _ in block.module.named_parameters():
            if name not in weights:
                weights[name] = self._read(f"{block.name}.{name}")
        with self._lent(block.module, weights):
            yield

    @contextmanager
    def kept(self, block: Block) -> Iterator[None]:
        """Read a block's tensors once, some at a time, and hold them on the device; not those of experts."""
        stored = self._stored_of(block)
        try:
            with ThreadPoolExecutor(READERS, "read") as readers:
                self._kept.update(zip(stored, readers.map(self.read, stored), strict=True))
            yield
        finally:
            self._kept.clear()

    def read_ahead(self, block: Block) -> None:
        """Begin to read what `kept` will hold of a block into the host's memory."""
        readers = ThreadPoolExecutor(READERS, "read-ahead")
        for name in self._stored_of(block):
            self._ahead[name] = readers.submit(self._checkpoint.read, name)
        readers.shutdown(wait=False)

    def _stored_of(self, block: Block) -> list[str]:
        names = [self._stored.get(f"{block.name}.{name}") for name, _ in block.module.named_parameters()]
        return [name for name in names if name is not None]

    def read(self, stored: str) -> torch.Tensor:
        """A tensor of the checkpoint on the device, as that reads it. It must not be changed."""
        if stored in self._kept:
            return self._kept[stored]
        ahead = self._ahead.pop(stored, None)
        return (self._checkpoint.read(stored) if ahead is None else ahead.result()).to(self.device)

    def release(self, stored: str) -> None:
        """Hold a kept tensor no longer."""
        self._kept.pop(stored, None)

    def twin(self, block: Block) -> Block:
        """A second module for the same block, to be lent other weights."""
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
            part.of(fused, self._checkpoint.tensors[name].shape[0]).copy_(self._checkpoint.read(name))
        return fused

    def empty(self, parameter: str) -> torch.Tensor:
        """Memory for a parameter."""
        shape = self._model.get_parameter(parameter).shape
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Lend the model what comes after its blocks: the function from the hidden states [B, T, d] after the
        last block to the logits [B, T, V], which several threads may call.
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
            # A head that is tied has no tensor of its own.
            stored.setdefault(output.weight, stored[embedding.weight])
        names = {name: stored.get(parameter, name) for name, parameter in outer}
        tensors = {name: self._read(name) for name in dict.fromkeys(names.values())}
        layers, given = self._layers, _Given(self._layers[-1])

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
            given.here.hidden = hidden
            found: torch.Tensor = self._model(input_ids=tokens, use_cache=False).logits
            return found

        with self._lent(self._model, {name: tensors[one] for name, one in names.items()}):
            self._decoder.layers = nn.ModuleList([given] * len(layers))
            try:
                yield logits
            finally:
                self._decoder.layers = layers

    @contextmanager
    def _lent(self, module: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        held = dict(module.named_parameters(remove_duplicate=False))
        try:
            for name, tensor in weights.items():
                set_weight(module, name, tensor)
            yield
        finally:
            for name, parameter in held.items():
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, parameter)


def set_weight(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Make `tensor` the parameter called `name` in `module`."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


class _LastBlock(Exception):
    """The decoder has come to the end of its blocks; the hidden states went through them unchanged."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Stopped(Exception):
    """A pass has come to where it is to stop."""

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.inputs = inputs


class _StandIn(nn.Module):
    """Stands in for a block: passes hidden states, and what else it is called with, to a function."""

    def __init__(
        self, layer: nn.Module, function: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
    ) -> None:
        super().__init__()
        # Past nn.Module, which would make the layer a child.
        self.__dict__.update(layer=layer, function=function)

    def __getattr__(self, name: str) -> Any:
        # Decoders ask their blocks what kind of attention they have.
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        found: torch.Tensor = self.__dict__["function"](hidden, arguments)
        return found


class _Given(nn.Module):
    """Stands in for a block: its output are the hidden states that the thread has put `here`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, here=threading.local())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        found: torch.Tensor = self.__dict__["here"].hidden
        return found
