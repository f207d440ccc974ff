"""`quantization_config` of a packed checkpoint: which module is stored in which scheme.

Two containers share one section, `quantkit`, which is all that quantkit itself reads:

    compressed-tensors   compressed-tensors can express every scheme. The surrounding keys describe the
                         same in its terms; `engines.py` says who reads it.
    quantkit             everything else, under quantkit's own `quant_method`.

    "quantkit": {"version": 1, "schemes": [{...}, ...], "default": 0, "modules": {"lm_head": null}}

A linear layer not listed in `modules` has the default scheme; null means dense. An embedding is packed only
if it is listed, and so is a head tied to it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from quantkit.checkpoint.compressed_tensors import (
    compressed_tensors_format,
    input_arguments,
    why_not_compressed_tensors,
)
from quantkit.checkpoint.engines import FUSED, LayerKind
from quantkit.errors import CheckpointError, FormatError
from quantkit.packing.names import CONTAINERS, Container
from quantkit.packing.schemes import Scheme

SECTION = "quantkit"
VERSION = 1
#: Reason why a checkpoint with a packed embedding needs quantkit.
PACKED_TABLE = "the config names linears as packed, so other readers take embeddings to be dense"
#: What `kv_cache_scheme` says of scales for a KV cache in fp8: one per layer for keys, and one for values.
KV_CACHE_SCHEME: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "group_size": None,
    "dynamic": False,
}
_FIELDS = {"version", "schemes", "default", "modules"}
#: For each of `FUSED`, what ends a pattern for it and for its first part.
_FUSED_ENDS = {"qkv_proj": "q(kv)?_proj$", "gate_up_proj": "gate(_up)?_proj$"}
#: Start of a target that is a pattern.
_PATTERN = "re:"


@dataclass(frozen=True)
class Assignment:
    """Stored form of one linear of the model.

    module       name in the loaded model (for fused experts `...experts.gate_up_proj`)
    stored       names of its matrices in the file, without `.weight`
    shape        [N, K] of each of them
    scheme       scheme of each of them; None if dense
    head         True for the lm_head, which inference engines build as a kind of embedding
    aliases      names in other classes that read the file
    transposed   True if the module's class stores [K, N]; other readers know no packed form of it
    """

    module: str
    stored: tuple[str, ...]
    shape: tuple[int, int]
    scheme: Scheme | None
    head: bool = False
    aliases: tuple[str, ...] = ()
    #: True if its matrices have names that only quantkit knows.
    own_names: bool = False
    transposed: bool = False
    #: True if it is the table of an embedding.
    is_table: bool = False

    @property
    def experts(self) -> bool:
        """Return True if these are the matrices of fused experts."""
        return len(self.stored) > 1

    @property
    def kind(self) -> LayerKind:
        """Return the kind of layer that engines build from it."""
        return "experts" if self.experts else "lm_head" if self.head else "linear"


@dataclass(frozen=True)
class QuantizationConfig:
    """Packed modules of a checkpoint and their schemes; see the module docstring.

    container  "compressed-tensors" or "quantkit"
    default    scheme of linears that are not in `modules`; None for dense
    modules    scheme by module; None for dense
    """

    container: Container
    default: Scheme | None
    modules: Mapping[str, Scheme | None]
    #: True if attention layers have the scales of keys and values for a KV cache in fp8.
    kv_scales: bool = False

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a linear module of the model, None if it is dense."""
        return self.modules.get(module, self.default)

    @classmethod
    def from_assignments(cls, assignments: Sequence[Assignment]) -> "QuantizationConfig":
        """Choose the container and return the shortest description of `assignments`.

        The container is compressed-tensors if it can express every assignment. The most frequent scheme
        becomes the default.
        """
        counts = Counter(a.scheme for a in assignments if a.scheme is not None)
        default = counts.most_common(1)[0][0] if counts else None
        expressible = all(
            not (a.own_names or a.transposed or a.is_table)
            and why_not_compressed_tensors(a.scheme, a.shape[1], experts=a.experts) is None
            for a in assignments
            if a.scheme is not None
        )
        return cls(
            "compressed-tensors" if expressible else "quantkit",
            default,
            {a.module: a.scheme for a in assignments if a.scheme != default or a.is_table},
        )

    def to_dict(self, assignments: Sequence[Assignment] = ()) -> dict[str, Any]:
        """Return the JSON value of `quantization_config`; `assignments` make its compressed-tensors part.

        `assignments` must have every linear of the model: other readers take an omitted linear as packed.
        """
        kv = {"kv_cache_scheme": KV_CACHE_SCHEME} if self.kv_scales else {}
        if self.container == "quantkit":
            return {"quant_method": "quantkit", **kv, SECTION: self._section()}
        packs = any(scheme is not None for scheme in (self.default, *self.modules.values()))
        if packs and all(a.scheme is None for a in assignments):
            # The compressed-tensors part would say that nothing is packed, and readers would invent the
            # weights.
            raise ValueError("a compressed-tensors configuration cannot be written without its assignments")
        return {**_compressed_tensors_view(assignments), **kv, SECTION: self._section()}

    def _section(self) -> dict[str, Any]:
        schemes = dict.fromkeys([self.default, *self.modules.values()])
        numbers = {scheme: i for i, scheme in enumerate(s for s in schemes if s is not None)}
        return {
            "version": VERSION,
            "schemes": [scheme.to_dict() for scheme in numbers],
            "default": None if self.default is None else numbers[self.default],
            "modules": {
                module: None if scheme is None else numbers[scheme] for module, scheme in self.modules.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "QuantizationConfig":
        """Parse `quantization_config`; `CheckpointError` names the key, and the found and expected values."""
        data = _expect(data, dict, "quantization_config")
        method = data.get("quant_method")
        if SECTION not in data:
            raise CheckpointError(
                f"quantization_config has no section {SECTION!r} (quant_method {method!r}): "
                "the checkpoint was not written by quantkit. Quantize the unquantized model instead."
            )
        section = _expect(data[SECTION], dict, SECTION)
        if method not in CONTAINERS:
            raise CheckpointError(
                f"quantization_config.quant_method is {method!r}; a quantkit checkpoint has one of "
                f"{', '.join(CONTAINERS)}. Quantize the model again."
            )
        version = section.get("version")
        if type(version) is not int or version != VERSION:
            raise CheckpointError(
                f"quantization_config.quantkit.version is {version!r}; this quantkit reads version "
                f"{VERSION}. Upgrade quantkit, or quantize the model again with this version."
            )
        if set(section) != _FIELDS:
            raise CheckpointError(
                f"quantization_config.quantkit has the keys {sorted(section)}; version {VERSION} has "
                f"{sorted(_FIELDS)}. Quantize the model again."
            )
        try:
            schemes = [Scheme.from_dict(item) for item in _expect(section.get("schemes"), list, "schemes")]
        except FormatError as error:
            raise CheckpointError(f"quantization_config.quantkit.schemes: {error}") from error

        def numbered(value: object, where: str) -> Scheme | None:
            if value is None:
                return None
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(schemes):
                raise CheckpointError(
                    f"quantization_config.quantkit.{where} is {value!r}; expected null or the number of "
                    f"one of the {len(schemes)} schemes. Quantize the model again."
                )
            return schemes[value]

        modules = _expect(section.get("modules"), dict, "modules")
        kv = data.get("kv_cache_scheme")
        if kv not in (None, KV_CACHE_SCHEME):
            raise CheckpointError(
                f"quantization_config.kv_cache_scheme is {kv!r}; quantkit writes null or {KV_CACHE_SCHEME}. "
                "Quantize the model again."
            )
        return cls(
            cast(Container, method),
            numbered(section.get("default"), "default"),
            {str(name): numbered(value, f"modules[{name!r}]") for name, value in modules.items()},
            kv is not None,
        )


def changed_config(
    data: Mapping[str, Any], schemes: Mapping[str, Scheme | None], names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the `quantization_config` `data`, changed for a model whose linears have `schemes`.

    `names` maps modules of the model to their names in `data`, if they differ.
    """
    config = QuantizationConfig.from_dict(data)
    own = {} if names else {name: one for name, one in config.modules.items() if name not in schemes}
    # Listed modules stay listed: an embedding is packed only if it is listed.
    modules = own | {
        name: scheme
        for name, scheme in schemes.items()
        if scheme != config.default or (name if names is None else names.get(name)) in config.modules
    }
    changed: dict[str, Any] = {
        **data,
        SECTION: QuantizationConfig(config.container, config.default, modules)._section(),
    }
    prefixes = sorted({_prefixes(*pair) for pair in (names or {}).items()}, key=lambda pair: -len(pair[1]))

    def with_names(known: Sequence[str]) -> list[str]:
        here = (
            f"{new}.{name.removeprefix(old).lstrip('.')}".strip(".")
            for name in known
            for new, old in prefixes
            if not name.startswith(_PATTERN)
            and "." in name
            and f"{name}.".startswith(f"{old}." if old else "")
        )
        return list(dict.fromkeys([*known, *here]))

    if config.container == "compressed-tensors":
        groups = data.get("config_groups", {})
        changed["config_groups"] = {
            name: {**group, "targets": _with_fused(with_names(group["targets"]))}
            for name, group in groups.items()
        }
        dense = [name for name, scheme in schemes.items() if scheme is None]
        changed["ignore"] = _with_fused([*with_names(data.get("ignore", ())), *dense])
    return changed


def _prefixes(here: str, own: str) -> tuple[str, str]:
    """Return the prefixes in which two names differ, without their common last components."""
    left, right = here.split("."), own.split(".")
    while left and right and left[-1] == right[-1]:
        left.pop(), right.pop()
    return ".".join(left), ".".join(right)


def _expect(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(
            f"quantization_config: {where!r} is {type(value).__name__}; expected a JSON "
            f"{'object' if kind is dict else 'array'}. Quantize the model again."
        )
    return value


def _compressed_tensors_view(assignments: Sequence[Assignment]) -> dict[str, Any]:
    """Return the assignments as a compressed-tensors configuration."""
    groups: dict[str, dict[str, Any]] = {}
    ignore: dict[str, None] = {}
    # Experts first: transformers uses the first group for experts that it dequantizes.
    for a in sorted(assignments, key=lambda a: not a.experts):
        if a.scheme is None:
            ignore.update(dict.fromkeys([a.module, *a.stored, *a.aliases]))
            continue
        row = compressed_tensors_format(a.scheme, a.shape[1])
        weights, inputs = row.arguments(a.scheme, a.shape[1]), input_arguments(a.scheme.activations)
        group = groups.setdefault(
            json.dumps([row.stored.name, weights, inputs]),
            {
                "targets": [],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": row.stored.name,
            },
        )
        # Experts are no modules.
        names = a.stored if a.experts else (*a.stored, a.module, *a.aliases)
        group["targets"].extend(dict.fromkeys(names))
    if groups:
        # Exact names take precedence over the class name in every reader. The head is listed by its own name:
        # if only the class name of linears matches it, vLLM and SGLang take it as dense and leave it random.
        heads = {name for a in assignments if a.head for name in (*a.stored, a.module, *a.aliases)}
        most = max(groups.values(), key=lambda group: len(group["targets"]))
        most["targets"] = ["Linear", *(name for name in most["targets"] if name in heads)]
        for group in groups.values():
            group["targets"] = _with_fused(group["targets"])
    formats = list(dict.fromkeys(group["format"] for group in groups.values())) or ["pack-quantized"]
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())},
        "ignore": _with_fused(ignore),
    }


def _with_fused(names: Iterable[str]) -> list[str]:
    """Return the names, and a pattern for each set of linears that SGLang fuses.

    SGLang looks for a fused linear by name, then by class, and only then by the names of its parts. The
    pattern also matches a part, because compressed-tensors warns of patterns that match no module.
    """
    known = dict.fromkeys(name for name in names if not name.startswith(_PATTERN))
    patterns = (
        _PATTERN + re.escape(parent + ".") + end
        for parent, _, leaf in (name.rpartition(".") for name in known)
        for fused, end in _FUSED_ENDS.items()
        if leaf == FUSED[fused][0] and all(f"{parent}.{part}" in known for part in FUSED[fused])
        # Experts, which have numbers, are no linears of SGLang.
        if not parent.rpartition(".")[2].isdigit()
    )
    return [*known, *patterns]
