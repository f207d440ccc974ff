"""Methods: from a weight to codes, scales and zero-points.

A method is a composition of steps, one row of `METHODS`, or two of them: "smoothquant,gptq" scales input
features as `smoothquant` and rounds as `gptq`. This module runs methods without data on any weight. Methods
with data need the Hessian of a linear's inputs and run in `calibrate/quantize_with_hessian.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from quantkit.calibrate import rank_one, residual_terms, tensor_scale
from quantkit.calibrate.gptq import NEAREST, Gptq, Nearest, NearestRefitted
from quantkit.calibrate.hqq import hqq
from quantkit.calibrate.input_error import InputErrorCorrection
from quantkit.calibrate.learned.latent_linear import EndToEnd
from quantkit.calibrate.learned.signround import SignRound
from quantkit.calibrate.linear_stats import LinearStats, Need
from quantkit.calibrate.parameters import TensorParameters, fit_parameters
from quantkit.calibrate.scale_search import ScaleZero, mse, rounded_scale, rtn
from quantkit.calibrate.scaling import AWQ, SMOOTHQUANT, InputScaling
from quantkit.calibrate.squares import squared_norm, sum_of_squares
from quantkit.calibrate.steps import Refinement, Rounding, ScaleSearch, Step, Transform
from quantkit.calibrate.summaries import SUMMARIES
from quantkit.errors import FormatError, UsageError, unknown_name
from quantkit.packing.packings import PackingName
from quantkit.packing.schemes import GroupSize, Scheme, scheme
from quantkit.packing.tensor import PackedTensor, quantize_units, store_zero_points
from quantkit.packing.zero_points import ZeroPoint

#: Weights per piece on a CPU, so that their float32 copies stay in a core's cache. On a GPU only the memory
#: of the search, up to 200 bytes a weight, is a limit.
CHUNK_WEIGHTS = 1 << 18
GPU_CHUNK_WEIGHTS = 1 << 23

#: Parameters of a tensor whose rows share nothing.
ALONE = TensorParameters()

#: Names of statistics in `quantkit methods`.
_STATISTICS: dict[Need, str] = {
    "hessian": "Hessian",
    "largest_input": "largest input",
    "input_error": "input error",
    "logits": "logits",
}


@dataclass(frozen=True)
class Method:
    """Way to quantize a linear, composed of steps (`calibrate/steps.py`).

    transforms     change the weights
    scale_search   chooses scales and zero-points
    rounding       chooses codes; any rounding except to nearest needs data
    refine         improves the codes of all linears of a block together
    distill        improves codes, scales and norms of the whole model
    instead        name of the method to take for schemes that the steps lack; None refuses them
    alone          name of the method to take for some linears of a model, where other tensors must stay; None
                   if this one changes none
    """

    name: str
    scale_search: ScaleSearch
    rounding: Rounding = NEAREST
    transforms: tuple[Transform, ...] = ()
    refine: Refinement | None = None
    distill: EndToEnd | None = None
    instead: str | None = None
    alone: str | None = None

    def __post_init__(self) -> None:
        assert self.rounding.needs or isinstance(self.rounding, Nearest), "quantize_rows rounds to nearest"
        changes_others = self.distill is not None or self.input_scaling is not None
        assert (self.alone is not None) == changes_others, "a method that changes other tensors has another"

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return all steps, in order."""
        last = [step for step in (self.refine, self.distill) if step is not None]
        return (*self.transforms, self.scale_search, self.rounding, *last)

    @property
    def needs(self) -> frozenset[Need]:
        """Return the statistics of calibration data that the steps need."""
        return frozenset(need for step in self.steps for need in step.needs)

    @property
    def summary(self) -> str:
        """Return one line of text on how the method chooses scales and codes."""
        return "; then ".join(SUMMARIES[name].line for name in self.name.split(","))

    @property
    def needs_data(self) -> bool:
        """Return True if the method needs calibration data."""
        return bool(self.needs)

    @property
    def input_scaling(self) -> InputScaling | None:
        """Return the transform that scales input features, or None."""
        return next((step for step in self.transforms if isinstance(step, InputScaling)), None)

    def changes_target(self, stats: LinearStats) -> bool:
        """Return True if `target` returns other weights than its `rows`, given these statistics."""
        return any(step.changes_target(stats) for step in self.transforms)

    def target(self, rows: torch.Tensor, stats: LinearStats) -> torch.Tensor:
        """Return the weights (float32 [n, K]) to quantize in place of `rows`."""
        for step in self.transforms:
            rows = step.target(rows, stats)
        return rows

    def note(self, stats: LinearStats) -> str | None:
        """Return the `note` of the last step that skipped work, with the reason; None without."""
        notes = (step.note(stats) for step in reversed(self.steps))
        return next((note for note in notes if note is not None), None)

    def in_words(self) -> dict[str, str]:
        """Return the text of each kind of step, for `quantkit methods`."""
        last = [str(step) for step in (self.refine, self.distill) if step is not None]
        return {
            "transform": ", ".join(step.name for step in self.transforms) or "none",
            "statistics": ", ".join(text for need, text in _STATISTICS.items() if need in self.needs)
            or "none",
            "grid": str(self.scale_search),
            "rounding": ", ".join([str(self.rounding), *last]),
        }

    def lacks(self, chosen: Scheme) -> list[str]:
        """Return the properties of a scheme that no step can choose, in words."""
        return [what for step in self.steps for what in step.lacks(chosen)]

    def suited(self, chosen: Scheme | None) -> "Method":
        """Return this method, or the one `instead` of it for a scheme that its steps lack."""
        if self.instead is None or chosen is None or not self.lacks(chosen):
            return self
        return method_named(self.instead)

    def check(self, chosen: Scheme) -> None:
        """Raise `FormatError` if the method cannot quantize to a scheme."""
        if (reason := chosen.zero_point_type.why_not_searched) is not None:
            raise FormatError(f"no method quantizes to {chosen}: {reason}.")
        for what in self.lacks(chosen):
            rows = [row for row in METHODS.values() if what not in row.lacks(chosen)]
            able = ", ".join(row.name + ",distill" * bool(self.distill and not row.distill) for row in rows)
            raise FormatError(
                f"method {self.name!r} has no way to choose {what}, which {chosen} has; take one of {able}."
            )


_MSE = ScaleSearch("mse", mse, residual_terms.search, tensor_scale.search)
_WEIGHTED_MSE = ScaleSearch("mse", mse, weighted=True)

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("rtn", ScaleSearch("rtn", rtn, residual_terms.plain, tensor_scale.plain)),
        Method("mse", _MSE),
        Method("hqq", ScaleSearch("hqq", hqq, ints_only=True)),
        Method("imatrix", _WEIGHTED_MSE),
        # Its rounding is no method without the scaling.
        Method("awq", _WEIGHTED_MSE, NearestRefitted(), transforms=(AWQ,), alone="gptq"),
        Method("smoothquant", _WEIGHTED_MSE, transforms=(SMOOTHQUANT,), alone="imatrix"),
        Method("gptq", _WEIGHTED_MSE, Gptq()),
        Method(
            "best",
            _WEIGHTED_MSE,
            Gptq(sweeps=3),
            transforms=(InputErrorCorrection(),),
        ),
        Method(
            "signround",
            _WEIGHTED_MSE,
            Gptq(sweeps=3),
            transforms=(InputErrorCorrection(),),
            refine=SignRound(),
        ),
        Method(
            "distill",
            _WEIGHTED_MSE,
            Gptq(sweeps=3),
            transforms=(InputErrorCorrection(),),
            distill=EndToEnd(),
            instead="mse,distill",
            alone="best",
        ),
    )
}


@cache
def method_named(name: str) -> Method:
    """Return the method called `name`, or "A,B": the scaling of input features of A before the steps of B.

    B has no input error correction: that compares inputs with those of the original model, which are not
    scaled. "A,distill" distills the result of A. Raises `UsageError` with a list of all names if one is
    unknown, or if two cannot be combined.
    """
    first, _, last = name.rpartition(",")
    if first and last in METHODS and METHODS[last].distill and METHODS.get(first) != METHODS[last]:
        start = method_named(first)
        return replace(start, name=name, distill=METHODS[last].distill, alone=start.alone or first)
    names = name.split(",")
    for one in names:
        if one not in METHODS:
            raise unknown_name("method", one, METHODS)
    if len(names) == 1:
        return METHODS[name]
    scaling = [row.name for row in METHODS.values() if row.input_scaling is not None]
    rounding = [
        row.name
        for row in METHODS.values()
        if row.needs_data and row.name not in scaling and "input_error" not in row.needs
    ]
    if len(names) != 2 or names[0] not in scaling or names[1] not in rounding:
        raise UsageError(
            f"methods {name!r} cannot be combined: the first of two is {' or '.join(scaling)}, the second "
            f"{' or '.join(rounding)}."
        )
    scales, rounds = (METHODS[one] for one in names)
    transforms = (*scales.transforms, *rounds.transforms)
    return replace(rounds, name=name, transforms=transforms, alone=rounds.name)


@dataclass(frozen=True)
class QuantizedRows:
    """Quantized rows of a weight: words int32 [n, W], scale [n, groups * planes], zero-points [n, groups].

    Blocks of rows share a row of `scale`; it is None if the tensor has a single one. `squared_error` and
    `squared_norm` are sums over the rows, of (weight - stored)^2 and weight^2.
    """

    words: torch.Tensor
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    squared_error: float
    squared_norm: float


def quantize_rows(
    rows: torch.Tensor, scheme: Scheme, method: Method, parameters: TensorParameters = ALONE
) -> QuantizedRows:
    """Quantize rows ([n, K], any float dtype) of a weight.

    A result row depends on its row and `parameters` only. If blocks of rows share scales, it depends on its
    block; the first row starts a block. Raises `FormatError` if a weight is NaN or
    infinite, or a scale overflows its dtype.
    """
    assert scheme.per_tensor == (parameters.scale is not None)
    # Other strides would sum in another order.
    weights = rows.to(torch.float32).contiguous()
    norm = squared_norm(weights)
    weights, bound = parameters.normalised(weights), parameters.bind(scheme)
    full = len(weights) // scheme.group_rows * scheme.group_rows
    # A shorter last block or group is fitted separately: padding would shift its statistics.
    parts = [
        _quantize_blocks(part, min(scheme.group_rows, len(part)), bound, method, parameters)
        for part in (weights[:full], weights[full:])
        if len(part)
    ]
    codes, scales, zeros, errors = zip(*parts, strict=True)
    return QuantizedRows(
        scheme.pack(torch.cat(codes) if len(codes) > 1 else codes[0]),
        None if scheme.per_tensor else torch.cat(scales).to(scheme.scale_dtype),
        torch.cat(zeros).to(scheme.zero_point_dtype) if scheme.has_zero_point else None,
        sum(errors) / parameters.global_scale**2,
        norm,
    )


def _quantize_blocks(
    weights: torch.Tensor, rows: int, scheme: Scheme, method: Method, parameters: TensorParameters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float]:
    """Quantize weights float32 [B * rows, K]; `rows` rows share scales.

    Returns codes uint8 [B * rows, K], scales float32 [B, S], zero-points [B, G] or None, and the squared
    error.
    """
    count, columns = weights.shape
    blocks = count // rows
    codes, scales, zeros, error = [], [], [], 0.0
    for span, width in scheme.group_spans(columns):
        of_blocks = weights[:, span].reshape(blocks, rows, -1, width).transpose(1, 2)
        groups = of_blocks.reshape(-1, rows * width)
        importance = None
        if parameters.column_scale is not None:
            squares = parameters.column_scale[span].float().square()
            importance = squares.expand(count, -1).reshape(-1, width)
        quantized = _quantize_groups(groups, importance, scheme, method, parameters)
        error += float(quantized.squared_error.sum())
        codes.append(quantized.codes.view(of_blocks.shape).transpose(1, 2).reshape(count, -1))
        scales.append(quantized.scale.reshape(blocks, -1))
        if quantized.zero_point is not None:
            zeros.append(quantized.zero_point.view(blocks, -1))
    whole = torch.cat(codes, 1) if len(codes) > 1 else codes[0]
    return whole, torch.cat(scales, 1), torch.cat(zeros, 1) if zeros else None, error


@dataclass(frozen=True)
class _QuantizedGroups:
    """Codes uint8 [R, g], scales float32 [R, planes], zero-points [R, 1] or None, squared errors [R, 1]."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    squared_error: torch.Tensor


def _quantize_groups(
    groups: torch.Tensor,
    importance: torch.Tensor | None,
    scheme: Scheme,
    method: Method,
    parameters: TensorParameters,
) -> _QuantizedGroups:
    """Quantize groups (float32 [R, g]); `importance` ([R, g], None for 1) weights squared errors."""
    if scheme.planes > 1:
        method.check(scheme)
        assert method.scale_search.fit_planes is not None
        scales = method.scale_search.fit_planes(groups, scheme, importance)
        codes, values = residual_terms.encode(groups, scales, scheme)
        residual = groups - values
        error = sum_of_squares(residual if importance is None else residual * importance.sqrt())
        return _QuantizedGroups(codes, scales, None, error)
    grid = parameters.scale_zero(len(groups), groups.device) or method.scale_search.fit(groups, scheme)
    empty = grid.scale == 0
    unit = torch.where(empty, 1.0, grid.scale)
    units = groups / unit
    codes, values = quantize_units(units, grid.zero_point, scheme)
    if importance is None:
        # A scale of 0 stores zeros: the error is the whole group.
        stored = values * ~empty if empty.any() else values
        error = sum_of_squares(units.sub_(stored)) * unit.double().square()
        return _QuantizedGroups(codes, grid.scale, grid.zero_point, error)
    return _refitted(groups, importance, grid, scheme)


def _refitted(
    groups: torch.Tensor, importance: torch.Tensor, grid: ScaleZero, scheme: Scheme
) -> _QuantizedGroups:
    """Quantize each group (float32 [R, g]) with `grid`, or with its scale refitted if that is better.

    Errors are weighted by `importance`, float32 [R, g].
    """

    def quantized(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        units = groups / torch.where(scale == 0, 1.0, scale)
        codes, values = quantize_units(units, grid.zero_point, scheme)
        return codes, values, rank_one.weighted_error(groups, values, importance, scale)

    codes, values, error = quantized(grid.scale)
    fitted = rounded_scale(rank_one.refit(groups, values, importance, grid.scale), scheme)
    fitted_codes, _, fitted_error = quantized(fitted)
    # NaN, from a fitted scale that overflows its dtype, compares as not better.
    better = fitted_error < error
    return _QuantizedGroups(
        torch.where(better, fitted_codes, codes),
        torch.where(better, fitted, grid.scale),
        grid.zero_point,
        torch.where(better, fitted_error, error),
    )


def quantize_tensor(
    weight: torch.Tensor,
    format: str | Scheme = "int4",
    *,
    group_size: GroupSize = None,
    method: str = "mse",
    zero_point: ZeroPoint = "none",
    scale_dtype: torch.dtype | None = None,
    packing: PackingName = "bits",
) -> PackedTensor:
    """Quantize one weight [N, K] (float16, bfloat16, float32 or float64) and pack it.

    format        format name or a whole `Scheme`; how its linears round their inputs is not kept
    group_size    weights per scale; "channel" is one scale per row, "tensor" a single one
    method        name of a method without data
    zero_point    "none", "integer", "float" or another kind of `ZERO_POINTS`
    scale_dtype   dtype of stored scales; None is bfloat16, or float16 for a float16 weight
    packing       name of a row of `PACKINGS`, such as "radix", which stores ternary codes in 1.6 bits

    Runs on the weight's device and returns a tensor there. Raises `FormatError` for a weight that is not a
    non-empty floating-point matrix, holds NaN or infinity, or whose scales overflow `scale_dtype`. It is
    also raised for a scheme that the method cannot fit. Raises `UsageError` for a method that is unknown or
    needs data, and for other options of the grid beside a `Scheme`.
    """
    if not isinstance(weight, torch.Tensor):
        raise FormatError(f"the weight is a {type(weight).__name__}; expected a torch.Tensor [N, K].")
    if weight.dim() != 2 or not weight.numel() or not weight.is_floating_point() or weight.is_meta:
        raise FormatError(
            f"the weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}; "
            "expected a non-empty floating-point matrix [N, K] with data."
        )
    if isinstance(format, Scheme):
        if (group_size, zero_point, scale_dtype, packing) != (None, "none", None, "bits"):
            raise UsageError(
                "a Scheme says all about the grid; leave out group_size, zero_point, scale_dtype and "
                "packing, or give the format's name."
            )
        chosen = format
    else:
        chosen = scheme(
            format,
            group_size=group_size,
            zero_point=zero_point,
            scale_dtype=scale_dtype,
            packing=packing,
            weight_dtype=weight.dtype,
        )
    rows, columns = weight.shape
    chosen = chosen.for_columns(columns)
    limit = CHUNK_WEIGHTS if weight.device.type == "cpu" else GPU_CHUNK_WEIGHTS
    chosen_method = method_named(method)
    chosen_method.check(chosen)
    if chosen_method.needs_data:
        raise UsageError(
            f"method {method!r} needs to know the inputs of a weight, which quantize_tensor does not; "
            "quantize the model with calibration data, or take a method without data, such as mse."
        )
    chunks = torch.split(weight.detach(), chosen.whole_blocks(limit // columns))
    search = chosen_method.scale_search
    shared = fit_parameters(lambda: iter(chunks), (rows, columns), chosen, search.fit, search.fit_tensor)
    pieces = [quantize_rows(chunk, chosen, chosen_method, shared) for chunk in chunks]
    return packed_rows(pieces, shared, chosen, (rows, columns))


def packed_rows(
    pieces: Sequence[QuantizedRows], parameters: TensorParameters, scheme: Scheme, shape: tuple[int, int]
) -> PackedTensor:
    """Assemble the packed tensor [N, K] from all its rows, in order, and their shared parameters."""
    parts = parts_of(pieces, scheme)
    device = parts["packed"].device
    parts |= {part: tensor.to(device) for part, tensor in parameters.parts(scheme).items()}
    return PackedTensor.from_parts(parts, scheme, shape)


def parts_of(pieces: Sequence[QuantizedRows], scheme: Scheme) -> dict[str, torch.Tensor]:
    """Return the stored parts of consecutive rows of a weight, without those that exist once for all rows."""
    parts = {"packed": torch.cat([piece.words for piece in pieces])}
    scales = [piece.scale for piece in pieces if piece.scale is not None]
    if scales:
        parts["scale"] = torch.cat(scales)
    zeros = [piece.zero_point for piece in pieces if piece.zero_point is not None]
    if zeros:
        parts["zero_point"] = store_zero_points(torch.cat(zeros), scheme)
    return parts
