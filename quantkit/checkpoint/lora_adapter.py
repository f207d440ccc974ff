"""Read a LoRA adapter as PEFT saves it: factors A [r, K] and B [N, r] of the linears that it changes.

An adapted linear computes y = x W^T + s x A^T B^T (arXiv 2106.09685). So its weight is W + s B A. The
scaling s is alpha / r, or alpha / sqrt(r) of rank-stabilized LoRA (arXiv 2312.03732).

A parameter of fused experts (`target_parameters`) has factors of all E experts in A [E r, K] and B [N, r E]:
rows of expert 0, then of expert 1; columns of rank 0 of all experts, then of rank 1. The names of several
parameters of one module are those of nested wrappers, the last parameter outside:

    experts.base_layer.lora_A.weight   gate_up_proj
    experts.lora_A.weight              down_proj
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.safetensors_header import read_json
from quantkit.checkpoint.source import ADAPTER_NAME, Checkpoint
from quantkit.errors import CheckpointError

WEIGHTS_NAME = "adapter_model.safetensors"
#: What PEFT puts before the names of modules.
_PREFIX = "base_model.model."
_FACTOR = re.compile(re.escape(_PREFIX) + r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
#: Initializations that leave the weight of the model as it is; others, such as PiSSA, change it first.
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")
#: Keys of the config that do not change what W + s B A is, or that are read here.
_KNOWN = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
    }
)
#: Patterns of the config that take no longer to match than a name is long, to the power of their stars.
_PATTERN, _MOST_STARS = re.compile(r"\^?(?:[A-Za-z0-9_-]|\\?\.|\.\*){1,300}"), 2
DENSE_REMEDY = "Merge it with PEFT into the dense model, and quantize that."
#: Name of what a wrapper of PEFT wraps.
_WRAPPED = ".base_layer"


@dataclass(frozen=True)
class FusedParameters:
    """Parameters of a module of fused experts.

    experts  number of experts E
    reasons  by parameter, in the order of the class: why its factors cannot be merged; None if they can
    """

    experts: int
    reasons: Mapping[str, str | None]


@dataclass(frozen=True)
class LoraFactors:
    """Factors of one linear, or of a parameter of fused experts, in the adapter's file.

    a             name of the tensor A [r, K], of experts [E r, K]
    b             name of the tensor B [N, r], of experts [N, r E]
    scaling       s of the change s B A of the weight
    experts       number of experts E; None for a linear
    of_parameter  True if the config names the parameter, not the module
    """

    a: str
    b: str
    scaling: float
    experts: int | None = None
    of_parameter: bool = False


@dataclass(frozen=True)
class LoraAdapter:
    """LoRA adapter whose config and header were read.

    base     name of the adapted model in the config; None without one
    factors  factors of each adapted linear, by module of the model, and of each parameter of fused experts
    tensors  the adapter's file of weights
    """

    directory: Path
    base: str | None
    factors: Mapping[str, LoraFactors]
    tensors: Checkpoint
    #: Factors of the experts that were read last, by parameter.
    _last: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def open(
        cls, directory: Path, fused: Callable[[], Mapping[str, FusedParameters]] = dict
    ) -> "LoraAdapter":
        """Read the config and the header of an adapter.

        `fused` returns the parameters of fused experts of the model, by module. It is called if the adapter
        targets parameters. Raises `CheckpointError` for a directory that is no adapter, and for an adapter
        that does more than add s B A to weights.
        """
        config = _config(directory)
        experts = fused() if _targets(config) else {}
        path = directory / WEIGHTS_NAME
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has no {WEIGHTS_NAME}; expected the weights of an adapter, which are read as "
                "safetensors only. Save it with PEFT's save_pretrained."
            )
        tensors = Checkpoint.of_files([path])
        found: dict[str, dict[str, str]] = {}
        for name, tensor in tensors.tensors.items():
            match = _FACTOR.fullmatch(name)
            if match is None or len(tensor.shape) != 2:
                raise CheckpointError(
                    f"{path}: tensor {name!r} {tensor.shape} is no factor of a linear; expected names "
                    f"such as '{_PREFIX}model.layers.0.mlp.up_proj.lora_A.weight'. {DENSE_REMEDY}"
                )
            found.setdefault(match["module"], {})[match["factor"]] = name
        factors, wrappers = {}, Counter(map(_owner, found))
        for module, names in found.items():
            owner = _owner(module)
            if owner in experts:
                name = _parameter(path, owner, module, wrappers[owner], experts[owner], config)
                factors[name] = _factors(path, name, names, tensors, config, experts[owner].experts)
            else:
                factors[module] = _factors(path, module, names, tensors, config)
        base = config.get("base_model_name_or_path")
        return cls(directory, base if isinstance(base, str) else None, factors, tensors)

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the config and the weights."""
        return (self.directory / ADAPTER_NAME, *self.tensors.shards)

    def shape(self, module: str) -> tuple[int, int]:
        """Return [N, K] of the weight that the factors of `module` are for, of experts that of each."""
        names = self.factors[module]
        return self.tensors.tensors[names.b].shape[0], self.tensors.tensors[names.a].shape[1]

    def delta(self, module: str) -> torch.Tensor:
        """Return s B A of `module`, float32 [N, K]."""
        names = self.factors[module]
        a, b = (self.tensors.read(name).to(torch.float32) for name in (names.a, names.b))
        return names.scaling * (b @ a)

    def of_expert(self, parameter: str, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [r, K] and B [N, r] of an expert, float32, of a parameter of fused experts."""
        found = self._last.get(parameter)
        if found is None:
            names = self.factors[parameter]
            assert names.experts is not None
            a, b = (self.tensors.read(name).to(torch.float32) for name in (names.a, names.b))
            by_expert = b.view(len(b), -1, names.experts).permute(2, 0, 1).contiguous()
            found = a.view(names.experts, -1, a.shape[1]), by_expert
            self._last.clear()
            self._last[parameter] = found
        return found[0][expert], found[1][expert]


def _config(directory: Path) -> dict[str, Any]:
    """Read the config of a LoRA; raise `CheckpointError` if it is invalid, or has unsupported options."""
    path = directory / ADAPTER_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {ADAPTER_NAME}; expected an adapter. Give the directory that PEFT's "
            "save_pretrained wrote."
        )
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path}: 'peft_type' is {config.get('peft_type')!r}; expected 'LORA', whose product is added to "
            "weights. Other kinds of adapters cannot be merged."
        )
    unknown = [key for key, value in config.items() if key not in _KNOWN and _is_set(key, value)]
    if unknown:
        key = unknown[0]
        raise CheckpointError(
            f"{path}: {key!r} is {config[key]!r}; only plain LoRA, which adds B A to weights, is "
            f"merged. {DENSE_REMEDY}"
        )
    targets = config.get("target_parameters")
    if targets is not None and not isinstance(targets, list):
        raise CheckpointError(
            f"{path}: 'target_parameters' is {targets!r}; expected a list of names. Save the adapter again."
        )
    start = config.get("init_lora_weights", True)
    if start not in _INITIALIZATIONS:
        raise CheckpointError(
            f"{path}: 'init_lora_weights' is {start!r}, which changes the weights that the adapter "
            f"is trained beside; expected True or 'gaussian'. {DENSE_REMEDY}"
        )
    return config


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of parameters that the adapter targets."""
    return tuple(map(str, config.get("target_parameters") or ()))


def _is_target(parameter: str, config: Mapping[str, Any]) -> bool:
    """Return True if the config targets `parameter`, as PEFT finds it."""
    return any(parameter == one or parameter.endswith(f".{one}") for one in _targets(config))


def _owner(module: str) -> str:
    """Return the name of `module` without those of wrappers."""
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    return module


def _parameter(
    path: Path,
    owner: str,
    module: str,
    wrappers: int,
    fused: FusedParameters,
    config: Mapping[str, Any],
) -> str:
    """Return the parameter of the fused experts `owner` that the wrapper `module`, one of `wrappers`, is of.

    Raises `CheckpointError` if its factors cannot be merged.
    """
    targets = [f"{owner}.{name}" for name in fused.reasons if _is_target(f"{owner}.{name}", config)]
    depth = module.removeprefix(owner).count(_WRAPPED)
    if len(targets) != wrappers or depth >= wrappers:
        raise CheckpointError(
            f"{path}: {owner!r} has factors of {wrappers} parameters, and 'target_parameters' of "
            f"{ADAPTER_NAME} names {len(targets)} of it. The two are not of one adapter; save it again."
        )
    found = targets[wrappers - 1 - depth]
    reason = fused.reasons[found.rpartition(".")[2]]
    if reason is not None:
        raise CheckpointError(f"{path}: {found!r} cannot be merged: {reason}. {DENSE_REMEDY}")
    return found


def _is_set(key: str, value: Any) -> bool:
    # "none" is how `bias` says that no bias is trained.
    return bool(value) and (key, value) != ("bias", "none")


def _factors(
    path: Path,
    module: str,
    names: Mapping[str, str],
    tensors: Checkpoint,
    config: Mapping[str, Any],
    experts: int | None = None,
) -> LoraFactors:
    shapes = {factor: tensors.tensors[name].shape for factor, name in names.items()}
    if shapes.keys() != {"A", "B"} or shapes["A"][0] != shapes["B"][1] or shapes["A"][0] % (experts or 1):
        text = " and ".join(f"lora_{factor} {shape}" for factor, shape in sorted(shapes.items()))
        of = "" if experts is None else f" of {experts} experts"
        raise CheckpointError(
            f"{path}: {module!r} has {text}; expected lora_A [r, K] and lora_B [N, r]{of}. Save the adapter "
            "again."
        )
    rank = shapes["A"][0] // (experts or 1)
    is_weight = experts is None and _is_target(f"{module}.weight", config)
    key = f"{module}.weight" if is_weight else module
    alpha = _by_pattern(path, config, "alpha_pattern", key, config.get("lora_alpha"))
    asked = _by_pattern(path, config, "rank_pattern", key, config.get("r"))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"{path.parent / ADAPTER_NAME}: 'lora_alpha' is {alpha!r}; expected a number.")
    if asked != rank:
        raise CheckpointError(
            f"{path}: {module!r} has rank {rank}, and {ADAPTER_NAME} says {asked!r}. The two are not of one "
            "adapter; save it again."
        )
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraFactors(names["A"], names["B"], scaling, experts, experts is not None or is_weight)


def _by_pattern(path: Path, config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Return the entry of `config[key]` whose pattern the end of `module` matches, as PEFT finds it."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(
            f"{path.parent / ADAPTER_NAME}: {key!r} is {patterns!r}; expected an object of patterns."
        )
    for pattern, value in patterns.items():
        if not _PATTERN.fullmatch(pattern) or pattern.count("*") > _MOST_STARS:
            raise CheckpointError(
                f"{path.parent / ADAPTER_NAME}: {key!r} has the pattern {pattern!r}; expected names of "
                f"modules, with at most {_MOST_STARS} '.*' in one. {DENSE_REMEDY}"
            )
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
