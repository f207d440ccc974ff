"""What a kernel is asked, and what a row of the kernel table says about itself."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from quantkit.errors import KernelError
from quantkit.kernels.triton_support import BFLOAT16_SINCE, WGMMA_MAJOR, gluon_failure
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: What activations may be.
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: What kernels may use on a GPU; `ptx` is inline assembly, `overlap` launches that overlap the kernel before,
#: `wgmma` products that go on while the warps that asked for them do, `gluon` the language of Triton in which
#: warps of a program do different things.
GPU_FEATURES = frozenset({"triton", "ptx", "overlap", "wgmma", "gluon"})


@dataclass(frozen=True)
class Gpu:
    """A GPU, as far as tiles depend on it.

    Its name, compute capability, multiprocessors, and the bytes of shared memory that a program may have.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int

    def __hash__(self) -> int:
        # Part of every problem, which is hashed at every call.
        return hash(self.name)


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
    #: None on a CPU, and where only the rules are asked.
    gpu: Gpu | None = None
    #: Whether torch's `allow_fp16_accumulation` lets float16 products be summed in float16.
    half_sums: bool = False

    @classmethod
    def on(
        cls,
        device: torch.device,
        m: int,
        n: int,
        k: int,
        scheme: Scheme,
        dtype: torch.dtype,
        layout: str | None = None,
    ) -> "Problem":
        """The problem on a device of this machine, with what that device can do."""
        kind = device.type
        half_sums = (
            dtype == torch.float16 and kind == "cuda" and torch.backends.cuda.matmul.allow_fp16_accumulation
        )
        features, gpu = device_features(device), gpu_of(device)
        return cls(m, n, k, scheme, dtype, kind, features, layout, gpu, half_sums)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sums = ", float16 sums allowed" if self.half_sums else ""
        return f"{self.scheme}, M={self.m} N={self.n} K={self.k}, {dtype} on {self.device}{sums}"


#: Why not, as a sentence fragment that says how to make it so where there is a way; None for yes.
Verdict = Callable[[Problem], str | None]


def always(_: Problem) -> str | None:
    """The verdict of a row that has nothing to object."""
    return None


def one_plane(problem: Problem) -> str | None:
    """The verdict of a row whose weights are one scale times one value each."""
    planes = problem.scheme.planes
    return None if planes == 1 else f"its weights have one value each, these are sums of {planes}"


#: The tensors of a weight in a kernel layout.
LayoutTensors = tuple[torch.Tensor, ...]


def never_normed(_: "Problem", __: Any, ___: str) -> str | None:
    """The `KernelRow.no_norm` of a row that has nothing to do with norms."""
    return "it takes x, and gives y, as it is"


def unjoinable(*_: object) -> None:
    """The `Layout.join` of a layout that does not join."""
    return None


def never_gated(_: "Problem", __: Any) -> str | None:
    """The `KernelRow.no_gate` of a row that gives y as it is."""
    return "it gives y as it is"


@dataclass(frozen=True)
class Layout:
    """How kernels want a weight, where that is not how it is stored; several rows may share one.

    `build(weight, activation dtype)` makes its tensors from the storage layout, once per weight.
    `join(weights, their rows, scheme, K, activation dtype)` puts weights of one scheme and K one above the
    other: the tensors of the whole, and of each weight as views of them; None where these cannot be joined.
    `restore(tensors, scheme, [N, K], scale)` gives back the words that a weight with this part had; without
    it they are kept.
    """

    name: str
    build: Callable[[PackedTensor, torch.dtype], LayoutTensors]
    join: Callable[
        [Sequence[LayoutTensors], Sequence[int], Scheme, int, torch.dtype],
        tuple[LayoutTensors, tuple[LayoutTensors, ...]] | None,
    ] = unjoinable
    restore: Callable[[LayoutTensors, Scheme, tuple[int, int], torch.Tensor], torch.Tensor] | None = None
    #: Rows of x up to which a row of the kernel table runs joined weights.
    most_rows: int = sys.maxsize

    @property
    def whole(self) -> bool:
        """Whether rows need nothing of a weight but its layout and `Outline`."""
        return self.join is not unjoinable


@dataclass(frozen=True)
class Outline:
    """What rows see of a weight whose layout has everything else: the scheme and the shape [N, K]."""

    scheme: Scheme
    shape: tuple[int, int]


def as_measured(problem: "Problem", tile: Any, measured: "Problem") -> Any:
    """The tile as it is, of kernels that know no better."""
    return tile


@dataclass(frozen=True)
class Tiling:
    """The tiles that a row may be launched with: frozen records of the class `record`.

    `values` is what each field may be, `rule(problem)` the tile where none was measured. `why_not(problem,
    tile)` says why the kernel cannot take a tile, `loses(problem, tile)` why it is not worth measuring.
    `fitted(problem, tile, measured)` is the tile where `tile` was measured fastest for more rows of x.
    """

    record: type[Any]
    values: Mapping[str, tuple[int, ...]]
    rule: Callable[[Problem], Any]
    why_not: Callable[[Problem, Any], str | None]
    loses: Callable[[Problem, Any], str | None]
    fitted: Callable[[Problem, Any, Problem], Any] = as_measured


@dataclass(frozen=True)
class Normed:
    """What a product does of a norm (`quantkit.kernels.ops.glue.norm`), which is one of three parts:

        whole   it multiplies with the norm of x, or of x + `other`, which becomes `total` [m, k]
        begin   y + `other` becomes `total` [m, n], and that times `weight` y; `squares` become the sums of
                squares of each 16 columns of `total`, float32 [m, n / 16 rounded up]
        end     x was begun so: rows of y are divided by the roots of the means that `squares` are sums for,
                and `eps`

    The tensors of a part are contiguous and, but for `squares`, of the dtype of x. Norms are ended alike
    whatever their `kind`, and begun whatever their `eps`.
    """

    part: str
    kind: str = "llama"
    eps: float = 0.0
    weight: torch.Tensor | None = None
    other: torch.Tensor | None = None
    total: torch.Tensor | None = None
    squares: torch.Tensor | None = None


class TileError(KernelError):
    """A GPU has too little shared memory, or too few registers or threads, for a tile."""


def tile_text(tile: Any) -> str:
    """A tile as its fields: `warps=4 columns=512 row_tiles=1 ahead=False`."""
    return " ".join(f"{field.name}={getattr(tile, field.name)}" for field in fields(tile))


@dataclass(frozen=True)
class KernelRow:
    """One way to compute a packed linear layer.

    `supports` says why the row cannot compute a problem, `pays` why it can but a later row is faster.
    Forcing a row by name overrides `pays`, never `supports`.

    `layout` is None for a row that reads the storage layout. `launch(x [m, k], weight, layout, bias)` returns
    y [m, n] of x's dtype, for m >= 1 and contiguous x; with a `tiling` it takes a `tile` too. A column scale
    is in x already. Where the layout is `whole`, `weight` is only the `Outline`.

    `bind`, where a row has it, takes what `launch` takes and returns what computes y for other x of that
    shape: `quantkit.kernels.gemm.bound.Bound`.

    `no_norm(problem, tile, part)` says why the kernel cannot do a part of a norm. Where it can, `launch`
    takes such a `normed`. `no_gate(problem, tile)` says so of a gate: the first half of columns of y is what
    gates the others, and `launch` with the kind of a `gate` returns [m, n / 2]:
    `quantkit.kernels.ops.glue.gate`.
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    supports: Verdict
    pays: Verdict
    layout: Layout | None
    launch: Callable[..., torch.Tensor]
    tiling: Tiling | None = None
    no_norm: Callable[[Problem, Any, str], str | None] = never_normed
    no_gate: Callable[[Problem, Any], str | None] = never_gated
    bind: Callable[..., Any] | None = None


@lru_cache(maxsize=64)
def device_features(device: torch.device | str) -> frozenset[str]:
    """What a device can do, as far as rows decide by it: vector instructions, what kernels may use.

    "cuda" is the GPU that is the current one when that is first asked.
    """
    device = torch.device(device)
    return _cpu_features() if device.type == "cpu" else _gpu_features(device)


@lru_cache(maxsize=64)
def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU that `device` is, the current one where it says no index; None for a CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    # What a program may have if it asks for it; not every build of torch says.
    shared = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)
    return Gpu(facts.name, (facts.major, facts.minor), facts.multi_processor_count, int(shared))


def _gpu_features(device: torch.device) -> frozenset[str]:
    """Those of `GPU_FEATURES` that a GPU has."""
    if importlib.util.find_spec("triton") is None:
        return frozenset()
    facts = {"triton"}
    if device.type == "cuda" and torch.version.cuda is not None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        # Dependent launches came with 9.0.
        facts |= {
            fact for fact, since in (("ptx", BFLOAT16_SINCE), ("overlap", (9, 0))) if capability >= since
        }
        facts |= {"wgmma"} if capability[0] == WGMMA_MAJOR else set()
        facts |= {"gluon"} if "ptx" in facts and gluon_failure(device) is None else set()
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
