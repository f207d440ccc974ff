"""Packed tensors: a weight matrix as words, scales and zero-points."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quantkit.errors import FormatError
from quantkit.packing.formats import IntFormat
from quantkit.packing.schemes import Scheme
from quantkit.packing.words import pack, unpack


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A weight [N, K] in the storage layout of `docs/format.md`.

    words       int32 [N, W]   codes, packed along K by `scheme.packer`
    scale       scale dtype [N, groups]
    zero_point  int32 [words_per_row(N, bits), groups]   codes, packed along N; or float [N, groups]; or None
    global_scale  float32 [1], by which all scales are divided, or None
    """

    words: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme
    shape: tuple[int, int]
    global_scale: torch.Tensor | None = None
    #: What `quantkit.kernels` built from the words for a faster kernel; owned by it, never stored.
    kernel_cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise FormatError(f"a packed tensor has at least one row and one column, got {self.shape}.")
        if (self.zero_point is None) != (self.scheme.zero_point == "none"):
            raise FormatError(
                f"scheme {self.scheme} has zero_point={self.scheme.zero_point!r} but a zero-point "
                f"tensor was {'not ' if self.zero_point is None else ''}given."
            )
        if (self.global_scale is None) == self.scheme.global_scale:
            raise FormatError(
                f"scheme {self.scheme} has global_scale={self.scheme.global_scale} but a global scale was "
                f"{'not ' if self.global_scale is None else ''}given."
            )
        expected = self.scheme.storage_shapes(self.shape)
        for part, tensor in self.parts():
            dtype, shape = expected[part]
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise FormatError(
                    f"part {part!r} of a {self.scheme} tensor of shape {self.shape} is "
                    f"{tensor.dtype} {tuple(tensor.shape)}; expected {dtype} {shape}."
                )

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        scheme: Scheme,
        global_scale: torch.Tensor | None = None,
    ) -> "PackedTensor":
        """Pack codes (uint8 [N, K]), scales as they are stored ([N, groups]) and zero-points ([N, groups]).

        Integer zero-points are codes, uint8.
        """
        if codes.ndim != 2:
            raise FormatError(f"codes of a packed tensor are [N, K], got shape {tuple(codes.shape)}.")
        rows, columns = codes.shape
        # Packed zero-points of 33 and of 40 rows have one shape, so the check on the parts is too late.
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
        return cls(
            scheme.packer.pack(codes, scheme.format),
            # A clone, as `contiguous` leaves a single column with the stride of the matrix it came from.
            rounded.to(scheme.scale_dtype).clone(memory_format=torch.contiguous_format),
            None if zero_point is None else store_zero_points(zero_point, scheme),
            scheme,
            (rows, columns),
            global_scale,
        )

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The stored tensors by part name: packed, scale and, where there are, zero_point, global_scale."""
        yield "packed", self.words
        yield "scale", self.scale
        if self.zero_point is not None:
            yield "zero_point", self.zero_point
        if self.global_scale is not None:
            yield "global_scale", self.global_scale

    def codes(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Codes of rows `start:stop`, uint8 [rows, K]."""
        scheme = self.scheme
        return scheme.packer.unpack(self.words[start:stop], scheme.format, self.shape[1])

    def group_scale(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """What the values of rows `start:stop` are multiplied by, float32 [rows, groups]."""
        scale = self.scale[start:stop].to(torch.float32)
        return scale if self.global_scale is None else scale / self.global_scale

    def zero_points(self) -> torch.Tensor | None:
        """What is subtracted from codes, [N, groups]: uint8 codes, or floats; None for a symmetric scheme."""
        if self.zero_point is None or self.scheme.zero_point == "float":
            return self.zero_point
        return unpack(self.zero_point.T.contiguous(), self.scheme.format.bits, self.shape[0]).T

    def dequantize(
        self, dtype: torch.dtype = torch.float32, *, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Weights of rows `start:stop`, `dtype` [rows, K]: exact products in float32, rounded once."""
        zero_point = self.zero_points()
        return dequantize_codes(
            self.codes(start, stop),
            self.group_scale(start, stop),
            None if zero_point is None else zero_point[start:stop],
            self.scheme,
        ).to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored parts, the 16 of the logical shape included."""
        return sum(tensor.numel() * tensor.itemsize for _, tensor in self.parts()) + 16

    @property
    def bits_per_weight(self) -> float:
        """All stored bits over the logical weights: words, padding, scales, zero-points and shape."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @property
    def device(self) -> torch.device:
        return self.words.device

    def to(self, device: torch.device | str) -> "PackedTensor":
        """The same tensor on `device`; itself when it is there already."""
        words = self.words.to(device)
        if words is self.words:
            return self
        return replace(
            self,
            words=words,
            scale=self.scale.to(device),
            zero_point=None if self.zero_point is None else self.zero_point.to(device),
            global_scale=None if self.global_scale is None else self.global_scale.to(device),
            kernel_cache={},
        )


def dequantize_codes(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> torch.Tensor:
    """float32 [N, K] from codes (uint8 [N, K]), scales and zero-points ([N, groups])."""
    if zero_point is None:
        values = scheme.format.decode(codes)
    else:
        values = codes.to(torch.float32).sub_(spread(zero_point.float(), codes.shape[1], scheme))
    return values.mul_(spread(scale.float(), codes.shape[1], scheme))


def spread(per_group: torch.Tensor, columns: int, scheme: Scheme) -> torch.Tensor:
    """Repeat one value per group, [N, groups], to one per weight, broadcastable to [N, columns]."""
    if scheme.group_size is None:
        return per_group
    return per_group.repeat_interleave(scheme.group_size, dim=1)[:, :columns]


def encode_groups(
    groups: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> torch.Tensor:
    """Codes (uint8 [R, g]) of groups (float32 [R, g]) on the grids `scale`, `zero_point` ([R, 1]).

    A zero scale stands for a group of zeros; its codes are those of zero weights.
    """
    units = groups / torch.where(scale == 0, 1.0, scale)
    return quantize_units(units, zero_point, scheme)[0]


def quantize_units(
    units: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and values (float32) nearest to `units`, weights over their scale, float32."""
    if zero_point is None:
        return scheme.format.quantize(units)
    assert isinstance(scheme.format, IntFormat)
    if scheme.zero_point == "float":
        return scheme.format.quantize_offset(units, zero_point.to(units.dtype))
    return scheme.format.quantize_affine(units, zero_point.to(units.dtype))


def store_zero_points(zero_point: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Zero-points [N, groups] as they are stored: codes packed along N, or floats."""
    if scheme.zero_point == "float":
        return zero_point.to(scheme.zero_point_dtype).clone(memory_format=torch.contiguous_format)
    # A clone, as `contiguous` leaves a single column with the stride of the matrix it came from.
    packed = pack(zero_point.T.contiguous(), scheme.format.bits)
    return packed.T.clone(memory_format=torch.contiguous_format)
