"""Engines that read packed checkpoints. `engine_support.py` says what each reads, in these records."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from quantkit.errors import UsageError, unknown_name

LayerKind = Literal["linear", "experts", "lm_head"]

#: Formats of compressed-tensors.
INT, FP8, MXFP8 = "pack-quantized", "float-quantized", "mxfp8-quantized"
MXFP4, NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
LINEARS: tuple[LayerKind, ...] = ("linear", "lm_head")
EXPERTS: tuple[LayerKind, ...] = ("experts",)
ALL_KINDS = (*LINEARS, *EXPERTS)
#: Strategies of scales, as compressed-tensors calls them.
GROUPS, WHOLE = ("group", "channel"), ("channel", "tensor")


@dataclass(frozen=True)
class Engine:
    """Program that loads packed checkpoints, and the versions of it that were tested.

    name          name in texts
    tried         tested versions, oldest first
    plugin_tried  versions and devices on which quantkit's plug-in ran, as text; None without any
    """

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

    The default is the newest tested version. Raises `UsageError` for another engine or version.
    """
    package, separator, asked = text.partition("==")
    engine = SERVERS.get(package)
    if engine is None:
        raise unknown_name("engine", package, SERVERS)
    if separator and asked not in engine.tried:
        raise UsageError(
            f"--engine is {text!r}, and {engine.name} {asked} was not tried. Versions that were: "
            f"{', '.join(engine.tried)}."
        )
    return engine, asked or engine.tried[-1]


def installed_beside(engine: Engine, answered: str) -> str | None:
    """Return a note if the installed version of `engine` is not `answered`, else None."""
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
    """Row: how an engine reads matrices of one storage format.

    format       format of compressed-tensors
    bits         widths of the codes; empty for any
    strategies   strategies of their scales, as compressed-tensors calls them
    kinds        kinds of layers
    classes      classes of the engine that read them, by name; empty if it refuses or misreads them
    what         matrices that cannot be loaded, as text of a `Refusal`
    why          reason, as text; empty if there is none to add
    instead      remedy, a sentence
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
    #: Columns of the groups that it is of; empty for any.
    group_sizes: tuple[int, ...] = ()
    #: True if the row is of matrices with zero-points alone.
    asymmetric: bool = False
    #: How inputs are rounded, as `Stored.activations`.
    activations: tuple[str, ...] = ("",)
    #: True if it reads them only in a checkpoint entirely of this format.
    alone: bool = False
    #: What of it may surprise a user who measured the checkpoint with quantkit.
    caution: str = ""


#: Strategies: one scale per 128x128 block in a matrix of whole blocks, and any other blocks.
BLOCK, OTHER_BLOCKS = "block", "other blocks"


@dataclass(frozen=True)
class Stored:
    """Storage of the matrices of a module, by which `engine_support.support` finds the row of an engine.

    module       name of the module
    kind         kind of layer that engines build from it
    format       format of compressed-tensors, by name
    strategy     unit that shares a scale, as compressed-tensors calls it, or `OTHER_BLOCKS`
    bits         width of a code
    symmetric    True without zero-points
    activations  rounding of the inputs, such as `int8 token`; empty if they are not rounded
    group_size   columns of a group; None for scales per channel, tensor or block
    """

    module: str
    kind: LayerKind
    format: str
    strategy: str
    bits: int
    symmetric: bool = True
    activations: str = ""
    group_size: int | None = None

    @classmethod
    def of(
        cls,
        module: str,
        kind: LayerKind,
        format: str,
        arguments: Mapping[str, Any],
        rows: int,
        activations: str = "",
    ) -> "Stored":
        """Derive the storage of matrices with `rows` rows from `arguments`, the `weights` of a config group.

        The strategy of blocks is `BLOCK` for whole blocks of 128 x 128, and `OTHER_BLOCKS` for all others.
        """
        whole = arguments.get("block_structure") in (None, [128, 128]) and rows % 128 == 0
        strategy = str(arguments["strategy"])
        strategy = OTHER_BLOCKS if strategy == BLOCK and not whole else strategy
        symmetric: bool = arguments["symmetric"]
        size: int | None = arguments["group_size"]
        return cls(module, kind, format, strategy, arguments["num_bits"], symmetric, activations, size)


@dataclass(frozen=True)
class Refusal:
    """Reason why engines cannot load some modules; its `str()` is the text for the user.

    engines   engines that refuse for this reason
    what      matrices that cannot be loaded, as text
    why       reason, as text; empty if there is none to add
    instead   remedy, a sentence
    first     name of the first such module
    count     number of such modules, for the first engine
    """

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


#: Tensors of a packed matrix that have its rows.
ROWS = frozenset({"weight", "weight_packed", "weight_scale", "weight_zero_point"})


@dataclass(frozen=True)
class Reordered:
    """Linears whose rows an engine reorders as it loads a model.

    model_types  `model_type` of the models
    linears      last components of the names of the linears
    tensors      parts whose rows are reordered; other parts stay as they are, without an error
    stops        True if the rows of all parts are reordered, which fails at a part without rows
    """

    engine: Engine
    model_types: tuple[str, ...]
    linears: tuple[str, ...]
    tensors: frozenset[str] = ROWS
    stops: bool = False

    def unfit(self, module: str, tensors: Set[str], *, per_tensor: bool) -> str | None:
        """Return the name of a part of `module` that the reordering breaks; None if it breaks none.

        `tensors` are the parts of the packed module. `per_tensor` is True for one scale per matrix, without
        rows.
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
    """Return the linears that engines reorder in a model with this config.json."""
    return tuple(row for row in REORDERED if config.get("model_type") in row.model_types)
