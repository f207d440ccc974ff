"""Divide linears into stacks, for training them and for what that takes of memory."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

#: Most latent numbers of a stack of several linears: moving more takes longer than the launches do.
STACK_WEIGHTS = 1 << 24

T = TypeVar("T")


class Stacking(Generic[T]):
    """Items that come one by one, in stacks of one key and at most `STACK_WEIGHTS`, or of one item."""

    def __init__(self) -> None:
        self._open: dict[Hashable, tuple[list[T], int]] = {}

    def add(self, item: T, key: Hashable, size: int) -> Iterator[list[T]]:
        """Add an item of `size` latent numbers, alone if `key` is None; yield the stacks that are full."""
        if key is None:
            yield [item]
            return
        stack, before = self._open.pop(key, ([], 0))
        if stack and before + size > STACK_WEIGHTS:
            yield stack
            stack, before = [], 0
        if before + size >= STACK_WEIGHTS:
            yield [*stack, item]
        else:
            self._open[key] = [*stack, item], before + size

    def close(self) -> Iterator[list[T]]:
        """Yield the stacks that are not full."""
        for stack, _ in self._open.values():
            yield stack
        self._open.clear()
