"""Records for kernels: `Problem`, a product y = x W^T to compute, and `Kernel`, a way to compute it."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

import torch

from quantkit.errors import KernelError
from quantkit.kernels.library_gemm import multiplies_blocks
from quantkit.kernels.triton_support import BFLOAT16_SINCE, WGMMA_MAJOR, gluon_failure
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: Dtypes of activations.
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: GPU features that kernels use: `ptx` is inline assembly, `overlap` is PDL, `wgmma` the asynchronous MMA of
#: warpgroups, `gluon` Triton's language for explicit layouts and warp specialization, and `scaled_mm` torch's
#: product of e4m3 matrices with scales of 128x128 blocks.
GPU_FEATURES = frozenset({"triton", "ptx", "overlap", "wgmma", "gluon", "scaled_mm"})


@dataclass(frozen=True)
class Gpu:
    """GPU properties on which tiles depend.

    capability        compute capability, (major, minor)
    multiprocessors   number of multiprocessors
    shared_memory     bytes of shared memory that a program may use
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int

    def __hash__(self) -> int:
        # A fast hash: it is part of every problem, and problems are hashed at every call.
        return hash(self.name)


@dataclass(frozen=True)
class Problem:
    """Product y [m, n] = x [m, k] @ W [n, k]^T that a kernel is to compute, with W packed by `scheme`.

    dtype               dtype of x and y
    device              type of the device, "cpu" or "cuda"
    features            features of the device, from `device_features`
    layout              name of the kernel layout in which W exists; "" for none, None if one may still be
                        built
    gpu                 the GPU whose tile tables are read; None on a CPU, or to read none
    fp16_accumulation   True if torch's `allow_fp16_accumulation` permits float16 sums of float16 products
    activations         how x is rounded to 8 bits; None for no rounding
    """

    m: int
    n: int
    k: int
    scheme: Scheme
    dtype: torch.dtype
    device: str
    features: frozenset[str]
    layout: str | None = None
    gpu: Gpu | None = None
    fp16_accumulation: bool = False
    activations: ActivationScheme | None = None

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
        """Return the problem y [m, n] = x [m, k] W^T on a device of this machine, with its features.

        `scheme` is the scheme of W, and may say how x, of `dtype`, is rounded. `layout` is the name of the
        kernel layout of W: "" for none, None if one may still be built.
        """
        kind = device.type
        fp16_accumulation = (
            dtype == torch.float16 and kind == "cuda" and torch.backends.cuda.matmul.allow_fp16_accumulation
        )
        features, gpu = device_features(device), gpu_of(device)
        rounding, weights = scheme.activations, scheme.of_weights
        if kind == "cuda" and rounding is not None and weights.group_rows > 1 and multiplies_blocks(device):
            features |= {"scaled_mm"}
        # Kernels do not depend on a stored number.
        rounding = rounding and rounding.unbound
        return cls(m, n, k, weights, dtype, kind, features, layout, gpu, fp16_accumulation, rounding)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sums = ", float16 sums allowed" if self.fp16_accumulation else ""
        rounded = "" if self.activations is None else f", x {self.activations}"
        return f"{self.scheme}{rounded}, M={self.m} N={self.n} K={self.k}, {dtype} on {self.device}{sums}"


#: Returns a reason against, as part of a sentence, with a remedy if there is one; None means yes.
Verdict = Callable[[Problem], str | None]


def always(_: Problem) -> str | None:
    """Return None, no reason against: `Kernel.why_unsupported` of a kernel that supports every problem."""
    return None


def one_plane(problem: Problem) -> str | None:
    """Return why a kernel for schemes with one plane cannot run a problem; None if it can.

    In a scheme with several planes, each weight is the sum of one value per plane.
    """
    planes = problem.scheme.planes
    return None if planes == 1 else f"its weights have one value each, these are sums of {planes}"


#: Tensors of a weight in a kernel layout.
LayoutTensors = tuple[torch.Tensor, ...]


def never_normed(_: "Problem", __: Any, ___: str) -> str | None:
    """Return why a kernel computes no RMSNorm: the default of `Kernel.why_no_norm`."""
    return "it takes x, and gives y, as it is"


def unjoinable(*_: object) -> None:
    """Return None: the default of `Layout.join`, for layouts whose weights cannot be joined."""
    return None


def never_rounded(_: "Problem", __: Any) -> str | None:
    """Return why a kernel does not round x to 8 bits: the default of `Kernel.why_no_rounding`."""
    return "it takes x as it is"


def never_gated(_: "Problem", __: Any) -> str | None:
    """Return why a kernel cannot gate y, f(first half) * second half: the default of `Kernel.why_no_gate`."""
    return "it gives y as it is"


@dataclass(frozen=True)
class Layout:
    """Layout of a weight for kernels, other than the one in which it is stored; kernels may share one.

    build(weight, dtype)                     returns the tensors of the layout for a weight as stored, and x
                                             of `dtype`; called once per weight
    join(layouts, rows, scheme, K, dtype)    joins layouts of weights [rows[i], K] of one scheme along N:
                                             returns (joined tensors, views of them for each weight); None if
                                             they cannot be joined
    restore(tensors, scheme, shape, scale)   returns the stored words int32 [N, words per row] of a weight of
                                             `shape` [N, K]. If it is None, the words stay in memory.
    most_rows                                largest M for which a kernel multiplies x and joined weights
    """

    name: str
    build: Callable[[PackedTensor, torch.dtype], LayoutTensors]
    join: Callable[
        [Sequence[LayoutTensors], Sequence[int], Scheme, int, torch.dtype],
        tuple[LayoutTensors, tuple[LayoutTensors, ...]] | None,
    ] = unjoinable
    restore: Callable[[LayoutTensors, Scheme, tuple[int, int], torch.Tensor], torch.Tensor] | None = None
    most_rows: int = sys.maxsize

    @property
    def whole(self) -> bool:
        """Return True if the layout has all data of a weight: kernels get no stored tensors beside it."""
        return self.join is not unjoinable


@dataclass(frozen=True)
class Outline:
    """Scheme and shape [N, K] of a weight, for kernels that read its data from a kernel layout."""

    scheme: Scheme
    shape: tuple[int, int]


def as_measured(problem: "Problem", tile: Any, measured: "Problem") -> Any:
    """Return the measured `tile` (launch configuration) unchanged: the default of `TileSpace.adapt`."""
    return tile


@dataclass(frozen=True)
class TileSpace:
    """Space of the tiles of a kernel: its launch configurations, frozen records of the class `record`.

    values                           tested values of each field
    rule(problem)                    tile for problems without a measured one
    why_invalid(problem, tile)       why the kernel cannot run a tile, else None
    why_pruned(problem, tile)        why a tile is not worth measuring, else None
    adapt(problem, tile, measured)   tile for `problem`, where `tile` was the fastest for `measured`: the same
                                     weight with more rows of x
    """

    record: type[Any]
    values: Mapping[str, tuple[int, ...]]
    rule: Callable[[Problem], Any]
    why_invalid: Callable[[Problem, Any], str | None]
    why_pruned: Callable[[Problem, Any], str | None]
    adapt: Callable[[Problem, Any, Problem], Any] = as_measured


@dataclass(frozen=True)
class Normed:
    """Whole or half of an RMSNorm that a linear y [m, n] = x [m, k] W^T computes too; `part` says which.

        whole   y = RMSNorm(x) W^T; if `other` [m, k] is given, `total` [m, k] = x + `other` is also written
                and takes the place of x
        begin   `total` [m, n] = x W^T + `other` [m, n], and y = `total` * `weight`; `squares` float32
                [m, n / 16 rounded up] are the sums of `total`^2 over each 16 columns
        end     y = x W^T / sqrt(mean of `total`^2 + `eps`); x and `squares` are y and `squares` of the linear
                that began the norm

    `kind` is a key of `ops.norm.NORMS`, not used by the end. `eps` is not used by the begin. `weight` is that
    of the norm: [k] if whole, [n] to begin. Tensors are contiguous and have the dtype of x, except `squares`.
    """

    part: str
    kind: str = "llama"
    eps: float = 0.0
    weight: torch.Tensor | None = None
    other: torch.Tensor | None = None
    total: torch.Tensor | None = None
    squares: torch.Tensor | None = None


class TileError(KernelError):
    """The tile (launch configuration) needs more shared memory, registers or threads than the GPU has."""


def tile_text(tile: Any) -> str:
    """Return the fields of a tile as text: `warps=4 columns=512 row_tiles=1 prefetch=False`."""
    return " ".join(f"{field.name}={getattr(tile, field.name)}" for field in fields(tile))


def same_problem(problem: Problem) -> Problem:
    """Return the problem itself: the default of `Kernel.representative`, for kernels compiled per problem."""
    return problem


@dataclass(frozen=True)
class GroupedGemm:
    """Use of a kernel for a grouped GEMM: each routed token times the matrices of its expert.

    A routed token is a token paired with one of its experts. A program multiplies an expert block, up to 128
    routed tokens of one expert.

    block_rows                 least and most routed tokens of a block for which the kernel is selected
    forced_rows                least and most routed tokens of a block if `QUANTKIT_KERNEL` names the kernel
    tile(problem, grouping)    returns the tile (launch configuration), None if none fits; `grouping` is a
                               `gemm.operands.Grouping`
    why_unsupported(problem)   returns why the kernel cannot run, else None
    shares_x                   True if all warps share one x in shared memory. The matrices of an expert are
                               then stored as one weight.
    gates                      True if it can compute f(x W1^T) * (x W2^T) for experts with two matrices

    `problem` is one block times its expert: m is the rows of a block, n the rows of all matrices of an
    expert.
    """

    block_rows: tuple[int, int]
    forced_rows: tuple[int, int]
    tile: Callable[[Problem, Any], Any]
    why_unsupported: Verdict = always
    shares_x: bool = False
    gates: bool = False


@dataclass(frozen=True)
class Kernel:
    """Kernel of the registry: one way to compute y [m, n] = x [m, k] W^T, on `devices` such as "cuda".

    Functions `why_*` return a reason, or None. x is contiguous, with m >= 1; y has x's dtype. A field is None
    if the kernel lacks the ability.

        why_unsupported(problem)          why it cannot compute a problem
        why_slower(problem)               why a later kernel is faster; ignored if the kernel is forced by
                                          name
        layout                            layout of W that it reads; None: as stored
        launch(x, W, layout, bias)        computes y. Column scales were applied to x. If `layout.whole`, W is
                                          an `Outline`, its scheme and shape without tensors. A kernel with a
                                          `tile_space` also takes a `tile`.
        bind                              takes the arguments of `launch`; returns a `gemm.bound.Bound`:
                                          launches prepared for other x of that shape
        tile_space                        tiles (launch configurations) with which it runs
        run(operands, tile, features)     computes y of `gemm.operands.Operands`, also of experts if `grouped`
        grouped                           how it runs as a grouped GEMM, for experts
        representative(problem)           smallest problem for which Triton compiles the same code
        why_no_norm(problem, tile, part)  why it cannot compute `part` of an RMSNorm (`Normed.part`); if it
                                          can, `launch` takes a `Normed` as `normed`
        why_no_gate(problem, tile)        why it cannot compute y [m, n / 2] = f(first half of columns) *
                                          rest; if it can, `launch` takes f as `gate` (`ops.activation.gate`)
        why_no_rounding(problem, tile)    why it cannot round x to 8 bits in its own launch; if it can,
                                          `launch` and `bind` take `activations`. Else x is rounded in a
                                          launch before.
        rounds_x                          True if it multiplies 8-bit codes of x, not x rounded and back
        code_order(problem)               `CodeOrder` of these codes. `launch` may then take the codes of an
                                          earlier kernel, a `QuantizedX`, as `codes`, and x for its shape
                                          alone.
        bind_weight(x, W, layout)         returns a `gemm.bound.Bound` whose y is W [n, k] in the dtype of x
        grad_x(g, W, layout)              returns g W [m, k], the gradient of x for the gradient g [m, n] of y

    Forcing a kernel by name never overrides `why_unsupported`.
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    why_unsupported: Verdict
    why_slower: Verdict
    layout: Layout | None
    launch: Callable[..., torch.Tensor]
    tile_space: TileSpace | None = None
    why_no_norm: Callable[[Problem, Any, str], str | None] = never_normed
    why_no_gate: Callable[[Problem, Any], str | None] = never_gated
    why_no_rounding: Callable[[Problem, Any], str | None] = never_rounded
    bind: Callable[..., Any] | None = None
    run: Callable[..., torch.Tensor] | None = None
    grouped: GroupedGemm | None = None
    rounds_x: bool = False
    code_order: Callable[[Problem], Any] | None = None
    bind_weight: Callable[..., Any] | None = None
    grad_x: Callable[..., torch.Tensor] | None = None
    representative: Callable[[Problem], Problem] = same_problem


@lru_cache(maxsize=64)
def device_features(device: torch.device | str) -> frozenset[str]:
    """Return the features of a device that kernels depend on.

    For a CPU these are its vector instructions, for a GPU names of `GPU_FEATURES`. "cuda" is the GPU that is
    current at the first call.
    """
    device = torch.device(device)
    return _cpu_features() if device.type == "cpu" else _gpu_features(device)


_Result = TypeVar("_Result")


def on_device(device: torch.device, run: Callable[[frozenset[str]], _Result]) -> _Result:
    """Return `run(features)`, called with `device` as the current one; `features` are those of `device`."""
    features = device_features(device)
    if device.index == torch.cuda.current_device():
        return run(features)
    with torch.cuda.device(device):
        return run(features)


@lru_cache(maxsize=64)
def gpu_of(device: torch.device) -> Gpu | None:
    """Return the properties of a GPU, of the current GPU if `device` has no index; None for a CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    # Most bytes that a program may request; not every build of torch reports it.
    shared = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)
    return Gpu(facts.name, (facts.major, facts.minor), facts.multi_processor_count, int(shared))


def _gpu_features(device: torch.device) -> frozenset[str]:
    """Return which features of `GPU_FEATURES` a GPU has, such as PTX, PDL or WGMMA."""
    if importlib.util.find_spec("triton") is None:
        return frozenset()
    facts = {"triton"}
    if device.type == "cuda" and torch.version.cuda is not None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        # PDL came with compute capability 9.0.
        facts |= {
            fact for fact, since in (("ptx", BFLOAT16_SINCE), ("overlap", (9, 0))) if capability >= since
        }
        facts |= {"wgmma"} if capability[0] == WGMMA_MAJOR else set()
        facts |= {"gluon"} if "ptx" in facts and gluon_failure(device) is None else set()
    return frozenset(facts)


def _cpu_features() -> frozenset[str]:
    """Return the vector instructions of this CPU."""
    # Torch's dispatch key: "AVX2", "AVX512" or "AVX512_VNNI". A machine with AVX512 runs AVX2 code too.
    facts = {torch.backends.cpu.get_cpu_capability().lower().split("_")[0]}
    if "avx512" in facts:
        facts.add("avx2")
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if has_onednn and torch.cpu._is_vnni_supported():
            facts.add("vnni")
    return frozenset(facts)
