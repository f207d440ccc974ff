"""Find the static scales that a low-bit source stores: of the inputs of linears, of keys and of values.

    compressed-tensors       m.input_scale; m.input_global_scale of NVFP4; attention.k_scale and v_scale
    FP8 of transformers      m.activation_scale
    AutoFP8                  m.input_scale; attention.kv_scale, one for both
    ModelOpt                 m.input_scale, of NVFP4 the inverse of a global scale; k_proj.k_scale
    Mistral                  m.qscale_act

An input x is rounded to the number format of x / scale. A key or value is rounded to e4m3 in the same way.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from quantkit.checkpoint.low_bit.weight import FLOATS, Settings, wrong
from quantkit.checkpoint.tensors import Read, StoredTensor
from quantkit.errors import CheckpointError
from quantkit.files import shown
from quantkit.packing.activations import ActivationScheme, activations_named
from quantkit.packing.formats import NumberFormat

#: Suffixes of activation scales, after the name of a module.
ACTIVATION_SUFFIXES = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".activation_scale",
    ".qscale_act",
    ".input_scale_ub",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_zero_point",
    ".v_zero_point",
    ".kv_scale",
)
#: Most repetitions, and most groups, in a pattern of a config, which bounds the time of a match.
_MOST_REPEATS = 4
#: Most elements of zero-points that are read to see if they are zero.
_MOST_ZEROS = 1 << 20
#: Zero-points that are 0 in symmetric schemes, and bounds of dynamic scales: no scheme stores them.
_ZERO_POINTS = (".input_zero_point", ".k_zero_point", ".v_zero_point")
_BOUNDS = (".input_scale_ub",)
WEIGHTS_ALONE = (
    "Convert the weights alone with --without-activations, or write the source again with its own tool"
)


@dataclass(frozen=True)
class _Static:
    """Kind of static input scales that quantkit supports, with the names in sources.

    activations   name of `ACTIVATIONS`
    weights       number format of the weights, by which the kind is known without a config
    names         suffixes of the scale, after the module
    inverse       the suffix under which the inverse of the scale is stored
    """

    activations: str
    weights: str
    names: tuple[str, ...]
    inverse: str | None = None


#: By type, bits and group size of the codes of inputs.
_STATIC: Mapping[tuple[str, int, int | None], _Static] = {
    ("float", 8, None): _Static(
        "fp8-static", "fp8-e4m3", (".input_scale", ".activation_scale", ".qscale_act")
    ),
    ("int", 8, None): _Static("int8-static", "int8", (".input_scale",)),
    ("float", 4, 16): _Static("nvfp4", "fp4-e2m1", (".input_global_scale",), ".input_scale"),
}
#: Input arguments by `quant_algo` of ModelOpt.
_MODELOPT: Mapping[str, Mapping[str, Any]] = {
    "FP8": {"type": "float", "num_bits": 8},
    "NVFP4": {"type": "float", "num_bits": 4, "group_size": 16},
}
#: Names of the scale of keys (k) or values (v), after the attention layer.
_KV_NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale")


@dataclass(frozen=True)
class StoredScale:
    """A static scale in a file: one float, `inverse` if its inverse is stored."""

    tensor: StoredTensor
    inverse: bool = False

    def value(self, read: Read) -> float:
        """Read the scale; raise `CheckpointError` unless it is one positive finite float."""
        if self.tensor.elements != 1 or self.tensor.dtype not in FLOATS:
            wrong(self.tensor, "expected one float, the static scale of all values", WEIGHTS_ALONE)
        stored = read(self.tensor).to(torch.float32).flatten()
        # In float32, as engines invert it.
        found = float(stored.reciprocal() if self.inverse else stored)
        if not 0.0 < found < math.inf or not 0.0 < float(stored) < math.inf:
            wrong(
                self.tensor,
                f"the static scale is {float(stored)}; expected a positive finite number",
                WEIGHTS_ALONE,
            )
        return found


@dataclass(frozen=True)
class ActivationTensors:
    """Stored scales of the activations of a source, and the settings that describe them.

    `tensors` are all tensors with one of `ACTIVATION_SUFFIXES`, by name in the file. Modules have their names
    in the file.
    """

    settings: Settings = field(default_factory=Settings)
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def are_rounded(self) -> bool:
        """Return True if the source rounds the inputs of some linears."""
        values = self.settings.values
        return bool(
            any(group.get("input_activations") for group in _groups(values))
            or values.get("activation_scheme")
            or _modelopt_arguments(values)
            or any(name.endswith(static.names) for name in self.tensors for static in _STATIC.values())
        )

    def of_inputs(self, module: str, weights: NumberFormat) -> tuple[ActivationScheme, StoredScale] | None:
        """Return the static scheme of the inputs of a linear with `weights` codes, and the stored scale.

        Returns None if the inputs are not rounded, or by dynamic scales. Raises `CheckpointError` for a
        missing scale, and for inputs of a format that has no static scheme.
        """
        arguments = self._input_arguments(module, weights)
        if not arguments or arguments.get("dynamic") is True:
            return None
        codes = tuple(arguments.get(name) for name in ("type", "num_bits", "group_size"))
        static = next((one for kind, one in _STATIC.items() if kind == codes), None)
        plain = arguments.get("symmetric") is not False
        if static is None or not plain or arguments.get("strategy") not in (None, "tensor", "tensor_group"):
            text = ", ".join(f"{name} {value}" for name, value in arguments.items() if value is not None)
            raise CheckpointError(
                f"{self.settings.where} rounds the inputs of {module!r} by static scales of {text}; expected "
                f"symmetric FP8 or int8 with one scale, or NVFP4. {WEIGHTS_ALONE}."
            )
        scheme = activations_named(static.activations)
        assert scheme is not None
        for name in static.names:
            if (tensor := self.tensors.get(module + name)) is not None:
                return scheme, StoredScale(tensor)
        tensor = None if static.inverse is None else self.tensors.get(module + static.inverse)
        if tensor is None:
            self.raise_missing(module + static.names[0], f"rounds the inputs of {module!r}")
        return scheme, StoredScale(tensor, inverse=True)

    def is_dynamic(self, module: str, weights: NumberFormat) -> bool:
        """Return True if the inputs of a linear with `weights` codes are rounded by dynamic scales."""
        arguments = self._input_arguments(module, weights)
        return arguments is not None and arguments.get("dynamic") is True

    def of_states(self, attention: str) -> tuple[StoredScale | None, StoredScale | None]:
        """Return the stored scales of the keys and the values of an attention layer; None if it has none."""

        def stored(letter: str) -> StoredScale | None:
            names = (f"{attention}.{name.format(letter)}" for name in _KV_NAMES)
            tensor = next((self.tensors[name] for name in names if name in self.tensors), None)
            return None if tensor is None else StoredScale(tensor)

        return stored("k"), stored("v")

    def check_states(self, attention: str) -> None:
        """Raise `CheckpointError` if keys and values are scaled for a KV cache in another format than FP8.

        The text names the module `attention`, whose scales are read.
        """
        values = self.settings.values
        inner = values.get("quantization")
        algorithm = (inner if isinstance(inner, Mapping) else values).get("kv_cache_quant_algo")
        scheme = values.get("kv_cache_scheme")
        arguments = scheme if isinstance(scheme, Mapping) else {}
        kind = (arguments.get("type", "float"), arguments.get("num_bits", 8), arguments.get("strategy"))
        if algorithm not in (None, "FP8") or kind[:2] != ("float", 8) or kind[2] not in (None, "tensor"):
            found = algorithm or ", ".join(f"{name} {value}" for name, value in arguments.items())
            raise CheckpointError(
                f"{self.settings.where} has a KV cache in {found} for {attention!r}; expected FP8 with one "
                f"scale for keys and one for values. {WEIGHTS_ALONE}."
            )

    def unused(self, used: Iterable[str], read: Read) -> list[StoredTensor]:
        """Return the activation tensors not named in `used` that affect the outputs of the source."""
        left = self.tensors.keys() - set(used)
        rest = [tensor for name, tensor in self.tensors.items() if name in left]
        return [
            tensor
            for tensor in rest
            if not tensor.name.endswith(_BOUNDS)
            and not (
                tensor.name.endswith(_ZERO_POINTS)
                and tensor.elements <= _MOST_ZEROS
                and not bool(read(tensor).to(torch.float32).any())
            )
        ]

    def raise_missing(self, name: str, because: str) -> NoReturn:
        """Raise `CheckpointError` for a scale `name` that the config, which `because`, requires."""
        raise CheckpointError(
            f"there is no tensor {name!r}: {self.settings.where} {because} by static scales, so one is "
            f"expected. {WEIGHTS_ALONE}."
        )

    def _input_arguments(self, module: str, weights: NumberFormat) -> Mapping[str, Any] | None:
        """Return how the inputs of a linear are rounded, in the terms of compressed-tensors; None if not."""
        values = self.settings.values
        if groups := _groups(values):
            rounding = [one for group in groups if isinstance(one := group.get("input_activations"), Mapping)]
            if all(one.get("dynamic") is True for one in rounding):
                # Whichever group it is in, no scale is stored.
                return rounding[0] if rounding else None
            found = _group_of(module, groups)
            arguments = None if found is None else found.get("input_activations")
            return arguments if isinstance(arguments, Mapping) else None
        if (scheme := values.get("activation_scheme")) is not None:
            return {"type": "float", "num_bits": 8, "dynamic": scheme != "static"}
        if (stated := _modelopt_arguments(values)) is not None:
            return stated
        for (kind, bits, size), static in _STATIC.items():
            suffixes = (*static.names, *filter(None, (static.inverse,)))
            if static.weights == weights.name and any(module + one in self.tensors for one in suffixes):
                return {"type": kind, "num_bits": bits, "group_size": size}
        return None


def _groups(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the config groups of compressed-tensors."""
    groups = values.get("config_groups")
    return [one for one in groups.values() if isinstance(one, Mapping)] if isinstance(groups, Mapping) else []


def _modelopt_arguments(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    inner = values.get("quantization")
    algorithm = (inner if isinstance(inner, Mapping) else values).get("quant_algo")
    return _MODELOPT.get(algorithm) if isinstance(algorithm, str) else None


def _matches(pattern: str, module: str) -> bool:
    """Return True if a pattern of a config matches a module; `CheckpointError` if it may hang."""
    counts = (len(re.findall(r"[*+{]", pattern)), pattern.count("("))
    hangs = re.search(r"\)[*+{]", pattern) or max(counts) > _MOST_REPEATS
    try:
        if not hangs:
            return re.match(pattern, module) is not None
    except (re.error, RecursionError, OverflowError):
        pass
    raise CheckpointError(
        f"the target {shown('re:' + pattern)} in config_groups is no pattern that quantkit matches; expected "
        f"a valid one with at most {_MOST_REPEATS} groups and repetitions, none of a group. {WEIGHTS_ALONE}."
    )


def _group_of(module: str, groups: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the config group of a module: by its name, else by a pattern, else by the class of linears."""
    matches: tuple[Callable[[str], bool], ...] = (
        lambda target: target == module,
        lambda target: target.startswith("re:") and _matches(target.removeprefix("re:"), module),
        lambda target: target == "Linear",
    )
    for fits in matches:
        for group in groups:
            targets = group.get("targets")
            if isinstance(targets, list) and any(isinstance(one, str) and fits(one) for one in targets):
                return group
    return None
