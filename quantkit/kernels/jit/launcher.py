"""Launch Triton kernels without Triton's own lookup of the compiled kernel at every call."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from quantkit.kernels.jit.compile_pool import COMPILERS
from quantkit.kernels.problem import device_features


class Launch:
    """Triton kernel with its grid and constexprs; a call with the remaining arguments launches it.

    At every call, Triton looks up a compiled kernel by the text of everything it was compiled with. That
    takes longer than most kernels run. The key of this class has only the device, dtypes of tensors, 16-byte
    alignment, and kinds of integers.
    """

    #: True to launch it even in runs that skip launches (`compile_pool.compiled_first`).
    is_needed = False

    def __init__(self, kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        # Set explicitly: Triton 3.10 changes the default. a * b + c rounds once.
        self._options = {"enable_fp_fusion": True} | options
        # Constexprs that follow the other arguments, in the order of the signature.
        self._known = tuple(options[name] for name in kernel.arg_names if name in options)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        # On AMD, Triton addresses tensors below 2 GiB with 32 bits.
        self._by_size = torch.version.hip is not None

    def __call__(self, *arguments: Any) -> None:
        """Launch on the current device; if operands are on the meta device, only compile."""
        first = arguments[0]
        # A tensor descriptor has its tensor as `base`.
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

    def fixed(self, arguments: Sequence[Any], indices: Sequence[tuple[int, int]]) -> "FixedLaunch | None":
        """Return a `FixedLaunch` of these arguments, whose calls pass only the addresses of some tensors.

        `indices` has a pair for each such tensor: (index in `arguments`, index in the addresses of a call).
        Returns None if the kernel was not launched yet, if an argument is neither tensor nor int, or on AMD.
        None is also returned if the installed Triton runs kernels in another way (`is_run_as_known`).
        """
        if self._by_size or not all(isinstance(one, torch.Tensor | int) for one in arguments):
            return None
        compiled = self._compiled.get(self._key(arguments))
        every = [*arguments, *self._known]
        if compiled is None or not is_run_as_known(compiled, self._grid, every):
            return None
        return FixedLaunch(compiled, self._grid, every, indices)

    def _key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the key of the compiled kernel: device, dtypes, 16-byte alignment and kinds of integers."""
        first = arguments[0]
        key: tuple[Any, ...] = (
            (first if isinstance(first, torch.Tensor) else first.base).get_device(),
            *[
                _kind(a)
                if isinstance(a, int)
                else (a.dtype, a.data_ptr() & 15)
                if isinstance(a, torch.Tensor)
                else (a.base.dtype, a.base.data_ptr() & 15, *a.block_shape)
                for a in arguments
            ],
        )
        if self._by_size:
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            key += tuple([one.untyped_storage().size() >> 31 for one in tensors])
        return key

    def _compile(self, arguments: tuple[Any, ...]) -> Any:
        """Compile the kernel for these arguments without launching it.

        Returns the kernel, or a future of it while kernels are compiled in parallel (`compile_pool`).
        """
        return self._kernel.warmup(*arguments, grid=self._grid, **self._options)


class _Recorded:
    """Stand-in for Triton's compiled kernel: its `run` records the arguments and launches nothing."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *given: Any) -> None:
        self.calls.append(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def is_run_as_known(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> bool:
    """Return True if the installed Triton calls `compiled.run` with the arguments that `FixedLaunch` passes.

    The arguments of `run` are no public interface. In Triton 3.6 to 3.9 they are: grid, stream, function,
    metadata, three values for hooks, and then `arguments`, those of the kernel. `grid` has three sizes.
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
    """Compiled kernel with all arguments fixed, except the addresses of some tensors, which each call passes.

    A call skips the work of `CompiledKernel.__getitem__`: querying device, stream and hooks, recording for
    hooks, and looking up each tensor's address in the driver.
    """

    __slots__ = ("_arguments", "_before", "_compiled", "_grid", "_indices", "_run")

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        indices: Sequence[tuple[int, int]],
    ) -> None:
        # Newer versions of Triton unload a kernel without references.
        self._compiled, self._run = compiled, compiled.run
        self._grid = grid
        # Without hooks, their three values are None.
        self._before = (compiled.function, compiled.packed_metadata, None, None, None)
        # Launchers take addresses for pointers. Tensors without an open address stay where they are.
        self._arguments = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        self._indices = tuple(indices)

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on `stream`, a handle of a stream of the current device, with these addresses of tensors.

        Their order is that of the `indices` given to `Launch.fixed`. Addresses are multiples of 16.
        """
        arguments = self._arguments.copy()
        for argument, address in self._indices:
            arguments[argument] = addresses[address]
        self._run(*self._grid, stream, *self._before, *arguments)


def is_watched() -> bool:
    """Return True if launches may now be skipped (`compile_pool`), or if Triton's launch hooks call anything.

    A `FixedLaunch` bypasses both, so it must not be used then.
    """
    if COMPILERS.get() is not None:
        return True
    runtime = _knobs()
    return _has_calls(runtime.launch_enter_hook) or _has_calls(runtime.launch_exit_hook)


def _has_calls(hook: Any) -> bool:
    """Return True if the launch hook `hook` of Triton calls anything; a chain of hooks may be empty."""
    return bool(getattr(hook, "calls", hook))


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def stream_getter() -> Callable[[int], int]:
    """Return the function that maps a device index to the handle of its current stream."""
    from triton.runtime import driver

    found: Callable[[int], int] = driver.active.get_current_stream
    return found


class IndexLaunch(Launch):
    """Launch that is never skipped, even in runs that only find kernels to compile.

    Its results are indices from which later kernels compute addresses, so they must not be undefined.
    """

    is_needed = True


def _kind(number: int) -> int:
    """Return a number for the property of an integer that Triton specializes kernels for.

    The properties are: equal to 1, a multiple of 16, more than 31 bits.
    """
    return -1 if number == 1 else (number & 15 == 0) + 2 * (number >> 31 != 0)


def launch_features(device: torch.device) -> frozenset[str]:
    """Return the features of `device` that kernels may use, such as PTX; none in Triton's interpreter."""
    return device_features(device) if device.type == "cuda" else frozenset()


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager: make `device` current, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def overlap(features: frozenset[str]) -> dict[str, bool]:
    """Return the options that launch a kernel with PDL (programmatic dependent launch), if the GPU has it.

    `features` are those of the device (`device_features`).
    """
    return {"PDL": True, "launch_pdl": True} if "overlap" in features else {"PDL": False}
