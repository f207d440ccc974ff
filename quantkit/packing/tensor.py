"""Packed tensors: a weight matrix as words, scales and zero-points."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quantkit.errors import FormatError
from quantkit.packing.schemes import Scheme


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Weight [N, K] in the storage layout of `docs/format.md`.

    `tensors` are the parts named in `scheme.part_names`, in that order. A scheme has some of these parts:

    packed      int32 [N, W]   codes, packed along K by `scheme.packing`
    scale       scale dtype [N, groups * planes]   plane p of group g in column g * planes + p; or [1]; or,
                                                   of blocks, [blocks, groups]
    zero_point  [R, groups]   as `scheme.zero_point_type` stores them: codes, packed along N, or floats
    global_scale  float32 [1]   divides all scales
    column_scale  float [K]   multiplies all weights of an input feature
    codebook    float32 [2**bits]   the value of each code
    """

    tensors: tuple[torch.Tensor, ...]
    scheme: Scheme
    shape: tuple[int, int]
    #: Kernel layouts that `quantkit.kernels` built from the words; owned by that part, never stored.
    kernel_cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # How inputs are rounded belongs to the linear.
        object.__setattr__(self, "scheme", self.scheme.of_weights)
        if min(self.shape) < 1:
            raise FormatError(f"a packed tensor has at least one row and one column, got {self.shape}.")
        names = self.scheme.part_names
        if len(self.tensors) != len(names):
            raise FormatError(
                f"a {self.scheme} tensor has the parts {', '.join(names)}; got {len(self.tensors)} tensors."
            )
        # Compute the token now, because torch.compile cannot trace its computation.
        _ = self.scheme.token
        expected = self.scheme.storage_shapes(self.shape)
        for part, tensor in zip(names, self.tensors, strict=True):
            dtype, shape = expected[part]
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise FormatError(
                    f"part {part!r} of a {self.scheme} tensor of shape {self.shape} is "
                    f"{tensor.dtype} {tuple(tensor.shape)}; expected {dtype} {shape}."
                )

    def __repr__(self) -> str:
        bits, device = self.bits_per_weight, str(self.device)
        return f"PackedTensor({self.shape}, {str(self.scheme)!r}, {bits:.4g} bits per weight, {device!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles hold only stored parts; kernels build their layouts again.
        return {**self.__dict__, "kernel_cache": {}}

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, torch.Tensor | None], scheme: Scheme, shape: tuple[int, int]
    ) -> "PackedTensor":
        """Create a tensor from the parts of `scheme`, by name; None counts as missing."""
        given = {part: tensor for part, tensor in parts.items() if tensor is not None}
        if given.keys() != set(scheme.part_names):
            raise FormatError(
                f"a {scheme} tensor has the parts {', '.join(scheme.part_names)}; got {', '.join(given)}."
            )
        return cls(tuple(given[part] for part in scheme.part_names), scheme, shape)

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        scheme: Scheme,
        global_scale: torch.Tensor | None = None,
        *,
        column_scale: torch.Tensor | None = None,
        codebook: torch.Tensor | None = None,
    ) -> "PackedTensor":
        """Pack codes (uint8 [N, K]), scales in their stored shape, and zero-points [N, groups].

        Scales are rounded to the scale dtype. Zero-points have `scheme.zero_point_dtype`, uint8 if stored as
        codes. Other parts that the scheme has are stored unchanged: `global_scale` [1], `column_scale` [K]
        and `codebook` [2**bits].
        """
        if codes.ndim != 2:
            raise FormatError(f"codes of a packed tensor are [N, K], got shape {tuple(codes.shape)}.")
        rows, columns = codes.shape
        # Checked before packing: packed zero-points of 33 and of 40 rows have the same shape.
        if zero_point is not None and tuple(zero_point.shape) != (rows, scheme.groups(columns)):
            raise FormatError(
                f"zero-points of {rows} rows of {columns} under {scheme} have shape "
                f"{(rows, scheme.groups(columns))}, got {tuple(zero_point.shape)}."
            )
        rounded = scheme.scale_type.round(scale)
        if not bool(torch.isfinite(rounded).all()):
            raise FormatError(
                f"scales up to {scale.abs().max().item():.3g} are not finite as {scheme.scale_dtype}; "
                "choose a scale dtype with more range, such as bfloat16, or keep the layer dense."
            )
        parts = {
            "packed": scheme.pack(codes),
            # `clone`, because `contiguous` leaves a single column with the stride of its matrix.
            "scale": rounded.to(scheme.scale_dtype).clone(memory_format=torch.contiguous_format),
            "zero_point": None if zero_point is None else store_zero_points(zero_point, scheme),
            "global_scale": global_scale,
            "column_scale": column_scale,
            "codebook": codebook,
        }
        return cls.from_parts(parts, scheme, (rows, columns))

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stored tensors by part name, without the logical shape."""
        return zip(self.scheme.part_names, self.tensors, strict=True)

    def part(self, name: str) -> torch.Tensor | None:
        """Return the part called `name`; None if the scheme has no such part."""
        names = self.scheme.part_names
        return self.tensors[names.index(name)] if name in names else None

    @property
    def words(self) -> torch.Tensor:
        return self.tensors[0]

    @property
    def scale(self) -> torch.Tensor:
        return self.tensors[1]

    def codes(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the codes of rows `start:stop`, uint8 [rows, K]."""
        return self.scheme.unpack(self.words[start:stop], self.shape[1])

    def row_scale(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the stored scales of rows `start:stop`, [rows, groups * planes]; repeats shared scales."""
        return self.scheme.row_scale(self.scale, self.shape[0], start, stop)

    def group_scale(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the multipliers of the values of rows `start:stop`, float32 [rows, groups * planes]."""
        return self._scaled(self.row_scale(start, stop))

    def _scaled(self, scale: torch.Tensor) -> torch.Tensor:
        scale, divisor = scale.to(torch.float32), self.part("global_scale")
        return scale if divisor is None else scale / divisor

    def zero_points(self) -> torch.Tensor | None:
        """Return zero-points or minimums, [N, groups] of `scheme.zero_point_dtype`; None if symmetric."""
        stored = self.part("zero_point")
        storage = self.scheme.zero_point_type.storage
        if stored is None or storage is None:
            return None
        return storage.unpack(stored, self.shape[0], self.scheme.format.bits)

    def zeros_in_codes(self) -> torch.Tensor | None:
        """Return what is subtracted from codes, [N, groups]; None if the scheme is symmetric.

        Zero-points keep their dtype. A minimum becomes float32 -minimum / scale, within its rounding.
        """
        zeros = self.zero_points()
        return None if zeros is None else self.scheme.zero_point_type.in_codes(zeros, self.group_scale())

    def dequantize(
        self, dtype: torch.dtype = torch.float32, *, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Return the weights of rows `start:stop`, `dtype` [rows, K]: products in float32, rounded once."""
        zeros = self.zero_points()
        weights = self.without_column_scale(start, stop, None if zeros is None else zeros[start:stop])
        return self._with_column_scale(weights).to(dtype)

    def dequantize_rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights of rows `ids` (int64 [n]), `dtype` [n, K], equal to `dequantize` bit by bit.

        Reads no other rows, and does not wait for the device.
        """
        rows = self.scale.expand(self.shape[0], 1) if self.scheme.per_tensor else self.scale
        # View 8-bit scales as bytes: torch cannot select rows of such floats.
        stored = rows.view(torch.uint8) if rows.itemsize == 1 else rows
        # `group_rows` rows share a scale.
        scale = self._scaled(stored.index_select(0, ids // self.scheme.group_rows).view(rows.dtype))
        zeros, storage = self.part("zero_point"), self.scheme.zero_point_type.storage
        if zeros is not None and storage is not None:
            zeros = storage.take(zeros, self.shape[0], self.scheme.format.bits, ids)
        codes = self.scheme.unpack(self.words.index_select(0, ids), self.shape[1])
        weights = dequantize_codes(codes, scale, zeros, self.scheme, self.part("codebook"))
        return self._with_column_scale(weights).to(dtype)

    def _with_column_scale(self, weights: torch.Tensor) -> torch.Tensor:
        columns = self.part("column_scale")
        return weights if columns is None else weights.mul_(columns.to(torch.float32))

    def without_column_scale(self, start: int, stop: int | None, zeros: torch.Tensor | None) -> torch.Tensor:
        """Return weights of rows `start:stop`, float32 [rows, K], before the column scale is applied.

        `zeros` are these rows of `zero_points()`.
        """
        codes, scale = self.codes(start, stop), self.group_scale(start, stop)
        return dequantize_codes(codes, scale, zeros, self.scheme, self.part("codebook"))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all stored parts, 16 for the logical shape included."""
        return sum(tensor.numel() * tensor.itemsize for _, tensor in self.parts()) + 16

    @property
    def bits_per_weight(self) -> float:
        """Return all stored bits per logical weight: words, padding, scales, zero-points and shape."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @property
    def device(self) -> torch.device:
        return self.words.device

    def to(self, device: torch.device | str) -> "PackedTensor":
        """Return this tensor on `device`, without a copy if it already is on `device`."""
        if self.words.to(device) is self.words:
            return self
        return replace(self, tensors=tuple(part.to(device) for part in self.tensors), kernel_cache={})


def dequantize_codes(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    codebook: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize codes (uint8 [N, K]) to float32 [N, K].

    `scale` is [N, groups * planes], `zero_point` [N, groups] or None. `codebook` float32 [2**bits] has the
    values of codes of a fitted format; None for others.
    """
    rows, columns = codes.shape
    # Groups of equal length broadcast; a shorter last group needs one scale per weight.
    even = columns % scheme.group_columns(columns) == 0
    groups = scheme.groups(columns)
    grouped = (rows, groups, columns // groups) if even else (rows, columns)

    def spread_out(per_group: torch.Tensor) -> torch.Tensor:
        wide = per_group.to(torch.float32)
        return wide.unsqueeze(2) if even else spread(wide, columns, scheme)

    if zero_point is not None:
        values = codes.to(torch.float32).view(grouped)
        weights_of = scheme.zero_point_type.weights
        return weights_of(values, spread_out(scale), spread_out(zero_point)).view(rows, columns)
    weights: torch.Tensor | None = None
    for plane, of_plane in enumerate(plane_codes(codes, scheme)):
        decoded = scheme.format.decode(of_plane) if codebook is None else look_up(of_plane, codebook)
        product = decoded.view(grouped).mul_(spread_out(scale[:, plane :: scheme.planes]))
        weights = product if weights is None else weights.add_(product)
    assert weights is not None
    return weights.view(rows, columns)


def plane_codes(codes: torch.Tensor, scheme: Scheme) -> Iterator[torch.Tensor]:
    """Yield the codes of each plane, uint8 [...], from `codes` (uint8 [...]), plane 0 in the lowest bits."""
    bits = scheme.format.bits
    if scheme.planes == 1:
        yield codes
        return
    for plane in range(scheme.planes):
        yield (codes >> (plane * bits)) & ((1 << bits) - 1)


def look_up(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values[codes]`, for codes uint8 of any shape."""
    # index_select is several times faster than indexing with a tensor.
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def spread(per_group: torch.Tensor, columns: int, scheme: Scheme) -> torch.Tensor:
    """Repeat one value per group, [N, groups], to one per weight, broadcastable to [N, columns]."""
    if per_group.shape[1] == 1:
        return per_group
    return per_group.repeat_interleave(scheme.group_columns(columns), dim=1)[:, :columns]


def quantize_units(
    units: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes (uint8 [...]) and values (float32 [...]) nearest to `units` (float32 [...]).

    Units and values are weights divided by their scale. `zero_point` broadcasts to `units`.
    """
    zero = None if zero_point is None else zero_point.to(units.dtype)
    return scheme.zero_point_type.quantize(scheme.format, units, zero)


def store_zero_points(zero_point: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Convert zero-points [N, groups], in their dtype in memory, to the stored tensor [R, groups].

    R is N, or for packed codes the number of int32 words that N codes take.
    """
    storage = scheme.zero_point_type.storage
    assert storage is not None
    return storage.pack(zero_point, scheme.scale_dtype, scheme.format.bits)
