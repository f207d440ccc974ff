"""What a kernel is asked, and what a row of the kernel table says about itself."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: What activations may be.
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """y [m, n] = x [m, k] @ W [n, k]^T, with W packed by `scheme`, and where it is to run."""

    m: int
    n: int
    k: int
    scheme: Scheme
    dtype: torch.dtype
    device: str
    #: What the device can do, from `device_features`.
    features: frozenset[str]
    #: Name of the row whose kernel layout exists, "" for none, None where one may still be built.
    layout: str | None = None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.scheme}, M={self.m} N={self.n} K={self.k}, {dtype} on {self.device}"


#: Why not, as a sentence fragment that says how to make it so where there is a way; None for yes.
Verdict = Callable[[Problem], str | None]


def always(_: Problem) -> str | None:
    """The verdict of a row that has nothing to object."""
    return None


def one_plane(problem: Problem) -> str | None:
    """The verdict of a row whose weights are one scale times one value each."""
    planes = problem.scheme.planes
    return None if planes == 1 else f"its weights have one value each, these are sums of {planes}"


@dataclass(frozen=True)
class KernelRow:
    """One way to compute a packed linear layer.

    `supports` says why the row cannot compute a problem, `pays` why it can but a later row is faster.
    Forcing a row by name overrides `pays`, never `supports`.

    `build(weight, activation dtype)` makes the row's kernel layout from the storage layout, once per
    weight; None for a row that reads the storage layout. `launch(x [m, k], weight, layout, bias)` returns
    y [m, n] of x's dtype, for m >= 1 and contiguous x. A column scale is in x already.
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    supports: Verdict
    pays: Verdict
    build: Callable[[PackedTensor, torch.dtype], tuple[torch.Tensor, ...]] | None
    launch: Callable[
        [torch.Tensor, PackedTensor, tuple[torch.Tensor, ...], torch.Tensor | None], torch.Tensor
    ]


@lru_cache(maxsize=16)
def device_features(device: str) -> frozenset[str]:
    """Facts about a device type that rows decide by: for cpu its vector instructions."""
    if device != "cpu":
        return frozenset()
    # What torch dispatches on, as "AVX2", "AVX512" or "AVX512_VNNI"; an AVX512 machine runs AVX2 code too.
    facts = {torch.backends.cpu.get_cpu_capability().lower().split("_")[0]}
    if "avx512" in facts:
        facts.add("avx2")
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if has_onednn and torch.cpu._is_vnni_supported():
            facts.add("vnni")
    return frozenset(facts)
