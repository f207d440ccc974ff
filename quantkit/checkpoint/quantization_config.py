"""The `quantization_config` of a packed checkpoint: which module is stored in which scheme.

Two containers share one section, `quantkit`, which is all that quantkit itself reads:

    compressed-tensors   every scheme is one that compressed-tensors can express. The surrounding keys
                         describe the same thing in its words, so vLLM, SGLang and transformers read it.
    quantkit             everything else, under quantkit's own `quant_method`.

    "quantkit": {"version": 1, "schemes": [{...}, ...], "default": 0, "modules": {"lm_head": null}}

A linear layer not listed in `modules` has the default scheme; null means dense.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from quantkit.errors import CheckpointError, FormatError
from quantkit.packing.formats import IntFormat
from quantkit.packing.names import CONTAINERS, Container
from quantkit.packing.schemes import Scheme

SECTION = "quantkit"
VERSION = 1
_FIELDS = {"version", "schemes", "default", "modules"}

#: Widths and granularities that compressed-tensors' pack-quantized reads the same way in every version.
_EXPRESSIBLE_BITS = (4, 8)
#: Its scales are in the model's dtype, whose significand has at least so many bits.
_EXPRESSIBLE_DIGITS = 8


@dataclass(frozen=True)
class Assignment:
    """What becomes of one linear of the model.

    `module` is its name in the loaded model (for fused experts `...experts.gate_up_proj`), `stored` are
    the names its matrices have in the file, without `.weight`, and `shape` is [N, K] of each of them.
    """

    module: str
    stored: tuple[str, ...]
    shape: tuple[int, int]
    scheme: Scheme | None


def why_not_compressed_tensors(scheme: Scheme, columns: int) -> str | None:
    """None if compressed-tensors can express `scheme` for rows of `columns`, else the reason."""
    name, size = scheme.format.name, scheme.for_columns(columns).group_size
    is_int = isinstance(scheme.format, IntFormat) and scheme.format.bits in _EXPRESSIBLE_BITS
    few_digits = scheme.scale_type.digits < _EXPRESSIBLE_DIGITS
    lacks = (
        (not is_int, name),
        (scheme.planes > 1, f"sums of {scheme.planes} values"),
        (scheme.zero_point == "float", "float zero-points"),
        (few_digits, f"{scheme.scale_type.name} scales for {name}"),
        (scheme.global_scale, f"global scale for {name}"),
        (scheme.column_scale, "scales per input feature"),
    )
    for applies, what in lacks:
        if applies:
            return f"compressed-tensors has no {what}"
    if size is not None and columns % size:
        return f"compressed-tensors needs groups that divide {columns}, not {size}"
    return None


@dataclass(frozen=True)
class QuantizationConfig:
    """Which modules of a checkpoint are packed, and how; see the module docstring."""

    container: Container
    default: Scheme | None
    modules: Mapping[str, Scheme | None]

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a linear module of the model, None when it is dense."""
        return self.modules.get(module, self.default)

    @classmethod
    def from_assignments(cls, assignments: Sequence[Assignment]) -> "QuantizationConfig":
        """The smallest description of `assignments`: the commonest scheme becomes the default."""
        counts = Counter(a.scheme for a in assignments if a.scheme is not None)
        default = counts.most_common(1)[0][0] if counts else None
        expressible = all(
            why_not_compressed_tensors(a.scheme, a.shape[1]) is None
            for a in assignments
            if a.scheme is not None
        )
        return cls(
            "compressed-tensors" if expressible else "quantkit",
            default,
            {a.module: a.scheme for a in assignments if a.scheme != default},
        )

    def to_dict(self, assignments: Sequence[Assignment] = ()) -> dict[str, Any]:
        """The JSON value of `quantization_config`; `assignments` feed the compressed-tensors view.

        They name every linear of the model, for whatever they leave out a foreign reader takes to be packed.
        """
        schemes = list(dict.fromkeys([self.default, *self.modules.values()]))
        numbers = {scheme: i for i, scheme in enumerate(s for s in schemes if s is not None)}
        section = {
            "version": VERSION,
            "schemes": [scheme.to_dict() for scheme in numbers],
            "default": None if self.default is None else numbers[self.default],
            "modules": {
                module: None if scheme is None else numbers[scheme] for module, scheme in self.modules.items()
            },
        }
        if self.container == "quantkit":
            return {"quant_method": "quantkit", SECTION: section}
        if schemes != [None] and all(a.scheme is None for a in assignments):
            # The view would say that nothing is packed, and other readers would make up every weight.
            raise ValueError("a compressed-tensors configuration cannot be written without its assignments")
        return {**_compressed_tensors_view(assignments), SECTION: section}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "QuantizationConfig":
        """Parse `quantization_config`. `CheckpointError` names the key, what was found and expected."""
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
        return cls(
            cast(Container, method),
            numbered(section.get("default"), "default"),
            {str(name): numbered(value, f"modules[{name!r}]") for name, value in modules.items()},
        )


def _expect(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(
            f"quantization_config: {where!r} is {type(value).__name__}; expected a JSON "
            f"{'object' if kind is dict else 'array'}. Quantize the model again."
        )
    return value


def _compressed_tensors_view(assignments: Sequence[Assignment]) -> dict[str, Any]:
    """The same assignments as a compressed-tensors `pack-quantized` configuration."""
    by_scheme: dict[Scheme, list[str]] = {}
    for a in assignments:
        if a.scheme is not None:
            by_scheme.setdefault(_expressed(a.scheme, a.shape[1]), []).extend(a.stored)
    commonest = max(by_scheme, key=lambda scheme: len(by_scheme[scheme]), default=None)
    groups = {
        f"group_{i}": {
            # Exact names take precedence over the class name in every reader.
            "targets": ["Linear"] if scheme is commonest else names,
            "weights": _compressed_tensors_args(scheme),
            "input_activations": None,
            "output_activations": None,
        }
        for i, (scheme, names) in enumerate(by_scheme.items())
    }
    ignore: dict[str, None] = {}
    for a in assignments:
        if a.scheme is None:
            ignore.update(dict.fromkeys([a.module, *a.stored]))
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": groups,
        "ignore": list(ignore),
    }


def _expressed(scheme: Scheme, columns: int) -> Scheme:
    """`scheme` for rows of `columns`, per channel only where the group is longer than the row.

    A row of exactly one group has the same bytes either way. It stays a group, as some readers want one
    scheme for a whole model or for all experts of a layer.
    """
    if scheme.group_size is not None and columns % scheme.group_size == 0:
        return scheme
    return scheme.for_columns(columns)


def _compressed_tensors_args(scheme: Scheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.format.bits,
        "type": "int",
        "symmetric": scheme.zero_point == "none",
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
