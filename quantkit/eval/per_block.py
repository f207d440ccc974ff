"""Measure the cost of each block of a packed model: the original's divergence with that block packed.

The original's blocks are loaded in turn. There is one set of passes for each block, in which that block is
packed, and one set of the original. A set shares the original's results up to its packed block and computes
its own after it. For L blocks this takes about as long as L / 2 passes of the model.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quantkit.checkpoint.source import Checkpoint
from quantkit.devices import pick_device
from quantkit.errors import BlocksError, QuantkitError
from quantkit.eval.eval_model import Subject
from quantkit.eval.metrics import score
from quantkit.eval.runner import predictions
from quantkit.model.architectures import text_config
from quantkit.model.blocks import Block, Decoder
from quantkit.model.forward.model_pass import ModelPass
from quantkit.model.forward.trees import hidden_in, with_hidden
from quantkit.model.hidden_states import Home
from quantkit.model.structure import read_structure
from quantkit.progress import Progress, counting
from quantkit.runtime.load import load

#: Windows of the first text. The hidden states of each are on the host once per block.
WINDOWS = 2
#: Rows of the embedding that are compared with the original's.
_ROWS = 64


@dataclass(frozen=True)
class BlockLosses:
    """KL divergence by block, in the order of execution: nats per token, mean over `tokens`."""

    kl_mean: Mapping[str, float]
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def window_passes(packed: Checkpoint, original: Subject) -> int:
    """Return about how many windows `block_losses` runs `original` over; 0 where it measures nothing."""
    try:
        if not packed.is_quantized:
            return 0
        _check_exchangeable(packed, original.checkpoint)
    except QuantkitError:
        return 0
    found = text_config(original.checkpoint.config).get("num_hidden_layers")
    blocks = found if isinstance(found, int) else 1
    cost = _prediction_cost(original.checkpoint, blocks)
    return len(original.texts[0].tokens[:WINDOWS]) * _work(blocks, cost) // (blocks + cost)


def _work(blocks: int, cost: int) -> int:
    """Return the work of `block_losses` on a window in runs of a block, `cost` of them for a prediction."""
    return blocks * (blocks + 3) // 2 + blocks * cost


def _prediction_cost(original: Checkpoint, blocks: int) -> int:
    """Return about how many runs of one of `blocks` blocks take as long as the head and its divergence."""
    table = original.tensors[read_structure(original).embedding or next(iter(original.tensors))]
    body = sum(one.elements for one in original.tensors.values() if one.shape != table.shape)
    return max(1, round(2 * table.elements * blocks / max(1, body)))


def block_losses(
    packed: Checkpoint,
    original: Checkpoint,
    tokens: torch.Tensor,
    scored: int,
    dtype: torch.dtype,
    device: str,
    progress: Progress | None = None,
) -> BlockLosses:
    """Run `original` on windows (int64 [n, W]) with each block of `packed` in turn.

    The divergence is of the last `scored` tokens of each window. All of `packed` is in memory, and one block
    of `original`. Raises `BlocksError` if blocks are not interchangeable: for a rotated model, and for a
    model whose decoder is no list of blocks.
    """
    _check_exchangeable(packed, original)
    where = pick_device(device)
    decoder, model = Decoder(original, where, dtype), load(packed.directory, device=device, dtype=dtype)
    home = Home(torch.device("cpu"), where.type == "cuda")
    batches = [tokens[at : at + 1] for at in range(len(tokens))]
    blocks = decoder.block_names
    cost = _prediction_cost(original, len(blocks))
    advance = counting(_work(len(blocks), cost), progress)
    with decoder.passes() as start, torch.no_grad():
        dense = [start(window, home) for window in batches]
        # One set of passes for each block, in which that block is packed.
        sets = {name: [start(window, home) for window in batches] for name in blocks}
        done: list[str] = []
        while (name := dense[0].block) is not None and name != decoder.head_name:
            block, module = decoder.block(name), model.get_submodule(name)
            for one in sets[name]:
                _run(Block(name, module), one)
            advance(1, name)
            with decoder.loaded(block):
                for other in done:
                    for one in sets[other]:
                        _run(block, one)
                    advance(1, name)
                done.append(name)
                for at, one in enumerate(dense):
                    _run(block, one, [sets[other][at] for other in blocks if other not in done])
                advance(1, name)
        with decoder.loaded(decoder.block(name)) if name is not None else nullcontext():

            def predicted(one: ModelPass) -> torch.Tensor:
                if one.block is not None:
                    _run(decoder.block(one.block), one)
                return predictions(one.take_output().logits, scored, packed.directory)

            expected = [predicted(one) for one in dense]
            found: dict[str, float] = {}
            for name in done:
                total = 0.0
                for window, one, theirs in zip(batches, sets[name], expected, strict=True):
                    targets = window[:, -scored:].to(where)
                    divergence = score(predicted(one), targets, theirs).kl
                    assert divergence is not None
                    total += float(divergence.sum())
                found[name] = total / (len(batches) * scored)
                advance(cost, "predictions")
    return BlockLosses(found, len(batches) * scored)


def _run(block: Block, one: ModelPass, others: Sequence[ModelPass] = ()) -> None:
    """Run `block` in the pass `one`, and advance `others`, passes that computed the same so far.

    They get the output of `block`. If it may have changed its arguments in place, it runs for each of them.
    """
    with one.loaded() as call:
        output = block.run(call)
    hidden = hidden_in(output)
    assert hidden is not None
    copies = [with_hidden(output, hidden.detach()) for _ in others]
    one.advance(output)
    for other, copied in zip(others, copies, strict=True):
        if one.plain:
            other.advance(copied)
        else:
            # The block may have changed its arguments in place.
            _run(block, other)


def _check_exchangeable(packed: Checkpoint, original: Checkpoint) -> None:
    name = read_structure(original).embedding
    if name is None or name not in packed.tensors:
        raise BlocksError(f"{packed.directory}: the original's embedding is not in its files")
    ours, theirs = (one.read(name, 0, _ROWS) for one in (packed, original))
    if ours.shape != theirs.shape or not torch.equal(ours.to(theirs.dtype), theirs):
        raise BlocksError(
            f"{packed.directory}: {name} is not the original's, so its blocks see other hidden states, as "
            "after --rotate and with --embeddings"
        )
