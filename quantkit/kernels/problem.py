"""What a kernel is asked, and what a row of the kernel table says about itself."""

import importlib.util
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
    #: Name of the kernel layout that exists, "" for none, None where one may still be built.
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
class Layout:
    """How kernels want a weight, where that is not how it is stored; several rows may share one.

    `build(weight, activation dtype)` makes its tensors from the storage layout, once per weight.
    """

    name: str
    build: Callable[[PackedTensor, torch.dtype], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class KernelRow:
    """One way to compute a packed linear layer.

    `supports` says why the row cannot compute a problem, `pays` why it can but a later row is faster.
    Forcing a row by name overrides `pays`, never `supports`.

    `layout` is None for a row that reads the storage layout. `launch(x [m, k], weight, layout, bias)` returns
    y [m, n] of x's dtype, for m >= 1 and contiguous x. A column scale is in x already.
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    supports: Verdict
    pays: Verdict
    layout: Layout | None
    launch: Callable[
        [torch.Tensor, PackedTensor, tuple[torch.Tensor, ...], torch.Tensor | None], torch.Tensor
    ]


@lru_cache(maxsize=16)
def device_features(device: str) -> frozenset[str]:
    """What a device type can do, as far as rows decide by it: vector instructions, what kernels may use."""
    return _cpu_features() if device == "cpu" else _gpu_features()


def _gpu_features() -> frozenset[str]:
    """`triton`; `ptx`, inline assembly; `overlap`, launches that overlap the kernel before them."""
    if importlib.util.find_spec("triton") is None:
        return frozenset()
    facts = {"triton"}
    if torch.version.cuda is not None and torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability()
        # bfloat16 arithmetic came with 8.0, dependent launches with 9.0.
        facts |= {fact for fact, since in (("ptx", 8), ("overlap", 9)) if major >= since}
    return frozenset(facts)


def _cpu_features() -> frozenset[str]:
    # What torch dispatches on, as "AVX2", "AVX512" or "AVX512_VNNI"; an AVX512 machine runs AVX2 code too.
    facts = {torch.backends.cpu.get_cpu_capability().lower().split("_")[0]}
    if "avx512" in facts:
        facts.add("avx2")
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if has_onednn and torch.cpu._is_vnni_supported():
            facts.add("vnni")
    return frozenset(facts)
