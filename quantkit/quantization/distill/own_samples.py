"""Let the original model write samples: text of the kind that it was trained on, as much as is wanted.

A sample begins with a few tokens of the calibration text, and goes on with tokens drawn from the model's
predictions (LLM-QAT, arXiv 2305.17888). Of a model with a chat template, every other batch has chats: the
model writes what a user says, and the answer (Magpie, arXiv 2406.08464).
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from quantkit.model.forward.kv_size import kv_heads
from quantkit.model.forward.sampling import continued
from quantkit.quantization.distill.chat_turn import ChatTurn

#: Keys and values of a token of an 8B (Llama 3) in 16 bits.
UNKNOWN_BYTES = 1 << 17
#: Bytes of the keys and values of the samples that are written at a time, by device, and most samples: the
#: host takes as long to launch a step for one as for all.
CACHE_BYTES, MOST_SAMPLES = {"cpu": 1 << 28, "cuda": 1 << 34}, {"cpu": 64, "cuda": 2048}
#: Tokens of calibration text at the start of samples; batches take turns.
PREFIXES = (1, 4, 16, 64)
#: Tokens of what a user says; batches take turns. Models seldom end it by themselves.
QUESTIONS = (8, 16, 32)
#: Added to the seed of a batch for what users say.
ASKING = 1 << 40
#: Least probability of tokens in chats, in parts of the largest: with all, small models lose the thread.
CHAT_MIN_P = 0.05


def own_samples(
    model: Any,
    windows: torch.Tensor,
    length: int,
    seed: int,
    turn: ChatTurn | None,
    numbers: Iterable[int],
) -> Iterator[torch.Tensor]:
    """Yield the batches of these `numbers`, int64 [n, length] on the CPU.

    `windows` are calibration samples, int64 [C, T]. Batch i depends on `seed`, i, `turn` and the device.
    """
    device = next(model.parameters()).device
    at_once = at_a_time(device.type, length, row_bytes(model))
    texts = [size for size in PREFIXES if size < length]
    chats = [] if turn is None else [size for size in QUESTIONS if turn.length + size < length]
    for number in numbers:
        of_batch = seed * 1_000_003 + number
        place = number // 2 if chats else number
        if chats and number % 2 == 0:
            assert turn is not None
            min_p, size = CHAT_MIN_P, chats[place % len(chats)]
            before, after = (part.expand(at_once, -1).to(device) for part in (turn.before, turn.after))
            # Other random numbers than those of the answer.
            asked = continued(model, before, before.shape[1] + size, of_batch + ASKING, min_p)
            beginnings = torch.cat([asked, after], 1)
        else:
            min_p, size = 0.0, texts[place % len(texts)]
            beginnings = _pieces(windows, at_once, size, of_batch).to(device)
        yield continued(model, beginnings, length, of_batch, min_p).cpu()


def _pieces(windows: torch.Tensor, count: int, size: int, seed: int) -> torch.Tensor:
    """Return pieces of text, int64 [count, size], at random places of `windows`, int64 [C, T]."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(windows), (count,), generator=generator)
    starts = torch.randint(windows.shape[1] - size + 1, (count,), generator=generator)
    return windows[rows[:, None], starts[:, None] + torch.arange(size)]


def at_a_time(kind: str, length: int, row_bytes: int) -> int:
    """Return the samples of `length` tokens that are written at a time on a device of this type.

    `row_bytes` are those of the keys and values of a token.
    """
    return max(1, min(MOST_SAMPLES[kind], CACHE_BYTES[kind] // (length * row_bytes)))


def row_bytes(model: Any) -> int:
    """Return the bytes of the keys and values of a token, if all layers keep them.

    `UNKNOWN_BYTES` for a model whose config does not tell.
    """
    config = model.config.get_text_config()
    found, layers = kv_heads(config), getattr(config, "num_hidden_layers", None)
    if found is None or not layers:
        return UNKNOWN_BYTES
    itemsize: int = next(model.parameters()).element_size()
    return 2 * int(layers) * math.prod(found) * itemsize
