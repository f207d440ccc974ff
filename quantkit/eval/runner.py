"""Run forward passes of a checkpoint: with all of it in memory, or block by block if it does not fit.

Block by block, every weight is read once for many windows, whose hidden states are stored on the host. On a
CPU the results are bit-identical.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.source import Checkpoint
from quantkit.devices import pick_device
from quantkit.errors import CheckpointError, EnvironmentProblem
from quantkit.eval.models import dtype_name, release
from quantkit.eval.own_text import OwnText, write_own_text
from quantkit.files import size_text
from quantkit.memory import free_memory
from quantkit.model.blocks import Decoder
from quantkit.model.forward.model_pass import ModelPass
from quantkit.model.hidden_states import Home
from quantkit.runtime.generate import cache_name
from quantkit.runtime.load import load_language_model

#: Tokens whose hidden states are stored between two blocks, and passes, each with a thread of its own.
WAITING_TOKENS = 1 << 17
WAITING_PASSES = 256

#: Windows int64 [B, W] of a batch, and how many last tokens of each are predicted.
Windows = tuple[torch.Tensor, int]


class Passes(ABC):
    """Model ready to run; call `close` before opening the next one. `note` is for the user."""

    note: str | None = None
    _model: Any

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory, self.device = directory, device

    @property
    @abstractmethod
    def embedding_rows(self) -> int:
        """Return the rows of the input embedding: one more than the largest token."""

    @abstractmethod
    def _logits(self, batches: Sequence[Windows]) -> Iterator[torch.Tensor]:
        """Yield the logits [B, W, V] of each batch, in order, in the dtype of activations."""

    def logits(self, batches: Sequence[Windows]) -> Iterator[torch.Tensor]:
        """Yield the logits [B, scored, V] that predict the last `scored` tokens of each batch, on the device.

        Raises `CheckpointError` if any is not finite.
        """
        for logits, (_, scored) in zip(self._logits(batches), batches, strict=True):
            yield predictions(logits, scored, self.directory)

    def writes(self, starts: torch.Tensor, limit: int | None) -> OwnText:
        """Let the model continue `starts`, int64 [B, n], by sampling with fixed seeds, and greedily.

        `limit` is the number of positions of the model, None without a limit. Raises `EnvironmentProblem` for
        a model that runs block by block, which writes no text.
        """
        if not isinstance(self._model, torch.nn.Module):
            raise EnvironmentProblem(
                f"{self.directory}: it only runs block by block here, which writes no text. Leave out "
                "--own-text, or take a machine with more memory."
            )
        return write_own_text(self._model, starts, limit)

    def close(self) -> None:
        """Free the memory of the model."""
        vars(self).pop("_model", None)
        release(str(self.device))


class _Whole(Passes):
    """Passes with all weights in memory."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, kv_cache: str | None
    ) -> None:
        super().__init__(directory, device)
        self._kv_cache = kv_cache
        self._model: Any = load_language_model(directory, device=device, dtype=dtype)
        self._model.eval()

    @property
    def embedding_rows(self) -> int:
        return int(self._model.get_input_embeddings().weight.shape[0])

    def _logits(self, batches: Sequence[Windows]) -> Iterator[torch.Tensor]:
        for tokens, _ in batches:
            # Left before each yield, so that the caller's code runs outside inference mode.
            with torch.inference_mode():
                cache = None if self._kv_cache is None else self._empty_cache(self._kv_cache)
                inputs = tokens.to(self.device)
                given = {} if cache is None else {cache_name(self._model): cache}
                output = self._model(input_ids=inputs, use_cache=cache is not None, **given)
            yield output.logits

    def _empty_cache(self, format: str) -> Any:
        from quantkit.runtime.cache.kv_cache import PackedCache

        cache = PackedCache.of_model(self._model, format)
        if cache.note is not None:
            self.note = f"{self.directory.name}: {cache.note}"
        return cache


class _BlockByBlock(Passes):
    """Passes with the weights of one block in memory, and hidden states of as many windows as allowed."""

    def __init__(self, decoder: Decoder, directory: Path, note: str) -> None:
        super().__init__(directory, decoder.device)
        self.note = note
        self._model = decoder

    @property
    def embedding_rows(self) -> int:
        return int(self._model.embedding_rows)

    def _logits(self, batches: Sequence[Windows]) -> Iterator[torch.Tensor]:
        # The arguments of blocks belong to windows of one shape.
        for _, group in groupby(batches, lambda batch: batch[0].shape):
            alike = list(group)
            step = max(1, min(WAITING_PASSES, WAITING_TOKENS // alike[0][0].numel()))
            for start in range(0, len(alike), step):
                yield from self._pass(alike[start : start + step])

    def _pass(self, batches: Sequence[Windows]) -> Iterator[torch.Tensor]:
        home = Home(torch.device("cpu"), self.device.type == "cuda")
        with self._model.passes() as start:
            waiting = [start(tokens, home) for tokens, _ in batches]
            while (name := waiting[0].block) not in (None, self._model.head_name):
                with self._model.loaded(self._model.block(name)):
                    for one in waiting:
                        self._advance(one)
            with ExitStack() as stack:
                if name is not None:
                    stack.enter_context(self._model.loaded(self._model.block(name)))
                for one in waiting:
                    if name is not None:
                        self._advance(one)
                    yield one.take_output().logits

    @torch.no_grad()
    def _advance(self, one: ModelPass) -> None:
        assert one.block is not None
        with one.loaded() as call:
            output = self._model.block(one.block).run(call)
        one.advance(output)


def predictions(logits: torch.Tensor, scored: int, directory: Path) -> torch.Tensor:
    """Return the logits of [B, W, V] that predict the last `scored` tokens, checked by `check_finite`."""
    found = logits[:, -scored - 1 : -1]
    check_finite(found, directory)
    return found


def check_finite(logits: torch.Tensor, directory: Path) -> None:
    """Raise `CheckpointError` if any logit is not finite: one NaN would spread into every figure."""
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError(
            f"{directory}: the model gives logits that are not finite in {logits.dtype}. Evaluate with dtype "
            "float32; if that does not help, the weights are damaged: run `quantkit verify`."
        )


def open_passes(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str, kv_cache: str | None = None
) -> Passes:
    """Open `checkpoint` with activations in `dtype`: whole, unless dense and larger than the free memory.

    Low-bit weights that are dequantized when read run block by block, because transformers cannot load them.
    With `kv_cache`, a format of `KV_SCHEMES`, the model must run whole; else raises `EnvironmentProblem`.
    """
    where = pick_device(device)
    needed = sum(tensor.elements for tensor in checkpoint.tensors.values()) * dtype.itemsize
    free = free_memory(where)
    low_bit = any(tensor.stored_as is not None for tensor in checkpoint.tensors.values())
    if checkpoint.is_quantized or (needed <= free and not low_bit):
        return _Whole(checkpoint.directory, dtype, where, kv_cache)
    if kv_cache is not None:
        raise EnvironmentProblem(
            f"{checkpoint.directory} takes {size_text(needed)}, {size_text(free)} are free on {device}: it "
            "can only run block by block, which has no KV cache. Evaluate it without --kv-cache."
        )
    why = f"takes {size_text(needed)} in {dtype_name(dtype)} and {size_text(free)} are free on {device}"
    if low_bit:
        why = "is low-bit already, and its weights are dequantized as they are read"
    note = (
        f"{checkpoint.place.name} {why}: it ran block by block, which reads its weights once for every "
        f"{WAITING_TOKENS} tokens"
    )
    return _BlockByBlock(Decoder(checkpoint, where, dtype), checkpoint.directory, note)
