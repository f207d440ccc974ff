"""Let the original model write samples: text of the kind that it was trained on, as much as is wanted.

A sample begins with a few tokens of the calibration text, and goes on with tokens drawn from the model's
predictions (LLM-QAT, arXiv 2305.17888). Of a model with a chat template two batches of three have chats, in
which it writes what a user says too (Magpie, arXiv 2406.08464). Batches take turns:

    0  the first words of a question, which the model ends and answers
    1  text
    2  what a user says, ended after some tokens, and the answer
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quantkit.memory import free_memory
from quantkit.model.forward.kv_size import kv_heads
from quantkit.model.forward.repetition import repeated_runs
from quantkit.model.forward.sampling import continued
from quantkit.quantization.distill.chat_turn import ChatTurn

#: Keys and values of a token of an 8B (Llama 3) in 16 bits.
UNKNOWN_BYTES = 1 << 17
#: Vocabulary of a model whose config does not tell.
UNKNOWN_WORDS = 1 << 18
#: Part of a GPU's memory for the samples that are written at a time, bytes of it on a CPU, and most samples:
#: the host takes as long to launch a step for one as for all.
MEMORY_PART, HOST_BYTES = 1 / 4, 1 << 28
MOST_SAMPLES = {"cpu": 64, "cuda": 4096}
#: Caches of keys and values at a time, and the tokens of which their length is a multiple. On a GPU a
#: generation has one, and the two graphs of decoding steps own one each.
CACHES = {"cpu": (1, 1), "cuda": (3, 256)}
#: Bytes for each word of the vocabulary of a sample: its logits, their probabilities and random numbers.
WORD_BYTES = 16
#: Part of the free memory that may be used.
MOST_OF_FREE = 0.75
#: Tokens of calibration text at the start of samples; batches take turns.
PREFIXES = (1, 4, 16, 64)
#: Tokens of what a user says; batches take turns. Models seldom end it by themselves if it is no question.
QUESTIONS = (8, 16, 32)
#: Added to the seed of a batch for what users say.
ASKING = 1 << 40
#: Least probability of tokens in chats, in parts of the largest: with all, small models lose the thread.
CHAT_MIN_P = 0.05
#: Largest part of the runs of tokens in the second half of a sample that this had before: a loop, once begun,
#: seldom ends. In 128 and 256 tokens of code, lists of links and other real text it is up to 0.78.
MOST_REPEATED = 0.8


def own_samples(
    model: Any,
    windows: torch.Tensor,
    length: int,
    seed: int,
    turn: ChatTurn | None,
    numbers: Iterable[int],
    most: int,
) -> Iterator[torch.Tensor]:
    """Yield the batches of these `numbers`, int64 [n, length] on the CPU.

    `windows` are calibration samples, int64 [C, T]. A batch has at most `most` / (number of kinds) samples.
    Batch i depends on `seed`, i, `turn`, `most`, the device and its memory.
    """
    device = next(model.parameters()).device
    fitting = _room(device) // sample_bytes(model, length, device.type)
    kinds = [one for one in _kinds(model, windows, length, turn) if one.beginnings]
    # Few samples are of all kinds too.
    at_once = max(1, min(-(-most // len(kinds)), MOST_SAMPLES[device.type], fitting))
    for number in numbers:
        place, at = divmod(number, len(kinds))
        kind, of_batch = kinds[at], seed * 1_000_003 + number
        beginnings = kind.beginnings[place % len(kind.beginnings)](at_once, of_batch).to(device)
        yield continued(model, beginnings, length, of_batch, kind.min_p).cpu()


def without_loops(samples: torch.Tensor) -> torch.Tensor:
    """Return the rows of `samples`, int64 [n, T], that do not end in a loop, by `MOST_REPEATED`."""
    counts = map(repeated_runs, samples[:, samples.shape[1] // 2 :].tolist())
    return samples[torch.tensor([repeated <= MOST_REPEATED * runs for repeated, runs in counts]).bool()]


@dataclass(frozen=True)
class _Kind:
    """A kind of samples.

    beginnings  functions of a number of samples and a seed that return their first tokens, int64 [n, T]
    min_p       least probability of a token that is drawn, in parts of the largest
    """

    beginnings: Sequence[Callable[[int, int], torch.Tensor]]
    min_p: float


def _kinds(model: Any, windows: torch.Tensor, length: int, turn: ChatTurn | None) -> Iterator[_Kind]:
    """Yield the kinds of samples in the order of their batches.

    `windows` are calibration samples, int64 [C, T]. A kind has no beginnings if `length` has no room for any.
    """
    if turn is not None:
        yield _Kind([partial(_drawn, rows) for rows in turn.openings if rows.shape[1] < length], CHAT_MIN_P)
    yield _Kind([partial(_pieces, windows, size) for size in PREFIXES if size < length], 0.0)
    if turn is not None:
        asked = [partial(_asked, model, turn, size) for size in QUESTIONS if turn.length + size < length]
        yield _Kind(asked, CHAT_MIN_P)


def _drawn(rows: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Return `count` rows of `rows` [n, T], drawn at random."""
    return rows[torch.randint(len(rows), (count,), generator=torch.Generator().manual_seed(seed))]


def _asked(model: Any, turn: ChatTurn, size: int, count: int, seed: int) -> torch.Tensor:
    """Return chats up to the answer, int64 [count, T]: `model` writes `size` tokens of what a user says."""
    device = next(model.parameters()).device
    before, after = (part.expand(count, -1).to(device) for part in (turn.before, turn.after))
    # Other random numbers than those of the answer.
    asked = continued(model, before, before.shape[1] + size, seed + ASKING, CHAT_MIN_P)
    return torch.cat([asked, after], 1)


def _pieces(windows: torch.Tensor, size: int, count: int, seed: int) -> torch.Tensor:
    """Return tokens of texts, int64 [count, size], from random places of `windows`, int64 [C, T]."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(windows), (count,), generator=generator)
    starts = torch.randint(windows.shape[1] - size + 1, (count,), generator=generator)
    return windows[rows[:, None], starts[:, None] + torch.arange(size)]


def sample_bytes(model: Any, length: int, device: str) -> int:
    """Return the bytes that a sample of `length` tokens takes while a `device` such as "cuda" writes it."""
    caches, multiple = CACHES[device]
    tokens = caches * -(-length // multiple) * multiple
    words = getattr(model.config.get_text_config(), "vocab_size", UNKNOWN_WORDS)
    return tokens * row_bytes(model) + WORD_BYTES * int(words)


def _room(device: torch.device) -> int:
    """Return the bytes for samples on `device`: on a GPU `MEMORY_PART` of all, halved until they are free.

    The number of samples, and so what they say, seldom depends on what else runs there.
    """
    if device.type == "cpu":
        return HOST_BYTES
    room = int(torch.cuda.get_device_properties(device).total_memory * MEMORY_PART)
    while room > free_memory(device) * MOST_OF_FREE:
        room //= 2
    return room


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
