"""Model part of a manifest: the fate of every linear, sizes and versions; to and from JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from quantkit.checkpoint.hub.answers import COMMIT
from quantkit.checkpoint.hub.repository import is_hub_id
from quantkit.errors import CheckpointError
from quantkit.files import shown

VERSION = 1


@dataclass(frozen=True)
class Measured:
    """Errors measured while a linear was quantized.

    relative_error   sum of (weight - stored)^2 over the sum of weight^2
    output_error     squared error over squares of the outputs on the calibration data; None without data
    damping          number added to the Hessian's diagonal, over the diagonal's mean; None if not factored
    note             step that was left undone, and why
    expert_tokens    number of calibration tokens that chose each expert; None except for experts with data
    block_error      relative squared error of its block's outputs, before and after its rounding was learned;
                     None if it was not
    """

    relative_error: float
    output_error: float | None = None
    damping: float | None = None
    note: str | None = None
    expert_tokens: tuple[int, ...] | None = None
    block_error: tuple[float, float] | None = None

    @classmethod
    def of(cls, detail: Mapping[str, Any]) -> "Measured":
        """Return the measurements of a linear from `detail`, its record in the journal of a run.

        Errors are quotients of the sums of squares "squared" and "output"; the other fields are copied.
        """
        errors = {
            key: None if pair is None else pair[0] / pair[1] if pair[1] else 0.0
            for key, pair in (("squared", detail["squared"]), ("output", detail.get("output")))
        }
        tokens, block = detail.get("expert_tokens"), detail.get("block_error")
        return cls(
            errors["squared"] or 0.0,
            errors["output"],
            detail.get("damping"),
            detail.get("note"),
            None if tokens is None else tuple(tokens),
            None if block is None else (block[0], block[1]),
        )


@dataclass(frozen=True)
class LayerRecord:
    """Result of a run for one linear, as the manifest lists it.

    kind             kind of linear, such as "experts" or "lm_head"
    shape            [N, K] of each matrix
    matrices         number of matrices; several for fused experts
    scheme           scheme as text; None if dense
    method           name of the method; None if dense, or if codes of the source were kept
    bits_per_weight  all stored bits over the number of weights; None if dense
    relative_error   sum of (weight - stored)^2 over the sum of weight^2; None if not measured
    reason           why it has this scheme, or is dense

    Fields after `reason` are those of `Measured`: what was measured on the calibration data.
    """

    kind: str
    shape: tuple[int, int]
    matrices: int
    scheme: str | None
    method: str | None
    bits_per_weight: float | None
    relative_error: float | None
    reason: str
    output_error: float | None = None
    damping: float | None = None
    note: str | None = None
    expert_tokens: tuple[int, ...] | None = None
    block_error: tuple[float, float] | None = None


@dataclass(frozen=True)
class ModelRecord:
    """Model part of a manifest.

    source           path or hub id of the source; None without a manifest that states it
    source_bytes     bytes of the source; None as for `source`
    source_kind      "directory", "file", or "hub" for a hub id; None if unknown, as in earlier versions
    source_commit    commit of the source's repository
    container        container of the packed matrices
    needs_quantkit   reasons why other tools cannot read the output; empty if they can
    bits_per_weight  all stored bits per weight of the `linears`, None without any, and of the `model`
    versions         of the packages that made it
    recipe           the recipe, as JSON values
    layers           record of each linear, by module
    dense            reason why a tensor is dense, by tensor
    seed             of the calibration samples; None without data
    calibration      where the samples came from, as text; None without data
    distillation     how the model was trained against the original; the divergence before and after
    relative_paths   the path from the packed directory to what `source` and `calibration` name by a path
                     relative to the directory of the run, by that name
    """

    source: str | None
    source_bytes: int | None
    container: str
    needs_quantkit: tuple[str, ...]
    bits_per_weight: Mapping[str, float | None]
    versions: Mapping[str, str]
    recipe: Mapping[str, Any]
    layers: Mapping[str, LayerRecord]
    dense: Mapping[str, str]
    seed: int | None = None
    calibration: str | None = None
    source_kind: str | None = None
    source_commit: str | None = None
    distillation: Mapping[str, Any] | None = None
    relative_paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def hub_source(self) -> str | None:
        """Return the hub id of the source; None if it was no hub id."""
        return self.source if self.source_kind == "hub" else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the manifest without its files."""
        return {"model_record": VERSION, **asdict(self)}

    @property
    def measured(self) -> dict[str, Measured]:
        """Return the measured errors, by linear."""
        return {
            name: Measured(**{one.name: getattr(layer, one.name) for one in fields(Measured)})
            for name, layer in self.layers.items()
            if layer.relative_error is not None
        }

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "ModelRecord":
        """Parse a manifest; raise `CheckpointError` naming the key that is missing or invalid."""
        if manifest.get("model_record") != VERSION:
            raise CheckpointError(
                f"quantkit_manifest.json: 'model_record' is {manifest.get('model_record')!r}; this quantkit "
                f"reads {VERSION}. Upgrade quantkit, or quantize the model again."
            )
        try:
            json.dumps(manifest, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"quantkit_manifest.json is not JSON: {error}. {_AGAIN}") from error
        names = [one.name for one in fields(cls) if one.name in manifest or one.name not in _LATER]
        values = {name: _get(manifest, name, _TYPES[name]) for name in names}
        values["layers"] = {name: _layer(name, data) for name, data in values["layers"].items()}
        values["needs_quantkit"] = tuple(map(str, values["needs_quantkit"]))
        _get(values["bits_per_weight"], "linears", (int, float, type(None)))
        _get(values["bits_per_weight"], "model", (int, float))
        for key in ("dense", "versions", "relative_paths"):
            for name in values.get(key, ()):
                _get(values[key], name, (str,))
        _check_source(values["source"], values.get("source_kind"), values.get("source_commit"))
        return cls(**values)


def _check_source(source: str, kind: str | None, commit: str | None) -> None:
    if kind not in (None, "directory", "file", "hub"):
        raise CheckpointError(
            f"quantkit_manifest.json: 'source_kind' is {shown(kind)}; expected 'directory', 'file' or "
            f"'hub'. {_AGAIN}"
        )
    if kind == "hub" and not is_hub_id(source):
        raise CheckpointError(
            f"quantkit_manifest.json: 'source' is {shown(source)} and 'source_kind' 'hub'; expected a hub id "
            f"such as org/name. {_AGAIN}"
        )
    if commit is not None and not COMMIT.fullmatch(commit):
        raise CheckpointError(
            f"quantkit_manifest.json: 'source_commit' is {shown(commit)}; expected 40 hex digits. {_AGAIN}"
        )


#: Keys that manifests of earlier versions lack.
_LATER = frozenset({"source_kind", "source_commit", "distillation", "relative_paths"})


_TYPES: dict[str, tuple[type, ...]] = {
    "source": (str,),
    "source_bytes": (int,),
    "container": (str,),
    "needs_quantkit": (list,),
    "bits_per_weight": (dict,),
    "versions": (dict,),
    "recipe": (dict,),
    "layers": (dict,),
    "dense": (dict,),
    "seed": (int, type(None)),
    "calibration": (str, type(None)),
    "source_kind": (str, type(None)),
    "source_commit": (str, type(None)),
    "distillation": (dict, type(None)),
    "relative_paths": (dict,),
}

_LAYER_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "shape": (list,),
    "matrices": (int,),
    "scheme": (str, type(None)),
    "method": (str, type(None)),
    "bits_per_weight": (int, float, type(None)),
    "relative_error": (int, float, type(None)),
    "reason": (str,),
}
#: Keys that manifests of methods without data, and of earlier versions, may lack.
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "output_error": (int, float, type(None)),
    "damping": (int, float, type(None)),
    "note": (str, type(None)),
    "expert_tokens": (list, type(None)),
    "block_error": (list, type(None)),
}


def _layer(name: str, data: Any) -> LayerRecord:
    if not isinstance(data, dict):
        raise CheckpointError(f"quantkit_manifest.json: layer {name!r} is not a JSON object. {_AGAIN}")
    values = {key: _get(data, key, types) for key, types in _LAYER_TYPES.items()}
    values |= {key: _get(data, key, types) for key, types in _OPTIONAL.items() if key in data}
    shape = values["shape"]
    if len(shape) != 2 or any(type(n) is not int or not 1 <= n <= _LARGEST for n in shape):
        raise CheckpointError(f"quantkit_manifest.json: shape of {name!r} is {shape!r}, not [N, K]. {_AGAIN}")
    values["shape"] = (shape[0], shape[1])
    tokens = values.get("expert_tokens")
    if tokens is not None:
        if any(type(n) is not int or not 0 <= n <= _LARGEST for n in tokens):
            raise CheckpointError(
                f"quantkit_manifest.json: expert_tokens of {name!r} is {tokens!r}, not counts. {_AGAIN}"
            )
        values["expert_tokens"] = tuple(tokens)
    errors = values.get("block_error")
    if errors is not None:
        if len(errors) != 2 or any(type(x) not in (int, float) or not 0 <= x <= _LARGEST for x in errors):
            raise CheckpointError(
                f"quantkit_manifest.json: block_error of {name!r} is {errors!r}, not two errors. {_AGAIN}"
            )
        values["block_error"] = (errors[0], errors[1])
    if values["scheme"] is not None and not values["scheme"].strip():
        raise CheckpointError(f"quantkit_manifest.json: the scheme of {name!r} is empty. {_AGAIN}")
    return LayerRecord(**values)


_AGAIN = "Download the checkpoint again, or quantize the model again."
#: Largest count in a manifest; larger ones would be inexact or infinite as Python floats.
_LARGEST = 1 << 62


def _get(data: Mapping[str, Any], key: str, types: tuple[type, ...]) -> Any:
    value = data.get(key)
    if key not in data or not isinstance(value, types) or isinstance(value, bool):
        expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
        found = type(value).__name__ if key in data else "nothing"
        raise CheckpointError(f"quantkit_manifest.json: {key!r} is {found}; expected {expected}. {_AGAIN}")
    if isinstance(value, (int, float)) and not 0 <= value <= _LARGEST:
        raise CheckpointError(f"quantkit_manifest.json: {key!r} is {value}, which is out of range. {_AGAIN}")
    return value


def float32_bytes(stored: int, layers: Mapping[str, LayerRecord]) -> int:
    """Return the approximate memory of a model in float32, in bytes: files, dense tensors, a byte per weight.

    `stored` are the bytes of all tensors.
    """
    packed = (layer for layer in layers.values() if layer.scheme is not None)
    return 2 * stored + sum(math.prod(layer.shape) * layer.matrices for layer in packed)
