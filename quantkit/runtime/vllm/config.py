"""`quantization_config` of a packed checkpoint for vLLM: the method of each of vLLM's layers."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as VllmConfig

from quantkit.checkpoint.quantization_config import SECTION, QuantizationConfig
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.packing.schemes import Scheme
from quantkit.runtime.vllm.versions import moved

#: End of the name of a tensor that every packed matrix has.
_SCALE = ".weight_scale"
#: Linears that vLLM fuses, by the name of the fused one. Not every class of vLLM lists its own.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Names of gate, up and down of an expert, which a layer of vLLM may leave to its loader.
_OF_EXPERTS = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))


class QuantkitConfig(VllmConfig):  # type: ignore[misc]
    """Schemes of the modules of a checkpoint, by the names that vLLM has for its layers."""

    def __init__(self, config: QuantizationConfig) -> None:
        super().__init__()
        #: With names of transformers, and with those of vLLM.
        self.own = self.config = config
        #: Names of scales in the files, by vLLM's. vLLM asks for routers too, no linears to transformers.
        self._scales: dict[str, str] = {}
        #: Layers of vLLM that asked for a method, and the packed matrices that have got one.
        self._asked: set[str] = set()
        self._taken: set[str] = set()
        self._is_checked = False
        self._hf_config: Any = None
        self._directory = Path()

    def get_name(self) -> str:
        return "quantkit"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(ACTIVATION_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuantkitConfig":
        """Parse `quantization_config`.

        Raises `EnvironmentProblem` for a vLLM that moved its classes, and `CheckpointError`.
        """
        try:
            import quantkit.runtime.vllm.methods  # noqa: F401
        except (ImportError, AttributeError) as error:
            raise EnvironmentProblem(moved(error)) from error
        return cls(QuantizationConfig.from_dict(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take over quantkit's compressed-tensors checkpoints if the user asks for `quantkit`."""
        return "quantkit" if user_quant == "quantkit" and SECTION in hf_quant_cfg else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read which matrices are packed, and keep the config of the model."""
        from vllm.transformers_utils.config import get_safetensors_params_metadata

        self._hf_config, self._directory = hf_config, Path(model_name)
        tensors = get_safetensors_params_metadata(model_name, revision=revision)
        self._scales = {name: name for name in tensors if name.endswith(_SCALE)}

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules as vLLM does."""
        modules = hf_to_vllm_mapper.apply_dict(dict(self.config.modules))
        self.config = QuantizationConfig(self.config.container, self.config.default, modules)
        self._scales = hf_to_vllm_mapper.apply_dict(self._scales)

    def get_cache_scale_mapper(self) -> Any:
        """Return vLLM's renaming of tensors, without the shapes of packed matrices.

        vLLM calls this when its model is built and before it loads weights: it permutes the rows of any
        tensor of some modules, and a shape has none. Raises `UsageError` as `check_taken`.
        """
        from vllm.model_executor.models.utils import WeightsMapper

        self.check_taken()
        mapper = super().get_cache_scale_mapper()
        return mapper | WeightsMapper(orig_to_new_suffix={".weight_shape": None})

    def check_taken(self) -> None:
        """Raise `UsageError` for a packed matrix beside modules of vLLM's model that has no method.

        Layers of which vLLM asked for no module are on another rank, or for speculative decoding.
        """
        from vllm.distributed import get_pp_group

        if self._is_checked:
            return
        self._is_checked = True
        built = {_place(prefix) for prefix in self._asked}
        if get_pp_group().world_size == 1:
            # Embedding and head, which other ranks of a pipeline have.
            built |= {"", *(prefix.partition(".")[0] for prefix in self._asked)}
        left = [
            stored.removesuffix(_SCALE)
            for scale, stored in self._scales.items()
            if not {scale, stored} & self._taken and _place(scale) in built
        ]
        if left:
            more = f" and {len(left) - 1} more" if left[1:] else ""
            raise UsageError(
                f"{left[0]!r}{more} is packed, and vLLM's class for this model asks no plug-in about it. "
                f"Quantize the model again with --rule '{left[0]}=keep', or load it with quantkit.load."
            )

    def linears(self, prefix: str) -> Sequence[tuple[str, Scheme | None]]:
        """Return the linears that vLLM's layer `prefix` is made of, and the scheme of each."""
        owner, _, leaf = prefix.rpartition(".")
        # A class may fuse what the file holds apart or as one matrix, and list the parts or not.
        named = self.packed_modules_mapping.get(leaf, (leaf,))
        found = [
            [(name, self._scheme_of(name)) for name in (f"{owner}.{one}".lstrip(".") for one in parts)]
            for parts in (named, (leaf,), _FUSED.get(leaf, ()))
        ]
        return next((one for one in found if any(scheme for _, scheme in one)), found[0])

    def _scheme_of(self, name: str) -> Scheme | None:
        """Return the scheme of a linear: that of most is not named, and the files say which are packed."""
        is_packed = name in self.config.modules or name + _SCALE in self._scales
        return self.config.scheme_of(name) if is_packed else None

    def table(self, prefix: str) -> tuple[str, Scheme | None]:
        """Return the embedding called `prefix`, or the input embedding if that is empty, and its scheme."""
        if prefix or not any(self.own.modules.values()):
            return prefix, self.config.modules.get(prefix)
        model: Any = self._meta_model()
        table = model.get_input_embeddings()
        name = next((name for name, module in model.named_modules() if module is table), "")
        return name, self.own.modules.get(name)

    def experts(self, prefix: str, matrices: Sequence[str]) -> Sequence[tuple[str, Scheme | None]]:
        """Return the parameter of the model, and its scheme, in which each of `matrices` is.

        They are names of matrices of an expert in the file, below those of vLLM's layer `prefix`.
        """
        from quantkit.model.names import renamed

        matrices = next(
            (of for of in (matrices, *_OF_EXPERTS) if f"{prefix}.0.{of[0]}{_SCALE}" in self._scales), ()
        )
        if not matrices:
            return [(prefix, None)]
        stored = [f"{prefix}.0.{matrix}.weight" for matrix in matrices]
        names = [place.parameter for _, place in renamed(self._meta_model(), stored)]
        return [(name, self.own.scheme_of(name)) for name in names]

    def _meta_model(self) -> Any:
        from quantkit.model.model_class import meta_model

        return meta_model(self._hf_config.to_dict(), self._directory)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method of vLLM's layer `prefix`; None where vLLM's own runs it dense."""
        from quantkit.runtime.vllm import methods

        container, check = self.own.container, self.check_taken
        self._asked.add(prefix)
        if isinstance(layer, methods.LinearBase):
            linears = self.linears(prefix)
            self._taken |= {name + _SCALE for name, _ in linears}
            if all(scheme is None for _, scheme in linears):
                return methods.UnquantizedLinearMethod()
            return methods.QuantkitLinearMethod(linears, container, check)
        if isinstance(layer, methods.VocabParallelEmbedding):
            is_head = isinstance(layer, methods.ParallelLMHead)
            name, scheme = self.linears(prefix)[0] if is_head else self.table(prefix)
            self._taken.add(name + _SCALE)
            return None if scheme is None else methods.QuantkitEmbeddingMethod(name, scheme, container, check)
        if isinstance(layer, methods.RoutedExperts):
            stored = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            matrices = self.experts(prefix, [name for name in stored if name])
            if all(scheme is None for _, scheme in matrices):
                return None
            self._taken |= {name for name in self._scales if name.startswith(f"{prefix}.")}
            return methods.QuantkitExpertsMethod(layer.moe_config, matrices, container, check)
        return None


def _place(name: str) -> str:
    """Return the layer that `name` is in, down to the number, or else the first part of its owner."""
    found = re.match(r"(.+?\.\d+)\.", name)
    return found[1] if found else name.removesuffix(_SCALE).rpartition(".")[0].partition(".")[0]
