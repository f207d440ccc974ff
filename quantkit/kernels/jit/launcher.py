"""Launches of Triton kernels without Triton's own lookup at every call."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from quantkit.kernels.jit.compile_pool import COMPILERS
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
        first = arguments[0]
        # A descriptor of blocks of a tensor has that tensor.
        if (first if isinstance(first, torch.Tensor) else first.base).is_meta:
            self._compile(arguments)
            return
        key = self._key(arguments)
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

    def fixed(self, arguments: Sequence[Any], places: Sequence[tuple[int, int]]) -> "FixedLaunch | None":
        """The launch of such arguments, of which those at the first of `places` are addresses that vary.

        The second of a place is the number of the address. None before it was launched, and where Triton
        compiles for more than addresses being multiples of 16.
        """
        if self._by_size or not all(isinstance(one, torch.Tensor | int) for one in arguments):
            return None
        compiled = self._compiled.get(self._key(arguments))
        every = [*arguments, *self._known]
        if compiled is None or not is_run_as_known(compiled, self._grid, every):
            return None
        return FixedLaunch(compiled, self._grid, every, places)

    def _key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """What Triton compiles the kernel for: all that still varies."""
        first, block = arguments[0], ()
        if not isinstance(first, torch.Tensor):
            first, block = first.base, tuple(first.block_shape)
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
        return key

    def _compile(self, arguments: tuple[Any, ...]) -> Any:
        return self._kernel.warmup(*arguments, grid=self._grid, **self._options)


class _Recorded:
    """A compiled kernel whose `run` tells what it was called with and launches nothing."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *given: Any) -> None:
        self.calls.append(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def is_run_as_known(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> bool:
    """Whether Triton runs compiled kernels as `FixedLaunch` does, which no version of it promises.

    3.6 to 3.9 do: the grid, the stream, the function, metadata, three for hooks, the arguments.
    """
    recorded, stream = _Recorded(compiled), 1
    try:
        type(compiled).__getitem__(recorded, grid)(*arguments, stream=stream)
        expected = (*grid, stream, compiled.function, compiled.packed_metadata)
    except (AttributeError, TypeError):
        return False
    if len(recorded.calls) != 1:
        return False
    (found,) = recorded.calls
    rest = found[len(expected) + 3 :]
    return (
        found[: len(expected)] == expected
        and len(rest) == len(arguments)
        and all(one is other for one, other in zip(rest, arguments, strict=True))
    )


class FixedLaunch:
    """A compiled kernel with all its arguments but for some addresses, in one call of Triton's launcher.

    `CompiledKernel.__getitem__` asks for the device, the stream and hooks, makes a record for hooks that
    mostly are not there, and has the driver look every tensor's address up.
    """

    __slots__ = ("_arguments", "_before", "_compiled", "_grid", "_places", "_run")

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        places: Sequence[tuple[int, int]],
    ) -> None:
        # Newer versions unload a kernel that nobody has any more.
        self._compiled, self._run = compiled, compiled.run
        self._grid = grid
        # Where no hook is called, there are neither hooks nor what they would be told.
        self._before = (compiled.function, compiled.packed_metadata, None, None, None)
        # Launchers take addresses for pointers. What is not an operand stays where it is.
        self._arguments = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        self._places = tuple(places)

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on a stream of the current device; addresses are multiples of 16."""
        arguments = self._arguments.copy()
        for place, number in self._places:
            arguments[place] = addresses[number]
        self._run(*self._grid, stream, *self._before, *arguments)


def is_watched() -> bool:
    """Whether launches cannot be fixed ones: some are left out, or hooks of Triton's are told of each."""
    if COMPILERS.get() is not None:
        return True
    runtime = _knobs()
    return _has_calls(runtime.launch_enter_hook) or _has_calls(runtime.launch_exit_hook)


def _has_calls(hook: Any) -> bool:
    """Whether a hook is there; a chain of hooks may have none."""
    return bool(getattr(hook, "calls", hook))


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def stream_getter() -> Callable[[int], int]:
    """What gives the handle of the current stream of a device, by its index."""
    from triton.runtime import driver

    found: Callable[[int], int] = driver.active.get_current_stream
    return found


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
