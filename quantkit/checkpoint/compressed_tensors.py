"""Map schemes to the formats of compressed-tensors, one row of a table each.

A row says which schemes a format expresses, the names and dtypes of its parts in a file, and the arguments
that describe it. In every row the bytes are those of quantkit's own parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from quantkit.checkpoint.engine_support import readers, support
from quantkit.checkpoint.engines import ENGINES, VLLM, LayerKind, Stored
from quantkit.errors import FormatError
from quantkit.packing.activations import ActivationScheme, ScaleKind, activations_named
from quantkit.packing.formats import FORMATS, IntFormat
from quantkit.packing.names import QUANTKIT, Container, StoredFormat
from quantkit.packing.packings import PackingName
from quantkit.packing.schemes import Scheme
from quantkit.packing.zero_points import ZeroPoint

#: Scale dtypes with at least as many bits as any model dtype, in which readers hold the scales.
_MODEL_SCALES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class CompressedTensorsFormat:
    """One format of compressed-tensors, and the schemes that it expresses.

    formats        number formats, by name
    scales         types of scales, by name
    global_scale   True if all scales of a matrix are divided by one float32
    zero_points    kinds of zero-points
    group_size     the only group size; None for any that divides a row
    packing        how its codes become words
    columns        number that divides the length of a row, so that its bytes are whole words
    type, strategy, scale_dtype   fields of the weight arguments; strategy None follows the group size
    fused          True if engines fuse its matrices and give all of them the largest global or single scale
    blocks         True if blocks of rows and columns may share a scale
    bfloat16       True if compressed-tensors always dequantizes to bfloat16
    activations    names of `ACTIVATIONS` for the inputs; None for inputs that are not rounded
    """

    stored: StoredFormat
    formats: tuple[str, ...]
    scales: tuple[str, ...]
    type: str
    global_scale: bool = False
    zero_points: tuple[ZeroPoint, ...] = ("none",)
    packing: PackingName = "bits"
    group_size: int | None = None
    columns: int = 1
    strategy: str | None = None
    scale_dtype: str | None = None
    fused: bool = False
    bfloat16: bool = False
    blocks: bool = False
    activations: tuple[str | None, ...] = (None,)

    def arguments(self, scheme: Scheme, columns: int) -> dict[str, Any]:
        """Return the `weights` arguments of a config group: `scheme` for rows of `columns` weights.

        A row of exactly one group has the same bytes per group and per channel. It is described as a group,
        because some readers need one scheme for a whole model or for all experts of a layer.
        """
        size = self.group_size or scheme.group_size
        if isinstance(size, int) and columns % size:
            size = None
        grouped, blocks = isinstance(size, int), scheme.group_rows > 1
        arguments: dict[str, Any] = {
            "num_bits": scheme.format.bits,
            "type": self.type,
            "symmetric": not scheme.has_zero_point,
            "strategy": self.strategy or ("block" if blocks else "group" if grouped else size or "channel"),
            "group_size": size if grouped and not blocks else None,
            "dynamic": False,
        }
        if blocks:
            arguments["block_structure"] = [scheme.group_rows, scheme.group_columns(columns)]
        return arguments if self.scale_dtype is None else {**arguments, "scale_dtype": self.scale_dtype}

    def rounds(self, inputs: ActivationScheme | None) -> bool:
        """Return True if the format allows inputs rounded by the scheme `inputs`."""
        return (inputs and inputs.unbound) in map(activations_named, self.activations)

    def stored_as(self, module: str, kind: LayerKind, scheme: Scheme, shape: tuple[int, int]) -> Stored:
        """Return the storage, for engines, of matrices of `module` in `scheme`, each of `shape` [N, K]."""
        inputs = str(scheme.activations or "")
        return Stored.of(module, kind, self.stored.name, self.arguments(scheme, shape[1]), shape[0], inputs)


def input_arguments(scheme: ActivationScheme | None) -> dict[str, Any] | None:
    """Return the `input_activations` arguments of a config group; None if inputs are not rounded."""
    if scheme is None:
        return None
    whole = "tensor" if scheme.static else "token"
    arguments = {
        "num_bits": scheme.number_format.bits,
        "type": "int" if isinstance(scheme.number_format, IntFormat) else "float",
        "symmetric": True,
        "strategy": whole if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": not scheme.static,
    }
    return {**arguments, **_OF_SCALES[scheme.scale]}


#: What `input_activations` says of scales that are not float32. Scales of NVFP4 are found for each group, and
#: divided by the stored number.
_OF_SCALES: dict[ScaleKind, dict[str, Any]] = {
    "float32": {},
    "e8m0": {"scale_dtype": "torch.uint8"},
    "e4m3": {"strategy": "tensor_group", "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"},
}


_E8M0 = torch.uint8

_PACKED = StoredFormat("pack-quantized", "_packed")

#: Formats of compressed-tensors with quantkit's bytes. Its mxfp6 differs: a stream of 6-bit codes. vLLM 0.26
#: takes zero-points only for int4 and int8.
FORMATS_OF_COMPRESSED_TENSORS: tuple[CompressedTensorsFormat, ...] = (
    CompressedTensorsFormat(
        _PACKED,
        ("int4", "int8"),
        _MODEL_SCALES,
        "int",
        zero_points=("none", "integer"),
    ),
    CompressedTensorsFormat(_PACKED, ("int4",), _MODEL_SCALES, "int", activations=("int8", "fp8")),
    CompressedTensorsFormat(
        StoredFormat("int-quantized", "", torch.int8, codes_per_element=1),
        ("int8",),
        _MODEL_SCALES,
        "int",
        packing="bytes",
        columns=4,
        activations=(None, "int8", "int8-static"),
    ),
    CompressedTensorsFormat(_PACKED, ("int2",), _MODEL_SCALES, "int"),
    CompressedTensorsFormat(
        _PACKED, ("int3", "int5", "int6", "int7"), _MODEL_SCALES, "int", packing="stream"
    ),
    CompressedTensorsFormat(
        StoredFormat("float-quantized", "", torch.float8_e4m3fn, codes_per_element=1),
        ("fp8-e4m3",),
        _MODEL_SCALES,
        "float",
        columns=4,
        fused=True,
        blocks=True,
        activations=(None, "fp8", "fp8-g128", "fp8-static"),
    ),
    CompressedTensorsFormat(
        StoredFormat("mxfp8-quantized", "", torch.float8_e4m3fn, _E8M0, codes_per_element=1),
        ("fp8-e4m3",),
        ("e8m0",),
        "float",
        bfloat16=True,
        activations=(None, "mxfp8"),
        group_size=32,
        scale_dtype="torch.uint8",
    ),
    CompressedTensorsFormat(
        StoredFormat("mxfp4-pack-quantized", "_packed", torch.uint8, _E8M0, codes_per_element=2),
        ("fp4-e2m1",),
        ("e8m0",),
        "float",
        bfloat16=True,
        activations=(None, "mxfp4"),
        group_size=32,
        scale_dtype="torch.uint8",
    ),
    CompressedTensorsFormat(
        StoredFormat("nvfp4-pack-quantized", "_packed", torch.uint8, codes_per_element=2),
        ("fp4-e2m1",),
        ("e4m3",),
        "float",
        fused=True,
        bfloat16=True,
        global_scale=True,
        group_size=16,
        strategy="tensor_group",
        scale_dtype="torch.float8_e4m3fn",
        activations=(None, "nvfp4"),
    ),
)


@dataclass(frozen=True)
class _Case:
    """Matrices for which a format is sought: their scheme, columns per row, and True for fused experts."""

    scheme: Scheme
    columns: int
    experts: bool

    @property
    def group(self) -> int:
        """Return the number of columns of a group."""
        return self.scheme.group_columns(self.columns)

    @property
    def granularity(self) -> str:
        grouped = isinstance(self.scheme.group_size, int) and self.scheme.group_rows == 1
        return f"g{self.group}" if grouped else self.scheme.granularity

    def of_experts(self, row: CompressedTensorsFormat) -> Stored:
        """Return the storage that engines find if such matrices are experts in the format `row`."""
        return row.stored_as("", "experts", self.scheme, (self.scheme.group_rows, self.columns))


Row = CompressedTensorsFormat
Rows = Sequence[CompressedTensorsFormat]

_OLDEST_VLLM = f"{VLLM.name} {VLLM.tried[0]}"


def _has_zero_points(case: _Case) -> bool:
    """Return True if some format of compressed-tensors has this kind of zero-point."""
    return any(case.scheme.zero_point in row.zero_points for row in FORMATS_OF_COMPRESSED_TENSORS)


def _inputs_of(rows: Rows) -> str:
    """Return text that lists the activation schemes of `rows`."""
    names = dict.fromkeys(name for row in rows for name in row.activations)
    return " or ".join(str(activations_named(name) or "16-bit") for name in names)


#: Group sizes to try, the usual one first.
_SIZES = (128, 64, 32, 16)
#: Conditions that a row must fulfil, in order, and the reason if none of the remaining rows does.
_CHECKS: tuple[tuple[Callable[[Row, _Case], bool], Callable[[Rows, _Case], str]], ...] = (
    (
        lambda row, case: any(
            replace(FORMATS[name], name=case.scheme.format.name) == case.scheme.format for name in row.formats
        ),
        lambda rows, case: f"has no {case.scheme.format.name}",
    ),
    (
        lambda row, case: case.scheme.planes == 1,
        lambda rows, case: f"has no sums of {case.scheme.planes} values",
    ),
    (
        lambda row, case: case.scheme.packing == row.packing,
        lambda rows, case: (
            f"has {case.scheme.format.name} only in the packing {rows[0].packing!r}, "
            f"this is {case.scheme.packing!r}"
        ),
    ),
    (
        lambda row, case: case.scheme.zero_point in row.zero_points,
        lambda rows, case: (
            f"has no {case.scheme.zero_point} zero-points"
            + (f" of {case.scheme.format.name} that {_OLDEST_VLLM} reads" if _has_zero_points(case) else "")
        ),
    ),
    (
        lambda row, case: case.scheme.scale_type.name in row.scales,
        lambda rows, case: f"has no {case.scheme.scale_type.name} scales for {case.scheme.format.name}",
    ),
    (
        lambda row, case: case.scheme.global_scale == row.global_scale,
        lambda rows, case: (
            f"has {'no' if case.scheme.global_scale else 'only a'} global scale for {case.scheme.format.name}"
        ),
    ),
    (
        lambda row, case: row.rounds(case.scheme.activations),
        lambda rows, case: (
            f"has {case.scheme.of_weights} only with {_inputs_of(rows)} inputs, these are "
            f"{case.scheme.activations or '16-bit'}"
        ),
    ),
    (
        lambda row, case: not case.scheme.column_scale,
        lambda rows, case: "has no scales per input feature",
    ),
    (
        lambda row, case: row.blocks or case.scheme.group_rows == 1,
        lambda rows, case: f"has no scales of blocks for {case.scheme.format.name}",
    ),
    (
        lambda row, case: row.group_size in (None, case.group),
        lambda rows, case: (
            f"has {case.scheme.scale_type.name} scales for {case.scheme.format.name} only in groups of "
            f"{' or '.join(str(row.group_size) for row in rows)}, this is {case.granularity}"
        ),
    ),
    (
        lambda row, case: case.columns % case.group == 0,
        lambda rows, case: f"needs groups that divide {case.columns}, not {case.group}{_remedy(rows, case)}",
    ),
    (
        lambda row, case: case.columns % row.columns == 0,
        lambda rows, case: (
            f"stores {case.columns} codes of {case.scheme.format.name} a row without padding to whole words"
        ),
    ),
    (
        lambda row, case: not case.experts or bool(readers(case.of_experts(row))),
        lambda rows, case: (
            f"has {case.scheme.format.name} {case.granularity} with {case.scheme.scale_type.name} scales"
            f"{_inputs_beside(case)} for experts, which none of "
            f"{', '.join(engine.name for engine in ENGINES)} reads{_instead(rows, case)}"
        ),
    ),
)


def _remedy(rows: Rows, case: _Case) -> str:
    """Return text with the largest groups of `_SIZES` that divide a row of `case`, or else a whole row.

    "" if scales are of blocks, or if all `rows` have one size of groups.
    """
    if case.scheme.group_rows > 1 or all(row.group_size is not None for row in rows):
        return ""
    sizes = (size for size in _SIZES if size < case.group and case.columns % size == 0)
    return f"; --group-size {next(sizes, 'channel')} does"


def _inputs_beside(case: _Case) -> str:
    """Return text on the rounded inputs of `case`; "" if inputs are as they are."""
    return "" if case.scheme.activations is None else f" and {case.scheme.activations} inputs"


def _instead(rows: Rows, case: _Case) -> str:
    """Return what the first engine reads in place of such experts, as the end of a sentence."""
    instead = support(ENGINES[0], case.of_experts(rows[0])).instead.removesuffix(".")
    return f"; {instead[:1].lower()}{instead[1:]}"


def why_not_compressed_tensors(scheme: Scheme, columns: int, *, experts: bool = False) -> str | None:
    """Return why compressed-tensors cannot express `scheme` for rows of `columns` weights; None if it can.

    With `experts`, an engine must also be able to read it as part of fused experts.
    """
    found = _match(_Case(scheme, columns, experts))
    return f"compressed-tensors {found}" if isinstance(found, str) else None


def compressed_tensors_format(scheme: Scheme, columns: int) -> CompressedTensorsFormat:
    """Return the format of `scheme` for rows of `columns` weights; raise `FormatError` if none fits."""
    found = _match(_Case(scheme, columns, experts=False))
    if isinstance(found, str):
        raise FormatError(
            f"{scheme} for rows of {columns} is not in the container compressed-tensors: it {found}."
        )
    return found


# A model has a few kinds of matrices, and thousands of each kind.
@lru_cache(maxsize=1024)
def _match(case: _Case) -> CompressedTensorsFormat | str:
    rows: Rows = FORMATS_OF_COMPRESSED_TENSORS
    for fits, reason in _CHECKS:
        fitting = [row for row in rows if fits(row, case)]
        if not fitting:
            return reason(rows, case)
        rows = fitting
    return rows[0]


def stored_format(scheme: Scheme, columns: int, container: Container) -> StoredFormat:
    """Return how a matrix with rows of `columns` weights is stored in `container`.

    Raises `FormatError` if the container cannot express the scheme.
    """
    return QUANTKIT if container == "quantkit" else compressed_tensors_format(scheme, columns).stored


def stored_formats(container: Container) -> tuple[StoredFormat, ...]:
    """Return the formats, names and dtypes of parts, that matrices may have in a `container`.

    quantkit's own has one; compressed-tensors has those of the rows of `FORMATS_OF_COMPRESSED_TENSORS`, each
    once.
    """
    if container == "quantkit":
        return (QUANTKIT,)
    return tuple(dict.fromkeys(row.stored for row in FORMATS_OF_COMPRESSED_TENSORS))
