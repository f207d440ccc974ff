"""Plug-in for transformers: packed checkpoints load packed and ready to run, and are saved unchanged.

`register` adds the plug-in to transformers and `unregister` removes it. `patches` holds all changes to
transformers and to the loaded model.
"""

import copy
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantkit.checkpoint.compressed_tensors import stored_formats
from quantkit.checkpoint.manifest import check_beside
from quantkit.checkpoint.quantization_config import QuantizationConfig, changed_config
from quantkit.checkpoint.safetensors_header import read_header, read_json
from quantkit.checkpoint.source import CONFIG_NAME, Checkpoint
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.model.names import OwnNames, names_in_own_class
from quantkit.packing.schemes import PARTS
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.replace import packed_modules, schemes_in, swap_modules, unpack_modules
from quantkit.runtime.transformers.headers import check_headers
from quantkit.runtime.transformers.patches import adapters, generation, loading, parallel, quantizers, table

#: Dtypes of models by their name in config.json.
DTYPES = {str(one).removeprefix("torch."): one for one in (*ACTIVATION_DTYPES, torch.float64)}


class QuantkitConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a packed checkpoint, kept verbatim so that saving writes it back.

    Raises `CheckpointError` for anything that `QuantizationConfig.from_dict` refuses.
    """

    def __init__(self, **data: Any) -> None:
        self.parsed = QuantizationConfig.from_dict(data)
        self.quant_method = data["quant_method"]
        self._data = copy.deepcopy(data)

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the `quantization_config` entry of config.json, unchanged."""
        return copy.deepcopy(self._data)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return `to_dict()`; transformers leaves out defaults here, but no value has one."""
        return self.to_dict()


class QuantizesWhileLoading(Protocol):
    """Interface of a `quantization_config` that quantizes a dense checkpoint (`quantkit.QuantkitConfig`)."""

    def pack(self, directory: Path, model: nn.Module) -> Path:
        """Quantize the checkpoint in `directory`; return a packed directory that is deleted with `model`."""


class QuantkitQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces linears and fused experts by packed modules before transformers loads the weights.

    If the config quantizes a dense checkpoint, transformers loads the files of the packed result instead.
    """

    requires_calibration = False
    quantization_config: QuantkitConfig

    def __init__(self, quantization_config: QuantkitConfig | QuantizesWhileLoading, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._routes_on_host = False
        self._dtypes: dict[str, torch.dtype] = {}
        self._experts: dict[str, tuple[str, ...]] = {}
        self._input_parts: frozenset[str] = frozenset()
        self._own_names: OwnNames | None = None
        self._quantizes: QuantizesWhileLoading | None = None
        self._packed_file: Path | None = None
        if not isinstance(quantization_config, QuantkitConfig):
            self._quantizes = quantization_config
        elif self.pre_quantized:
            self._use(quantization_config)
        else:
            raise UsageError(
                "this quantization_config is of a packed checkpoint, and the one to load is dense. Give "
                "quantkit.QuantkitConfig(format=...), which quantizes it."
            )

    def _use(self, quantization_config: QuantkitConfig) -> None:
        """Set the `quantization_config` of a packed checkpoint, and the tensor names that follow from it."""
        self.quantization_config, self.pre_quantized = quantization_config, True
        container = quantization_config.parsed.container
        # transformers finds per-expert tensors of packed experts by the first name other than "weight".
        parts = sorted(PARTS, key=lambda part: part != "scale")
        names = [stored.part_name("weight", part) for part in parts for stored in stored_formats(container)]
        self.serialized_names = {"weight": list(dict.fromkeys(names))}

    def _quantize(self, model: nn.Module, files: list[str] | None) -> None:
        """Quantize the dense checkpoint of `files`, and replace the entries of `files` by the packed files.

        Does nothing if the checkpoint is packed already.
        """
        if self._quantizes is None:
            return
        if not files:
            raise UsageError("a model is quantized while its files are loaded, and there are none.")
        packed = Checkpoint.open(self._quantizes.pack(Path(files[0]).parent, model))
        self._use(QuantkitConfig(**packed.config["quantization_config"]))
        # The list that transformers loads from next.
        files[:] = map(str, packed.shards)
        self._quantizes, self._packed_file = None, packed.shards[0]

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        self._quantize(model, kwargs.get("checkpoint_files"))
        paths = [Path(file) for file in kwargs.get("checkpoint_files") or ()]
        self._own_names = _own_names(model, paths)
        swap_modules(model, self.quantization_config.parsed, self._names)
        loading.skip_initializing(model)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parallel.divide_packed(model)
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self.note_experts(model)
        if paths:
            check_headers(model, self, paths)
            check_beside(paths)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        _check_loaded(model, self._packed_file)
        for _, module in packed_modules(model):
            # The loader makes every floating-point parameter trainable.
            module.requires_grad_(False)
            module.align()
        generation.apply(model)
        parallel.divide_forwards(model)
        from quantkit.runtime.ready import make_ready

        make_ready(model)
        for _, module in packed_modules(model):
            if isinstance(module, PackedExperts) and not module.is_grouped(model.dtype):
                self._routes_on_host = True
        loading.keep_expert_shapes(model)
        loading.keep_offloaded_dtypes(model)
        loading.cast_renamed(model, self._dtypes)
        # Save under the names of the model's own class.
        loading.forget_renamed_base(model)
        return model

    @property
    def _names(self) -> Mapping[str, str] | None:
        """Return the name in `quantization_config` by that of the module; None if the names are the same."""
        return None if self._own_names is None else self._own_names.modules

    @property
    def is_for_another_class(self) -> bool:
        """Return True if the model is of another class than the files, so that names differ."""
        return self._own_names is not None

    def note_experts(self, model: nn.Module) -> None:
        """Record the packed experts of `model`; call this before transformers asks how tensors are merged."""
        self._experts = loading.parameters_of_experts(model)
        self._input_parts = loading.input_parts_of_experts(model)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: nn.Module) -> Any:
        """Return the list `weight_conversions` of transformers, extended by quantkit's conversions.

        Those that merge packed experts or rename a base model's prefix come first, those that merge input
        scales of experts last. transformers 5.24 passes `model`, 5.17 does not.
        """
        own = loading.merge_experts(self._experts, weight_conversions)
        # Saving tries the last first, and those of weights also match longer names (5.12, 5.19).
        last = loading.merge_input_scales([*own, *weight_conversions], sorted(self._input_parts))
        if self._own_names is not None and self._own_names.prefix is not None:
            own.append(loading.RenamedBase.of(*self._own_names.prefix))
        return super().update_weight_conversions([*own, *weight_conversions, *last], *model)

    def _convert_model_for_quantization(self, model: nn.Module) -> None:
        # For compressed-tensors, transformers would unfuse some experts here and rename their layers.
        return None

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """Return (state dict, metadata) for `save_pretrained`; (None, {}) if no weight is offloaded to disk.

        Updates the model's `quantization_config` to its present modules: the names of its class, new heads,
        and linears that were replaced. Raises `EnvironmentProblem` if torch cannot gather shards of ranks.

        The state dict has maps of the files of offloaded weights, opened now: transformers would read those
        shard by shard, after it has removed or replaced files of the directory. The metadata is empty.
        """
        parallel.check_joinable(model)
        model.config.quantization_config = self._config_of(model)
        if "disk" not in (getattr(model, "hf_device_map", None) or {}).values():
            return None, {}
        state = model.state_dict()
        on_disk = [name for name, tensor in state.items() if tensor.is_meta]
        return {**state, **{name: load_offloaded_parameter(model, name) for name in on_disk}}, {}

    def _config_of(self, model: nn.Module) -> QuantkitConfig:
        """Return `quantization_config` for the present modules of `model`; the loaded config if that fits."""
        config, names = self.quantization_config, self._names
        schemes = schemes_in(model, config.parsed, names)
        if names is None and all(config.parsed.scheme_of(name) == one for name, one in schemes.items()):
            return config
        return QuantkitConfig(**changed_config(config.to_dict(), schemes, names))

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        # Saving a model stores the name of its dtype in the config, from which transformers reads it.
        named = DTYPES[dtype] if isinstance(dtype, str) else dtype
        unpack_modules(model, named or model.dtype)
        # The conversions would split experts as if they were packed. 5.17 keeps them; 5.24 drops them too.
        vars(model).pop("_weight_conversions", None)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        # With adapters: transformers refuses to train packed weights themselves, as they have no gradients.
        return True

    @property
    def is_compileable(self) -> bool:
        # Experts without grouped GEMMs route on the host.
        return not self._routes_on_host


def _check_loaded(model: nn.Module, file: Path | None) -> None:
    """Raise `EnvironmentProblem` if a packed parameter of `model` differs from its tensor in `file`.

    Only the first parameter is compared for which the file has a tensor of the same dtype. Does nothing if
    `file` is None.
    """
    if file is None:
        return
    checkpoint = Checkpoint.of_files([file])
    for name, module in packed_modules(model):
        for entry, parameter in module.named_parameters(recurse=False):
            stored = checkpoint.tensors.get(f"{name}.{entry}")
            if stored is None or parameter.is_meta or stored.torch_dtype != parameter.dtype:
                continue
            if parameter.shape != stored.shape or not torch.equal(
                checkpoint.read(stored.name), parameter.cpu()
            ):
                raise EnvironmentProblem(
                    f"transformers {version('transformers')} did not load {stored.name!r} of the checkpoint "
                    "that was quantized for it. Quantize with quantkit.quantize and load the result."
                )
            return


def _own_names(model: nn.Module, files: list[Path]) -> OwnNames | None:
    """Return the names that the modules of `model` have in the checkpoint of `files`.

    None if `model` is of the checkpoint's own class, or if there is no config.json beside the files.
    """
    if not files or not (files[0].parent / CONFIG_NAME).is_file():
        return None
    directory = files[0].parent
    stored = [name for file in files for name in read_header(file)]
    return names_in_own_class(model, read_json(directory / CONFIG_NAME), directory, stored)


def register() -> None:
    """Register with transformers; does nothing if registered."""
    quantizers.apply(QuantkitConfig, QuantkitQuantizer)
    adapters.apply_once_imported()


def unregister() -> None:
    """Remove everything that quantkit added to transformers; packed models stay as they are."""
    for patch in table.PATCHES:
        if patch.of == "process":
            patch.undo(None)


# On import, not only in the import hook: this module may be imported before the hook runs.
register()
