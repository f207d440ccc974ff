"""Triton's mode in which kernels are compiled side by side, each in a process that compiles nothing else."""

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from inspect import getclosurevars
from typing import Any

from triton import AsyncCompileMode, knobs
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from quantkit.kernels.jit.compile_worker import Request, compile_elsewhere


class SideBySide(AsyncCompileMode):  # type: ignore[misc]
    """A kernel that is in Triton's cache on the disk is one at once; any other is compiled meanwhile."""

    def submit(self, key: str, compile_kernel: Callable[[], Any], finish: Callable[[Any], None]) -> Any:
        request = _request(compile_kernel)
        if key not in self.future_kernels and request is not None and _is_on_disk(key, request.name):
            kernel = compile_kernel()
            finish(kernel)
            return kernel
        return super().submit(key, partial(_compiled, request, compile_kernel), finish)


def _compiled(request: Request | None, compile_kernel: Callable[[], Any]) -> Any:
    """The kernel, and in Triton's cache what launches it: C."""
    if request is not None and request.module.startswith("quantkit.kernels."):
        compile_elsewhere(request)
    # Which reads what has been compiled, and else compiles.
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _request(compile_kernel: Callable[[], Any]) -> Request | None:
    """What Triton is going to compile.

    None where it does not say so as it did, does not take it from its cache, or asks this process about it.
    """
    known = getclosurevars(compile_kernel).nonlocals
    is_told = {"src", "target", "options"} <= set(known)
    if not is_told or knobs.compilation.always_compile or knobs.runtime.add_stages_inspection_hook:
        return None
    source = known["src"]
    return Request(
        source.fn.module,
        source.fn.__name__,
        type(source),
        source.signature,
        source.constants,
        source.attrs,
        known["target"],
        vars(known["options"]),
        knobs.cache.dir,
    )


def _is_on_disk(key: str, name: str) -> bool:
    """Whether Triton's cache has all files of a compiled kernel, which it names so."""
    file = f"{name[:150]}.json"
    return file in (get_cache_manager(sha256(key.encode()).hexdigest()).get_group(file) or {})
