"""Memory of what torch makes, counted."""

import weakref
from collections import Counter
from concurrent.futures import Future
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what torch's operations of this thread make and nobody has let go of; `most` is the largest sum
    so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._now = 0
        self._sizes: dict[int, int] = {}
        self._owners: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._hold(storage.data_ptr(), storage.nbytes())
                weakref.finalize(tensor, self._let_go, storage.data_ptr())
        self.most = max(self.most, self._now)
        return out

    def _hold(self, at: int, size: int) -> None:
        self._owners[at] += 1
        if self._owners[at] == 1:
            self._sizes[at] = size
            self._now += size

    def _let_go(self, at: int) -> None:
        self._owners[at] -= 1
        if not self._owners[at]:
            self._now -= self._sizes.pop(at)


class AtOnce:
    """Workers that do a job where it is submitted, so that `LiveBytes` sees it."""

    def __init__(self, *_: Any) -> None: ...

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done

    def map(self, function: Any, *items: Any) -> Any:
        return iter([function(*arguments) for arguments in zip(*items, strict=True)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None: ...
