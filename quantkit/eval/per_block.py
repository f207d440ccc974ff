"""What each block of a packed model costs on its own: the divergence of the original with that block in it.

The original's blocks take their weights in turn. Where each is, the packed one gives one more set of hidden
states beside the original's, and all sets go on through the blocks that follow. For L blocks this takes about
as long as L / 2 passes of the model.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quantkit.checkpoint.source import Checkpoint
from quantkit.devices import pick_device
from quantkit.errors import CheckpointError
from quantkit.eval.metrics import score
from quantkit.eval.runner import predictions
from quantkit.model.blocks import Block, Decoder
from quantkit.model.hidden_states import Home
from quantkit.model.structure import read_structure
from quantkit.progress import Progress, counting
from quantkit.runtime.load import load

#: Windows of the first text that are run. Hidden states of each wait on the host once for every block.
WINDOWS = 2
#: Rows of the embedding that tell whether it is the original's.
_ROWS = 64


@dataclass(frozen=True)
class BlockLosses:
    """By block, in the order they run: KL divergence in nats per token, the mean over `tokens`."""

    kl_mean: Mapping[str, float]
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def block_losses(
    packed: Checkpoint,
    original: Checkpoint,
    tokens: torch.Tensor,
    scored: int,
    dtype: torch.dtype,
    device: str,
    progress: Progress | None = None,
) -> BlockLosses:
    """Run `original` on windows (int64 [n, W]) with each block of `packed` in turn in place of its own.

    The divergence is that of the last `scored` tokens of each window. All of `packed` is in memory, of
    `original` one block. `CheckpointError` where the blocks of the two cannot stand for each other: for a
    rotated model, and for one whose decoder is no list of blocks.
    """
    _check_exchangeable(packed, original)
    where = pick_device(device)
    decoder, model = Decoder(original, where, dtype), load(packed.directory, device=device, dtype=dtype)
    home = Home(torch.device("cpu"), where.type == "cuda")
    batches = [tokens[at : at + 1] for at in range(len(tokens))]
    hidden, blocks = decoder.embed(batches, home)
    # The original's hidden states of every window, then those with a block packed, one set for each so far.
    sets = [hidden]
    advance = counting(len(blocks) * (len(blocks) + 5) // 2, progress)

    def after(block: Block, states: list[torch.Tensor]) -> list[torch.Tensor]:
        found = [home.store(block.run(one.to(where))) for one in states]
        advance(1, block.name)
        return found

    with torch.no_grad():
        for block in blocks:
            module: Any = model.get_submodule(block.name)
            ours = after(Block(block.name, module, block.arguments), sets[0])
            with decoder.loaded(block):
                sets = [after(block, states) for states in sets]
            sets.append(ours)
        found: dict[str, float] = {}
        with decoder.head() as logits:

            def predicted(states: torch.Tensor) -> torch.Tensor:
                return predictions(logits(states.to(where)), scored, packed.directory)

            expected = [predicted(one) for one in sets[0]]
            for block, states in zip(blocks, sets[1:], strict=True):
                total = 0.0
                for window, one, theirs in zip(batches, states, expected, strict=True):
                    targets = window[:, -scored:].to(where)
                    divergence = score(predicted(one), targets, theirs).kl
                    assert divergence is not None
                    total += float(divergence.sum())
                found[block.name] = total / (len(batches) * scored)
                advance(1, "predictions")
    return BlockLosses(found, len(batches) * scored)


def _check_exchangeable(packed: Checkpoint, original: Checkpoint) -> None:
    name = read_structure(original).embedding
    if name is None or name not in packed.tensors:
        raise CheckpointError(f"{packed.directory}: the original's embedding is not in its files")
    ours, theirs = (one.read(name, 0, _ROWS) for one in (packed, original))
    if ours.shape != theirs.shape or not torch.equal(ours.to(theirs.dtype), theirs):
        raise CheckpointError(
            f"{packed.directory}: {name} is not the original's, so its blocks see other hidden states, as "
            "after --rotate"
        )
