"""Quantized KV cache behind the cache interface of transformers.

Each token is quantized once, when it arrives, so the stored bits do not depend on how tokens were batched.
Keys of a head have a few features that are large in all tokens. A Hadamard matrix spreads them over the head
before quantizing and is undone after (QuaRot, arXiv 2404.00456). Attention reads dequantized keys and values,
one layer at a time, in the dtype of the model.

    append   k [B, H, t, D] -> k @ R -> quantize -> parts (stored tensors: words, scales, ...)
    read     parts -> dequantize -> @ R^T -> k [B, H, T, D]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from quantkit.calibrate.hadamard import Rotation
from quantkit.calibrate.methods import quantize_tensor
from quantkit.errors import FormatError, UsageError, unknown_name
from quantkit.packing.presets import KV_SCALES
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.cache.kv_formats import KV_FORMATS
from quantkit.runtime.cache.stored_scales import StoredScale, stored_scales

Parts = dict[str, torch.Tensor]

#: Schemes of keys and values, one row per token and head. docs/accuracy.md shows their cost in accuracy.
KV_SCHEMES: dict[str, Scheme] = {
    name: scheme(row.format, group_size=row.group_size, zero_point=row.zero_point)
    for name, row in KV_FORMATS.items()
}


def kv_scheme(format: str) -> Scheme:
    """Return the scheme of a KV cache format; raise `UsageError` for an unknown format."""
    if format not in KV_SCHEMES:
        raise unknown_name("KV cache format", format, KV_SCHEMES)
    return KV_SCHEMES[format]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Quantizer of keys or values to a scheme: one row of D features per token and head.

    `rotation` [D, D] float32 is orthogonal: rows are multiplied by it before quantization, and by its
    transpose after dequantization. None, as for values, means no rotation.
    """

    scheme: Scheme
    rotation: torch.Tensor | None

    @classmethod
    def of(cls, scheme: Scheme, size: int, device: torch.device, *, rotate: bool) -> "_Rows":
        hadamard = Rotation.of(size) if rotate else None
        rotation = None if hadamard is None else hadamard.apply(torch.eye(size, dtype=torch.float64))
        return cls(scheme.for_columns(size), None if rotation is None else rotation.float().to(device))

    def pack(self, states: torch.Tensor) -> Parts:
        """Rotate and quantize keys or values [B, H, T, D] of any float dtype to the nearest codes.

        Returns the parts of `scheme.part_names`, such as words and scales, by name: [B, H, T, columns of the
        part] in its stored dtype. Raises `FormatError` for a number that is not finite.
        """
        rows = states.reshape(-1, states.shape[-1]).float()
        try:
            packed = quantize_tensor(
                rows if self.rotation is None else rows @ self.rotation, self.scheme, method="rtn"
            )
        except FormatError as error:
            raise FormatError(
                "a layer computed keys or values that are not finite, which a quantized KV cache cannot "
                "hold. Use the dtype float32, or no quantized KV cache."
            ) from error
        return {name: part.view(*states.shape[:-1], -1) for name, part in packed.parts()}

    def unpack(self, parts: Parts, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize `parts` and undo the rotation: keys or values [B, H, T, D] in `dtype`; D is `size`."""
        leading = next(iter(parts.values())).shape[:-1]
        flat = {name: part.reshape(-1, part.shape[-1]) for name, part in parts.items()}
        rows = PackedTensor.from_parts(flat, self.scheme, (leading.numel(), size)).dequantize(torch.float32)
        rows_out = rows if self.rotation is None else rows @ self.rotation.T
        return rows_out.to(dtype).view(*leading, size)


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Quantized keys and values of one layer, as a cache layer of transformers.

    `keys` and `values` hold the parts of the scheme by name, such as words and scales, for the T tokens so
    far: [B, H, T, columns of the part] each. A scale belongs to a group of features or to the whole row. If
    `stored` is given, (scale of keys, scale of values) of a checkpoint, these static scales are used instead.
    """

    is_sliding = False
    is_croppable = True
    #: The base class declares tensors; here they are parts by name.
    keys: Parts
    values: Parts

    def __init__(self, scheme: Scheme, stored: tuple[StoredScale, StoredScale] | None = None) -> None:
        super().__init__()
        self._scheme, self._stored = scheme, stored
        self.keys, self.values = {}, {}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._sizes = key_states.shape[-1], value_states.shape[-1]
        self._key_rows: _Rows | StoredScale
        self._value_rows: _Rows | StoredScale
        if self._stored is not None:
            self._key_rows, self._value_rows = self._stored
        else:
            self._key_rows = _Rows.of(self._scheme, self._sizes[0], self.device, rotate=True)
            self._value_rows = _Rows.of(self._scheme, self._sizes[1], self.device, rotate=False)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize and append keys and values [B, H, t, D] of t new tokens; return all keys and all values.

        The results are the T tokens so far, dequantized, [B, H, T, D] each, in the dtype of the first keys.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = _append(self.keys, self._key_rows.pack(key_states))
        self.values = _append(self.values, self._value_rows.pack(value_states))
        return (
            self._key_rows.unpack(self.keys, self._sizes[0], self.dtype),
            self._value_rows.unpack(self.values, self._sizes[1], self.dtype),
        )

    def get_seq_length(self) -> int:
        return next((int(part.shape[-2]) for part in self.keys.values()), 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    #: Name in transformers 5.12.
    get_max_cache_shape = get_max_length

    @property
    def nbytes(self) -> int:
        """Return the bytes of all stored tensors: words, scales and zero-points of keys and values."""
        return sum(part.nbytes for parts in (self.keys, self.values) for part in parts.values())

    def reset(self) -> None:
        self.keys, self.values = {}, {}
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; `tokens_to_remove` is minus their number. `UsageError` if above 0."""
        if tokens_to_remove > 0:
            raise UsageError(f"crop takes the tokens to forget as a negative number, got {tokens_to_remove}.")
        if tokens_to_remove:
            self._each(lambda part: part[..., :tokens_to_remove, :])

    def offload(self) -> None:
        self._each(lambda part: part.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._each(lambda part: part.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._each(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each(lambda part: part[indices])

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.keys, self.values = (
            {name: function(part) for name, part in parts.items()} for parts in (self.keys, self.values)
        )


class PackedCache(DynamicCache):  # type: ignore[misc]
    """Quantized KV cache for models with this `config`; `format` is a name of `KV_SCHEMES`, such as "int8".

    Pass the cache to the model as `cache`, before transformers 5.24 as `past_key_values`. `dense_layers` is
    the number of layers that are not quantized: those with a sliding window, or with other states than keys
    and values. `stored` is {layer index: (scale of keys, scale of values)}, the static scales of a
    checkpoint. Only fp8 uses them, instead of a scale per token and head. Raises `UsageError` for an unknown
    format.
    """

    def __init__(
        self,
        config: Any,
        format: str,
        stored: Mapping[int, tuple[StoredScale, StoredScale]] = MappingProxyType({}),
    ) -> None:
        layer_scheme = kv_scheme(format)
        scales = stored if format in KV_SCALES else {}
        super().__init__(config=config)
        layers: list[Any] = self.layers
        self.layers: list[Any] = [
            PackedLayer(layer_scheme, scales.get(index)) if type(layer) is DynamicLayer else layer
            for index, layer in enumerate(layers)
        ]
        self.dense_layers = sum(not isinstance(layer, PackedLayer) for layer in self.layers)

    @classmethod
    def of_model(cls, model: Any, format: str) -> Self:
        """Create the cache, in `format`, of a loaded model with the static scales of its checkpoint."""
        return cls(model.config, format, stored_scales(model))

    @property
    def note(self) -> str | None:
        """Return text that says how many layers are not quantized, and why; None if all are."""
        if not self.dense_layers:
            return None
        return (
            f"{self.dense_layers} of {len(self.layers)} layers have a sliding window or no keys and values, "
            "and a cache in the dtype of the model"
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of the quantized layers."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, PackedLayer))


def _append(before: Parts, after: Parts) -> Parts:
    return {name: torch.cat([before[name], part], -2) for name, part in after.items()} if before else after
