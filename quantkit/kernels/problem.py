"""Records for kernels: the problem, a product y = x W^T to compute, and the properties of a kernel."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

import torch

from quantkit.errors import KernelError
from quantkit.kernels.triton_support import BFLOAT16_SINCE, WGMMA_MAJOR, gluon_failure
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: Dtypes of activations.
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: GPU features that kernels use: `ptx` is inline assembly, `overlap` is PDL, `wgmma` the asynchronous MMA of
#: warpgroups, and `gluon` Triton's language for explicit layouts and warp specialization.
GPU_FEATURES = frozenset({"triton", "ptx", "overlap", "wgmma", "gluon"})


@dataclass(frozen=True)
class Gpu:
    """GPU properties on which tiles depend; `shared_memory` is the bytes that a program may use."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int

    def __hash__(self) -> int:
        # A fast hash: it is part of every problem, and problems are hashed at every call.
        return hash(self.name)


@dataclass(frozen=True)
class Problem:
    """Linear y [m, n] = x [m, k] @ W [n, k]^T, with W packed by `scheme`, on a kind of device.

    x has `dtype`, and is rounded as `activations` says.
    """

    m: int
    n: int
    k: int
    scheme: Scheme
    dtype: torch.dtype
    device: str
    #: Features of the device, from `device_features`.
    features: frozenset[str]
    #: Name of the existing kernel layout, "" for none, None where one may still be built.
    layout: str | None = None
    #: None on a CPU, and to ignore tile tables.
    gpu: Gpu | None = None
    #: True if torch's `allow_fp16_accumulation` permits float16 sums of float16 products.
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
        `scheme` is that of W, and may say how x, of `dtype`, is rounded. `layout` is the name of W's layout.
        """
        kind = device.type
        fp16_accumulation = (
            dtype == torch.float16 and kind == "cuda" and torch.backends.cuda.matmul.allow_fp16_accumulation
        )
        features, gpu = device_features(device), gpu_of(device)
        rounding, weights = scheme.activations, scheme.of_weights
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
    """Return None: the support check of a kernel that supports every problem."""
    return None


def one_plane(problem: Problem) -> str | None:
    """Return why a kernel for weights of one value each cannot run a problem; None if it can.

    A scheme of several planes makes a weight the sum of as many values.
    """
    planes = problem.scheme.planes
    return None if planes == 1 else f"its weights have one value each, these are sums of {planes}"


#: Tensors of a weight in a kernel layout.
LayoutTensors = tuple[torch.Tensor, ...]


def never_normed(_: "Problem", __: Any, ___: str) -> str | None:
    """Return why a kernel computes no part of a norm, always: `Kernel.no_norm` of those without norms."""
    return "it takes x, and gives y, as it is"


def unjoinable(*_: object) -> None:
    """Return None: `Layout.join` of a layout whose weights cannot be joined."""
    return None


def never_rounded(_: "Problem", __: Any) -> str | None:
    """Return why a kernel does not round x, always: `Kernel.no_rounding` of those that take x as it is."""
    return "it takes x as it is"


def never_gated(_: "Problem", __: Any) -> str | None:
    """Return why a kernel does not compute activation(first half of y) * second, always: `Kernel.no_gate`."""
    return "it gives y as it is"


@dataclass(frozen=True)
class Layout:
    """Layout of a weight for kernels, other than the storage layout; several kernels may share one.

    `build(weight, activation dtype)` makes its tensors from the storage layout, once per weight.

    `join(weights, their rows, scheme, K, activation dtype)` concatenates weights of one scheme and K along N.
    The result is the joined tensors, and views for each weight; None if the layouts cannot be joined.

    `restore(tensors, scheme, [N, K], scale)` returns the stored words [N, W] int32. Without `restore` the
    words are kept. `most_rows` is the largest M for which a kernel runs joined weights.
    """

    name: str
    build: Callable[[PackedTensor, torch.dtype], LayoutTensors]
    join: Callable[
        [Sequence[LayoutTensors], Sequence[int], Scheme, int, torch.dtype],
        tuple[LayoutTensors, tuple[LayoutTensors, ...]] | None,
    ] = unjoinable
    restore: Callable[[LayoutTensors, Scheme, tuple[int, int], torch.Tensor], torch.Tensor] | None = None
    #: Largest M for which a kernel runs joined weights.
    most_rows: int = sys.maxsize

    @property
    def whole(self) -> bool:
        """Return True if kernels need the layout, scheme and shape of a weight, not its stored parts."""
        return self.join is not unjoinable


@dataclass(frozen=True)
class Outline:
    """Scheme and shape [N, K] of a weight whose data is in a kernel layout."""

    scheme: Scheme
    shape: tuple[int, int]


def as_measured(problem: "Problem", tile: Any, measured: "Problem") -> Any:
    """Return the tile (launch configuration) unchanged: the default of `TileSpace.adapt`."""
    return tile


@dataclass(frozen=True)
class TileSpace:
    """Space of the tiles of a kernel: the configurations of its launch, frozen records of the class `record`.

    values                           values of each field
    rule(problem)                    tile for problems without a measured one
    why_invalid(problem, tile)       why the kernel cannot run a tile, else None
    why_pruned(problem, tile)        why a tile is not worth measuring, else None
    adapt(problem, tile, measured)   adapts a `tile` that was fastest for `measured`, with more rows of x
    """

    record: type[Any]
    values: Mapping[str, tuple[int, ...]]
    rule: Callable[[Problem], Any]
    why_invalid: Callable[[Problem, Any], str | None]
    why_pruned: Callable[[Problem, Any], str | None]
    adapt: Callable[[Problem, Any, Problem], Any] = as_measured


@dataclass(frozen=True)
class Normed:
    """Part of an RMSNorm that a linear y [m, n] = x [m, k] W^T computes (`ops.norm.rms_norm`):

        whole   x is replaced by the norm of x, or of x + `other`, stored as `total` [m, k]
        begin   `total` [m, n] = y + `other`, and y = `total` times `weight`; `squares` float32
                [m, n / 16 rounded up] are the sums of squares of each 16 columns of `total`
        end     x was begun so: rows of y are divided by sqrt(mean of squares + `eps`)

    `kind` is one of `ops.norm.NORMS`, `weight` that of the norm: [k] if whole, [n] if begun. Tensors of a
    part are contiguous and have the dtype of x, except `squares`. The end does not depend on `kind`, nor the
    begin on `eps`.
    """

    part: str
    kind: str = "llama"
    eps: float = 0.0
    weight: torch.Tensor | None = None
    other: torch.Tensor | None = None
    total: torch.Tensor | None = None
    squares: torch.Tensor | None = None


class TileError(KernelError):
    """A GPU lacks shared memory, registers or threads for a tile, the configuration of a launch."""


def tile_text(tile: Any) -> str:
    """Return the fields of a tile as text: `warps=4 columns=512 row_tiles=1 prefetch=False`."""
    return " ".join(f"{field.name}={getattr(tile, field.name)}" for field in fields(tile))


def same_problem(problem: Problem) -> Problem:
    """Return the problem itself: `Kernel.representative` of a kernel that is compiled for each problem."""
    return problem


@dataclass(frozen=True)
class GroupedGemm:
    """Use of a kernel for a grouped GEMM: tokens times the weights of their experts, block by block.

    A routed token is a token with one of its experts; an expert block is a few of one expert, for one
    program.

    block_rows                 least and most routed tokens of a block for which the kernel is selected
    forced_rows                the same if `QUANTKIT_KERNEL` names it
    tile(problem, grouping)    the tile (launch configuration), None if none fits
    why_unsupported(problem)   why it cannot run; both take the problem of one expert: m is the rows of a
                               block, n all rows of its matrices
    shares_x                   all warps read one x in shared memory, and an expert's matrices are one weight
    gates                      it can compute activation(first matrix) * second for experts with two matrices
    """

    block_rows: tuple[int, int]
    forced_rows: tuple[int, int]
    tile: Callable[[Problem, Any], Any]
    why_unsupported: Verdict = always
    shares_x: bool = False
    gates: bool = False


@dataclass(frozen=True)
class Kernel:
    """Kernel of the registry: one way to compute a packed linear layer, on `devices` such as "cuda".
    `why_unsupported(problem)` returns why it cannot compute a problem, `why_slower(problem)` why a later
    kernel is faster. Forcing a kernel by name overrides `why_slower`, never `why_unsupported`.

    `layout` is None for a kernel that reads the storage layout. `launch(x [m, k], weight, layout, bias [n])`
    returns y [m, n] in x's dtype, for m >= 1 and contiguous x; with a `tile_space` it also takes a `tile`.
    Column scales are applied to x before. If the layout is `whole`, `weight` is only the `Outline`.

    `bind` takes the arguments of `launch` and returns a `gemm.bound.Bound` for other x of
    that shape.

    `no_norm(problem, tile, part)` returns why the kernel cannot compute a part of a norm; if it can, `launch`
    takes a `normed`. `no_gate(problem, tile)` is the same for a gate, whose kind `launch` takes as `gate`.
    The first half of y's columns then gates the second, as `ops.activation.gate` does: y is
    [m, n / 2].

    `run(operands, tile, features)` computes y of `gemm.operands.Operands`; with a `grouped`
    also of routed tokens. `representative(problem)` returns the smallest problem for which Triton compiles
    the same code, so that a tile search compiles it once.

    With `rounds_x` it multiplies what x is rounded to by the `activations` of the problem, which `launch`
    takes. `no_rounding(problem, tile)` returns why another kernel cannot round x, which is then rounded
    before; if it can, `launch` and `bind` take `activations`.

    `code_order(problem)` returns the `CodeOrder` of x that the kernel before may have quantized: `launch`
    then takes a `QuantizedX` as `codes`, and an x without numbers.

    `grad_x(g [m, n], weight, layout)` returns g W [m, k], the gradient of x for the gradient g of y.
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    why_unsupported: Verdict
    why_slower: Verdict
    layout: Layout | None
    launch: Callable[..., torch.Tensor]
    tile_space: TileSpace | None = None
    no_norm: Callable[[Problem, Any, str], str | None] = never_normed
    no_gate: Callable[[Problem, Any], str | None] = never_gated
    no_rounding: Callable[[Problem, Any], str | None] = never_rounded
    bind: Callable[..., Any] | None = None
    run: Callable[..., torch.Tensor] | None = None
    grouped: GroupedGemm | None = None
    rounds_x: bool = False
    code_order: Callable[[Problem], Any] | None = None
    grad_x: Callable[..., torch.Tensor] | None = None
    representative: Callable[[Problem], Problem] = same_problem


@lru_cache(maxsize=64)
def device_features(device: torch.device | str) -> frozenset[str]:
    """Return the features of a device that kernels depend on.

    These are vector instructions of a CPU, or `GPU_FEATURES`. "cuda" is the GPU that is current at the first
    call.
    """
    device = torch.device(device)
    return _cpu_features() if device.type == "cpu" else _gpu_features(device)


_Result = TypeVar("_Result")


def on_device(device: torch.device, run: Callable[[frozenset[str]], _Result]) -> _Result:
    """Make `device` current and call `run` with the features, such as PTX, that kernels may use there."""
    features = device_features(device)
    if device.index == torch.cuda.current_device():
        return run(features)
    with torch.cuda.device(device):
        return run(features)


@lru_cache(maxsize=64)
def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of `device`, the current one without an index; None for a CPU."""
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
