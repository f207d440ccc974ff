"""Triton's asynchronous compile mode, changed to compile each kernel in a process of its own."""

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
    """Compile mode of Triton: load kernels in its cache on disk at once, and compile others in parallel."""

    def submit(
        self,
        key: str,
        compile_kernel: Callable[[], Any],
        finish: Callable[[Any], None],
        *clean_up: Callable[[Any], None],
    ) -> Any:
        """Return the kernel of `key` if Triton's cache on disk has it, else a future of the kernel.

        Triton calls this method:

            key               key of the kernel in Triton's cache
            compile_kernel    compiles the kernel, or loads it from the cache
            finish            is called with the kernel once there is one
            clean_up          from Triton 3.9 on, one function that discards a future that failed
        """
        request = _request(compile_kernel)
        if key not in self.future_kernels and request is not None and _is_on_disk(key, request.name):
            kernel = compile_kernel()
            finish(kernel)
            return kernel
        return super().submit(key, partial(_compiled, request, compile_kernel), finish, *clean_up)


def _compiled(request: Request | None, compile_kernel: Callable[[], Any]) -> Any:
    """Compile a quantkit kernel in another process, then load it and its launcher (C code) here.

    If `request` is None or the other process fails, `compile_kernel` compiles here.
    """
    if request is not None and request.module.startswith("quantkit.kernels."):
        compile_elsewhere(request)
    # Loads the compiled kernel from the cache, or compiles it.
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _request(compile_kernel: Callable[[], Any]) -> Request | None:
    """Return a `Request` of what Triton is about to compile with `compile_kernel`.

    Returns None if this Triton version hides the arguments of the compiler or is set to ignore its cache.
    None is also returned if a hook must be called in this process.
    """
    closure = getclosurevars(compile_kernel).nonlocals
    is_told = {"src", "target", "options"} <= set(closure)
    if not is_told or knobs.compilation.always_compile or knobs.runtime.add_stages_inspection_hook:
        return None
    source = closure["src"]
    return Request(
        source.fn.module,
        source.fn.__name__,
        type(source),
        source.signature,
        source.constants,
        source.attrs,
        closure["target"],
        vars(closure["options"]),
        knobs.cache.dir,
    )


def _is_on_disk(key: str, name: str) -> bool:
    """Return True if Triton's cache on disk has all files of the compiled kernel `name` with this key."""
    file = f"{name[:150]}.json"
    return file in (get_cache_manager(sha256(key.encode()).hexdigest()).get_group(file) or {})
