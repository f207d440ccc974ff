"""Compiled kernels are found again for what they were compiled for, and for nothing else."""

from itertools import product
from typing import Any

import pytest
import torch

from quantkit.kernels.jit.launcher import Launch, is_run_as_known

pytest.importorskip("triton")


class Kernel:
    """What `Launch` needs of a kernel of Triton's, which compiles it for what Triton specializes it by."""

    arg_names = ("x", "y", "n", "order", "SIZE")

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.ran: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            compiled = self.compiled_for(*arguments)
            self.ran = compiled, (options["order"], options["SIZE"])
            return {grid: lambda *given: self._run(compiled, given[len(arguments) :])}

        return run

    def _run(self, compiled: Any, known: tuple[Any, ...]) -> None:
        self.ran = compiled, known

    def compiled_for(self, *arguments: Any) -> Any:
        from triton._C.libtriton import native_specialize_impl

        return [native_specialize_impl(self._backend, one, False, True, True) for one in arguments]


@pytest.mark.parametrize("gpu", ["nvidia", "amd"])
def test_what_runs_is_what_triton_would_run(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends import backends

    monkeypatch.setattr(torch.version, "hip", "6.4" if gpu == "amd" else None)
    kernel = Kernel(backends[gpu].compiler)
    launch = Launch(kernel, (4,), SIZE=64, num_warps=8, order=None)
    small = torch.zeros(64, dtype=torch.float16)
    # Memory that is only asked for.
    large = torch.empty((1 << 31) + 64, dtype=torch.uint8).view(torch.float16)
    tensors = [small, small[8:], small[1:], small[:0], small.view(torch.int16), large[:8], large]
    integers = [0, 1, 2, 15, 16, 64, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40 + 1]
    every = list(product(tensors, tensors[:3], integers))
    for arguments in (*every, *every):
        launch(*arguments)
        assert kernel.ran == (kernel.compiled_for(*arguments), (None, 64)), arguments


def test_this_version_of_triton_runs_kernels_as_fixed_launches_do() -> None:
    """Without a GPU a compiled kernel is never loaded; what runs it is Triton's own code."""
    from triton.compiler import CompiledKernel

    compiled = object.__new__(CompiledKernel)
    vars(compiled).update(
        module=1, function=7, packed_metadata=(4, 1, 0), name="", src=None, metadata=None, _module_pid=None
    )
    tensors = torch.zeros(4), torch.zeros(4)
    assert is_run_as_known(compiled, (3, 1, 1), [*tensors, 4, None, "constant"])
    # Newer versions unload what was loaded.
    compiled.module = None
