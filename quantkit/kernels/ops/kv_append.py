"""Keys and values of a prompt to the memory of a cache, in one launch for all layers."""

from functools import lru_cache
from typing import Any

import torch

from quantkit.kernels.jit.launcher import Launch, launching_on
from quantkit.kernels.layouts.shared_memory import power_of_two

#: Bytes of a word that is copied, whatever numbers are in it.
WORD = 8
#: Tokens of a program.
TOKENS = 32


def slow_fill(rooms: list[torch.Tensor], states: list[torch.Tensor], clear: bool) -> None:
    """The twin of `fill`."""
    if clear:
        torch._foreach_zero_(rooms)
    tokens = states[0].shape[2]
    torch._foreach_copy_([room[:, :, :tokens] for room in rooms], states)


def fill(rooms: list[torch.Tensor], states: list[torch.Tensor], clear: bool) -> None:
    """Write `states` [B, H, T, D] to the first tokens of `rooms` [B, H, L, D]; others become 0 if `clear`.

    Each pair is of one dtype and device, and all have as many tokens. One launch for all rooms of a shape;
    what is not of whole words that lie together is for `slow_fill`. The host does not wait for the GPU.
    """
    launches: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for room, part in zip(rooms, states, strict=True):
        batch, heads, length, size = room.shape
        key = room.device, batch, heads, length, size * room.itemsize
        (launches.setdefault(key, []) if _is_of_words(room, part) else others).append((room, part))
    for (device, batch, heads, length, row), pairs in launches.items():
        tokens = pairs[0][1].shape[2]
        end = length if clear else tokens
        launch = _launch(len(pairs), batch * heads, -(-end // TOKENS), row // WORD)
        entries = [_entry(room, part) for room, part in pairs]
        # From pinned memory, as the host would wait until other memory is read.
        table = torch.tensor(entries, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        with launching_on(device):
            launch(table, tokens, length, end, heads)
    if others:
        slow_fill([room for room, _ in others], [part for _, part in others], clear)


def _is_of_words(room: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether `room` is contiguous, and rows of both are whole words."""
    lies = room.data_ptr(), states.data_ptr(), *(states.itemsize * stride for stride in states.stride()[:3])
    row = states.shape[3] * states.itemsize
    return room.is_contiguous() and states.stride(3) == 1 and not any(at % WORD for at in (row, *lies))


def _entry(room: torch.Tensor, states: torch.Tensor) -> tuple[int, ...]:
    strides = (stride * states.itemsize // WORD for stride in states.stride()[:3])
    return room.data_ptr(), states.data_ptr(), *strides


@lru_cache(maxsize=256)
def _launch(tensors: int, heads: int, parts: int, words: int) -> Launch:
    from quantkit.kernels.ops.kv_append_kernel import fill

    return Launch(fill, (tensors, heads, parts), W=words, WP=power_of_two(words), BT=TOKENS, num_warps=4)
