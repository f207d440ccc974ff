"""Which compressed-tensors checkpoints other engines read, as a table.

The table is about files and holds on every device; an engine may lack a kernel for a device. The rows of vLLM
and SGLang are tested against their code (`tests/compat/engines.py`), those of transformers by loading.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from quantkit.errors import UsageError

LayerKind = Literal["linear", "experts", "lm_head"]

_INT, _FP8, _MXFP8 = "pack-quantized", "float-quantized", "mxfp8-quantized"
_MXFP4, _NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_LINEARS: tuple[LayerKind, ...] = ("linear", "lm_head")
_EXPERTS: tuple[LayerKind, ...] = ("experts",)
_ALL = (*_LINEARS, *_EXPERTS)


@dataclass(frozen=True)
class Engine:
    """Engine and its tested versions, oldest first; `plugin_tried` is where quantkit's plug-in ran."""

    name: str
    tried: tuple[str, ...]
    plugin_tried: str | None = None

    def __str__(self) -> str:
        ends = dict.fromkeys((self.tried[0], self.tried[-1]))
        return f"{self.name} {' to '.join(ends)}"


VLLM = Engine(
    "vLLM", ("0.26.0", "0.32.0", "0.33.0"), plugin_tried="vLLM 0.26.0 on an H100 and 0.32.0 on a CPU"
)
SGLANG = Engine("SGLang", ("0.5.23",), plugin_tried="SGLang 0.5.23 on a CPU")
TRANSFORMERS = Engine("transformers", ("5.23.0", "5.24.0"))
ENGINES = (VLLM, SGLANG, TRANSFORMERS)
#: Linears that engines which serve fuse, by the name of the fused one.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
#: Engines that serve, by the name of their package.
SERVERS = {"vllm": VLLM, "sglang": SGLANG}


def asked_engine(text: str) -> tuple[Engine, str]:
    """Return the engine and version that `--engine text` names, such as `vllm` or `vllm==0.26.0`.

    The newest version that was tried is the default. Raises `UsageError` for another engine or version.
    """
    package, separator, asked = text.partition("==")
    engine = SERVERS.get(package)
    if engine is None:
        raise UsageError(f"--engine is {text!r}; quantkit knows {' and '.join(SERVERS)}.")
    if separator and asked not in engine.tried:
        raise UsageError(
            f"--engine is {text!r}, and {engine.name} {asked} was not tried. Versions that were: "
            f"{', '.join(engine.tried)}."
        )
    return engine, asked or engine.tried[-1]


def installed_beside(engine: Engine, answered: str) -> str | None:
    """Return a note if the version of `engine` that is installed here is not `answered`, else None."""
    package = next(name for name, one in SERVERS.items() if one == engine)
    try:
        found = version(package)
    except PackageNotFoundError:
        return None
    # A local version, such as 0.32.0+cpu, is that of a build.
    public = found.partition("+")[0]
    if public == answered:
        return None
    asks = f"Ask for it with --engine {package}=={public}." if public in engine.tried else "It was not tried."
    return f"{engine.name} {found} is installed, and this is about {answered}. {asks}"


@dataclass(frozen=True)
class Support:
    """Row: what an engine does with matrices stored in one way.

    format       format of compressed-tensors
    bits         widths of the codes; empty for any
    strategies   strategies of their scales, as compressed-tensors calls them
    kinds        kinds of layers
    classes      classes of the engine that read them, by name; empty if it refuses or misreads them
    what         what it cannot load, for the user, and why unless a class is missing
    instead      what it loads
    """

    engine: Engine
    format: str
    strategies: tuple[str, ...]
    kinds: tuple[LayerKind, ...]
    classes: tuple[str, ...] = ()
    what: str = ""
    why: str = ""
    instead: str = ""
    bits: tuple[int, ...] = ()
    #: True if the row is of matrices with zero-points alone.
    asymmetric: bool = False
    #: True if it reads them only in a checkpoint entirely of this format.
    alone: bool = False
    #: What of it may surprise a user who measured the checkpoint with quantkit.
    caution: str = ""


#: Strategies: one scale per 128x128 block in a matrix of whole blocks, and any other blocks.
BLOCK, OTHER_BLOCKS = "block", "other blocks"


@dataclass(frozen=True)
class Stored:
    """Storage of the matrices of a module: format and strategy of compressed-tensors, width of the codes."""

    module: str
    kind: LayerKind
    format: str
    strategy: str
    bits: int
    symmetric: bool = True

    @classmethod
    def of(
        cls, module: str, kind: LayerKind, format: str, arguments: Mapping[str, Any], rows: int
    ) -> "Stored":
        """Return the storage of matrices of `rows` with these `weights` arguments of a config group."""
        whole = arguments.get("block_structure") in (None, [128, 128]) and rows % 128 == 0
        strategy = str(arguments["strategy"])
        strategy = OTHER_BLOCKS if strategy == BLOCK and not whole else strategy
        return cls(module, kind, format, strategy, arguments["num_bits"], arguments["symmetric"])


@dataclass(frozen=True)
class Refusal:
    """Modules that engines cannot load: the reason, the first module, their number, and a remedy."""

    engines: tuple[Engine, ...]
    what: str
    why: str
    instead: str
    first: str
    count: int

    def __str__(self) -> str:
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        why = f", because {self.why}" if self.why else ""
        return (
            f"{' and '.join(map(str, self.engines))} cannot load {self.what}{why}: {self.first}{more}. "
            f"{self.instead}"
        )


_GROUPS = ("group", "channel")
_WHOLE = ("channel", "tensor")
_GIVE_CHANNELS = "Choose scales per channel: -g channel."
_TENSOR = "integers with one scale per tensor"
_GIVE_GROUPS = "Choose scales per channel or group: -g channel or -g 128."
_FP8_GROUPS = "fp8 with scales per group"
_HF = ("CompressedTensorsHfQuantizer",)
_FP8_BLOCKS = "fp8 in other than whole blocks of 128x128"
_FP8_EXPERTS = "fp8 experts with 16-bit inputs"
#: `CompressedTensorsW4A4Mxfp4` and the classes beside it do not ask whether inputs are quantized.
_QUANTIZES_X = "on Blackwell GPUs quantizes x too, so accuracy is not what quantkit measures"

#: Widths of integers that vLLM has one kernel for, and SGLang none.
_OTHER_BITS = (2, 3, 5, 6, 7)
_HUMMING = "runs 2, 3, 5, 6 and 7 bits by Humming alone, on NVIDIA GPUs from Turing on, and was not run there"
_GIVE_INTS = "Give all linears int4 or int8."

#: The first row that fits decides. Storage without a row was not tested, and is not promised.
SUPPORT: tuple[Support, ...] = (
    Support(VLLM, _INT, _GROUPS, _LINEARS, ("CompressedTensorsWNA16",), bits=_OTHER_BITS, caution=_HUMMING),
    Support(
        VLLM,
        _INT,
        _GROUPS,
        _EXPERTS,
        bits=_OTHER_BITS,
        what="experts of 2, 3, 5, 6 or 7 bits",
        why="0.26.0 has experts of 4 and 8 bits only, and 0.32.0 takes Humming for them, which was not run",
        instead="Give the experts int4 or int8, such as --rule '*.experts.*=int8'.",
    ),
    Support(
        VLLM,
        _INT,
        _GROUPS,
        _EXPERTS,
        bits=(8,),
        asymmetric=True,
        what="int8 experts with zero-points",
        instead="Give the experts int8 without zero-points, or int4.",
    ),
    Support(VLLM, _INT, _GROUPS, _LINEARS, ("CompressedTensorsWNA16",)),
    Support(VLLM, _INT, _GROUPS, _EXPERTS, ("CompressedTensorsWNA16MoEMethod",)),
    Support(VLLM, _INT, ("tensor",), _ALL, what=_TENSOR, instead=_GIVE_GROUPS),
    Support(VLLM, _FP8, _WHOLE, _LINEARS, ("CompressedTensorsW8A16Fp8",)),
    Support(VLLM, _FP8, ("group",), _LINEARS, what=_FP8_GROUPS, instead=_GIVE_CHANNELS),
    Support(VLLM, _FP8, (BLOCK,), ("linear",), ("CompressedTensorsW8A16Fp8",)),
    Support(
        VLLM,
        _FP8,
        (BLOCK,),
        ("lm_head",),
        what="an lm_head of fp8 in blocks",
        why="it wants a scale for every token",
        instead="Give it scales per channel, such as --lm-head fp8.",
    ),
    Support(VLLM, _FP8, (OTHER_BLOCKS,), _LINEARS, what=_FP8_BLOCKS, instead=_GIVE_CHANNELS),
    Support(
        VLLM,
        _FP8,
        (*_WHOLE, "group", BLOCK, OTHER_BLOCKS),
        _EXPERTS,
        what=_FP8_EXPERTS,
        instead="Give the experts int8, mxfp8 or nvfp4, such as --rule '*.experts.*=int8'.",
    ),
    Support(VLLM, _MXFP8, ("group",), _LINEARS, ("CompressedTensorsW8A8Mxfp8",), caution=_QUANTIZES_X),
    Support(
        VLLM, _MXFP8, ("group",), _EXPERTS, ("CompressedTensorsW8A8Mxfp8MoEMethod",), caution=_QUANTIZES_X
    ),
    Support(VLLM, _MXFP4, ("group",), _LINEARS, ("CompressedTensorsW4A4Mxfp4",), caution=_QUANTIZES_X),
    Support(
        VLLM, _MXFP4, ("group",), _EXPERTS, ("CompressedTensorsW4A4Mxfp4MoEMethod",), caution=_QUANTIZES_X
    ),
    Support(VLLM, _NVFP4, ("tensor_group",), _LINEARS, ("CompressedTensorsW4A4Fp4",)),
    Support(VLLM, _NVFP4, ("tensor_group",), _EXPERTS, ("CompressedTensorsW4A4Nvfp4MoEMethod",)),
    Support(
        SGLANG,
        _INT,
        _GROUPS,
        _ALL,
        bits=_OTHER_BITS,
        what="integers of 2, 3, 5, 6 or 7 bits",
        instead=_GIVE_INTS,
    ),
    Support(SGLANG, _INT, _GROUPS, _LINEARS, ("CompressedTensorsWNA16",)),
    Support(
        SGLANG,
        _INT,
        _GROUPS,
        _EXPERTS,
        ("CompressedTensorsWNA16MoE",),
        what="integer experts beside linears of another format",
        instead=_GIVE_INTS,
        alone=True,
    ),
    Support(SGLANG, _INT, ("tensor",), _ALL, what=_TENSOR, instead=_GIVE_GROUPS),
    Support(SGLANG, _FP8, _WHOLE, _LINEARS, ("CompressedTensorsW8A16Fp8",)),
    Support(SGLANG, _FP8, ("group",), _LINEARS, what=_FP8_GROUPS, instead=_GIVE_CHANNELS),
    Support(SGLANG, _FP8, (BLOCK, OTHER_BLOCKS), _LINEARS, what="fp8 in blocks", instead=_GIVE_CHANNELS),
    Support(
        SGLANG,
        _FP8,
        (*_WHOLE, "group", BLOCK, OTHER_BLOCKS),
        _EXPERTS,
        what=_FP8_EXPERTS,
        instead="Give all linears int8 or nvfp4.",
    ),
    Support(SGLANG, _MXFP8, ("group",), _ALL, what="mxfp8", instead="Choose int8 or nvfp4."),
    Support(SGLANG, _MXFP4, ("group",), _LINEARS, what="mxfp4", instead="Choose int4 or nvfp4."),
    Support(
        SGLANG,
        _MXFP4,
        ("group",),
        _EXPERTS,
        what="mxfp4 experts",
        why="its class for them has other names for the codes",
        instead="Choose int4 or nvfp4.",
    ),
    Support(SGLANG, _NVFP4, ("tensor_group",), _LINEARS, ("CompressedTensorsW4A16Fp4",)),
    Support(SGLANG, _NVFP4, ("tensor_group",), _EXPERTS, ("CompressedTensorsW4A16Nvfp4MoE",)),
    Support(TRANSFORMERS, _INT, (*_GROUPS, "tensor"), _ALL, _HF),
    Support(
        TRANSFORMERS,
        _FP8,
        (*_WHOLE, "group", BLOCK, OTHER_BLOCKS),
        _LINEARS,
        _HF,
    ),
    Support(TRANSFORMERS, _FP8, _WHOLE, _EXPERTS, _HF),
    Support(
        TRANSFORMERS,
        _FP8,
        ("group", BLOCK, OTHER_BLOCKS),
        _EXPERTS,
        what="fp8 experts with scales per group or block",
        instead=_GIVE_CHANNELS,
    ),
    Support(TRANSFORMERS, _MXFP8, ("group",), _LINEARS, _HF),
    Support(
        TRANSFORMERS,
        _MXFP8,
        ("group",),
        _EXPERTS,
        what="mxfp8 experts without quantkit",
        instead="There give the experts int8 or mxfp4.",
    ),
    Support(TRANSFORMERS, _MXFP4, ("group",), _ALL, _HF),
    Support(TRANSFORMERS, _NVFP4, ("tensor_group",), _LINEARS, _HF),
    Support(
        TRANSFORMERS,
        _NVFP4,
        ("tensor_group",),
        _EXPERTS,
        what="nvfp4 experts without quantkit",
        why="it drops their global scales, and says nothing",
        instead="There give the experts int4 or mxfp4.",
    ),
)


#: Tensors of a packed matrix that have its rows.
ROWS = frozenset({"weight", "weight_packed", "weight_scale", "weight_zero_point"})


@dataclass(frozen=True)
class Reordered:
    """Linears, by the end of their name, whose rows an engine reorders as it loads `model_types`.

    It reorders those of `tensors` alone, and gives no error for the others. If it `stops`, it reorders those
    of all tensors, and fails at one without rows.
    """

    engine: Engine
    model_types: tuple[str, ...]
    linears: tuple[str, ...]
    tensors: frozenset[str] = ROWS
    stops: bool = False

    def unfit(self, module: str, tensors: Set[str], *, per_tensor: bool) -> str | None:
        """Return one of `tensors`, those of a packed `module`, that this does not fit, None if all fit.

        `per_tensor` if the scale is that of the whole matrix.
        """
        if module.rpartition(".")[2] not in self.linears:
            return None
        rows = ROWS & tensors - ({"weight_scale"} if per_tensor else set())
        return min(tensors - rows if self.stops else rows - self.tensors, default=None)


_LLAMA4 = ("llama4", "llama4_text")
_QK = ("q_proj", "k_proj")
REORDERED = (
    Reordered(VLLM, _LLAMA4, _QK, frozenset({"weight", "weight_packed", "weight_scale"})),
    Reordered(VLLM, ("bloom",), ("query_key_value",), stops=True),
    Reordered(SGLANG, _LLAMA4, _QK, frozenset({"weight"})),
)


def reordered(config: Mapping[str, Any]) -> tuple[Reordered, ...]:
    """Return what engines reorder of a model with this config.json."""
    return tuple(row for row in REORDERED if config.get("model_type") in row.model_types)


def support(engine: Engine, one: Stored) -> Support:
    """Return the row of an engine for matrices stored as `one`; a row without classes if untested."""
    for row in SUPPORT:
        fits = (
            one.strategy in row.strategies
            and one.kind in row.kinds
            and one.bits in (row.bits or (one.bits,))
            and not (row.asymmetric and one.symmetric)
        )
        if row.engine == engine and row.format == one.format and fits:
            return row
    what = f"{one.kind} in {one.format} with scales per {one.strategy}"
    return Support(
        engine,
        one.format,
        (one.strategy,),
        (one.kind,),
        what=what,
        why="it was not tried",
        instead="Choose another format or group size.",
    )


def readers(one: Stored) -> tuple[Engine, ...]:
    """Return the engines that read matrices stored as `one`."""
    return tuple(engine for engine in ENGINES if support(engine, one).classes)


def refusals(layers: Iterable[Stored]) -> tuple[Refusal, ...]:
    """Return a `Refusal` for each reason why an engine cannot load some of `layers`."""
    layers = tuple(layers)
    mixed = len({one.format for one in layers}) > 1
    found: dict[tuple[str, str, str], dict[Engine, list[str]]] = {}
    for engine in ENGINES:
        for one in layers:
            row = support(engine, one)
            if not row.classes or (row.alone and mixed):
                reason = (row.what, row.why, row.instead)
                found.setdefault(reason, {}).setdefault(engine, []).append(one.module)
    return tuple(
        Refusal(tuple(engines), *reason, next(iter(engines.values()))[0], len(next(iter(engines.values()))))
        for reason, engines in found.items()
    )
