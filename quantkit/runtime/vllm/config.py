"""The `quantization_config` of a packed checkpoint as vLLM asks for it: the method of each of its layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as VllmConfig

from quantkit.checkpoint.quantization_config import SECTION, QuantizationConfig
from quantkit.errors import EnvironmentProblem
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.packing.schemes import Scheme
from quantkit.runtime.vllm.versions import moved

#: End of the name of a tensor that every packed matrix has.
_SCALE = ".weight_scale"


class QuantkitConfig(VllmConfig):  # type: ignore[misc]
    """Schemes of the modules of a checkpoint, by the names that vLLM has for its layers."""

    def __init__(self, config: QuantizationConfig) -> None:
        super().__init__()
        #: With names of transformers, and with those of vLLM.
        self.own = self.config = config
        #: Scales in the files. vLLM asks for routers too, which are no linears to transformers.
        self._scales: frozenset[str] = frozenset()
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
        self._scales = frozenset(name for name in tensors if name.endswith(_SCALE))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules as vLLM does."""
        modules = hf_to_vllm_mapper.apply_dict(dict(self.config.modules))
        self.config = QuantizationConfig(self.config.container, self.config.default, modules)
        self._scales = frozenset(hf_to_vllm_mapper.apply_list(sorted(self._scales)))

    def linears(self, prefix: str) -> Sequence[tuple[str, Scheme | None]]:
        """Return the linears that vLLM's layer `prefix` is made of, and the scheme of each."""
        owner, _, leaf = prefix.rpartition(".")
        names = [f"{owner}.{one}".lstrip(".") for one in self.packed_modules_mapping.get(leaf, [leaf])]
        return [(name, self._scheme_of(name)) for name in names]

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

        if f"{prefix}.0.{matrices[0]}{_SCALE}" not in self._scales:
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

        container = self.own.container
        if isinstance(layer, methods.LinearBase):
            linears = self.linears(prefix)
            if all(scheme is None for _, scheme in linears):
                return methods.UnquantizedLinearMethod()
            return methods.QuantkitLinearMethod(linears, container)
        if isinstance(layer, methods.VocabParallelEmbedding):
            is_head = isinstance(layer, methods.ParallelLMHead)
            name, scheme = self.linears(prefix)[0] if is_head else self.table(prefix)
            return None if scheme is None else methods.QuantkitEmbeddingMethod(name, scheme, container)
        if isinstance(layer, methods.RoutedExperts):
            stored = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            matrices = self.experts(prefix, [name for name in stored if name])
            if all(scheme is None for _, scheme in matrices):
                return None
            return methods.QuantkitExpertsMethod(layer.moe_config, matrices, container)
        return None
