"""Launches of Triton kernels without Triton's own lookup at every call."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from quantkit.kernels.compiling import COMPILERS
from quantkit.kernels.problem import device_features


class Launch:
    """A kernel with its grid and all that it knows at compile time; called with the other arguments.

    Triton looks a compiled kernel up by the text of everything that it was compiled with, at every call,
    which takes longer than most of the kernels run. Here it is looked up by what still varies: the device,
    the dtypes of tensors and whether they begin at a multiple of 16 bytes, and the kinds of integers.
    """

    #: Whether it is made also in runs that leave out launches (`compiling.compiled_first`).
    is_needed = False

    def __init__(self, kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        # Explicit, as Triton 3.10 turns the default off: a * b + c rounds once.
        self._options = {"enable_fp_fusion": True} | options
        # What a compiled kernel is called with after the other arguments, in the order of its signature.
        self._known = tuple(options[name] for name in kernel.arg_names if name in options)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        # For AMD, Triton addresses memory of less than 2 GiB in 32 bits.
        self._by_size = torch.version.hip is not None

    def __call__(self, *arguments: Any) -> None:
        """Launch on the current device; for operands on the meta device only compile."""
        first, block = arguments[0], ()
        if not isinstance(first, torch.Tensor):
            # A descriptor of blocks of a tensor.
            first, block = first.base, tuple(first.block_shape)
        if first.is_meta:
            self._compile(arguments)
            return
        key = (
            first.get_device(),
            block,
            *[
                _kind(a) if isinstance(a, int) else (a.dtype, a.data_ptr() & 15)
                for a in (first, *arguments[1:])
            ],
        )
        if self._by_size:
            key += tuple([a.untyped_storage().size() >> 31 for a in arguments if not isinstance(a, int)])
        compiled, compilers = self._compiled.get(key), COMPILERS.get()
        if compilers is not None:
            compiled = compilers.kernel(compiled, lambda: self._compile(arguments), self.is_needed)
            if compiled is None:
                return
            self._compiled[key] = compiled
        if compiled is not None:
            compiled[self._grid](*arguments, *self._known)
            return
        compiled = self._kernel[self._grid](*arguments, **self._options)
        # The interpreter compiles nothing.
        if compiled is not None:
            self._compiled[key] = compiled

    def _compile(self, arguments: tuple[Any, ...]) -> Any:
        return self._kernel.warmup(*arguments, grid=self._grid, **self._options)


class IndexLaunch(Launch):
    """A launch whose results are indices, of which others make addresses."""

    is_needed = True


def _kind(number: int) -> int:
    """What a kernel is compiled for: 1 is a constant, multiples of 16 are known as such, 64 bits a type."""
    return -1 if number == 1 else (number & 15 == 0) + 2 * (number >> 31 != 0)


def launch_features(device: torch.device) -> frozenset[str]:
    """What kernels may use on `device`: nothing where they are interpreted."""
    return device_features(device) if device.type == "cuda" else frozenset()


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which `device` is the current one, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def overlap(features: frozenset[str]) -> dict[str, bool]:
    """What lets a launch overlap the end of the kernel before it, on GPUs that can."""
    return {"PDL": True, "launch_pdl": True} if "overlap" in features else {"PDL": False}
