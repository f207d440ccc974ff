"""`quantization_config` of a packed checkpoint for vLLM: the quantization method of each layer."""

from pathlib import Path
from typing import Any

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as VllmConfig

from quantkit.checkpoint.engines import VLLM
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.errors import EnvironmentProblem
from quantkit.runtime.serving.config import PackedConfig
from quantkit.runtime.serving.stored_schemes import StoredSchemes
from quantkit.runtime.serving.versions import moved


class QuantkitConfig(PackedConfig, VllmConfig):  # type: ignore[misc]
    """Config of a packed checkpoint for vLLM; it gives each layer its quantization method."""

    def __init__(self, config: QuantizationConfig) -> None:
        super().__init__()
        self._config, self.ties = config, False
        self.schemes = StoredSchemes(config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuantkitConfig":
        """Parse `quantization_config`, and patch vLLM so that all layers ask it for a quantization method.

        Raises `EnvironmentProblem` if vLLM moved its classes, and `CheckpointError` like
        `QuantizationConfig.from_dict`.
        """
        try:
            from quantkit.runtime.vllm.unasked import ask_for_all_layers
        except (ImportError, AttributeError) as error:
            raise EnvironmentProblem(moved(VLLM, error)) from error
        ask_for_all_layers()
        return cls(QuantizationConfig.from_dict(config))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the names of the tensors in the files of `model_name`; vLLM calls this after `from_config`.

        Raises `UsageError` if vLLM would reorder the rows of only some tensors of a matrix.
        """
        from vllm.transformers_utils.config import get_safetensors_params_metadata

        tensors = get_safetensors_params_metadata(model_name, revision=revision)
        architecture = None if hf_config is None else hf_config.to_dict()
        self.ties = hf_config is not None and hf_config.get_text_config().tie_word_embeddings
        self.schemes = StoredSchemes(self._config, tensors, architecture, Path(model_name))
        self.schemes.check_rows(VLLM)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules as vLLM does."""
        self.schemes.rename(hf_to_vllm_mapper)

    def get_cache_scale_mapper(self) -> Any:
        """Return vLLM's renaming of tensors, without the shapes of packed matrices.

        vLLM permutes the rows of every tensor of some modules, and a shape has no rows.
        """
        from vllm.model_executor.models.utils import WeightsMapper

        mapper = super().get_cache_scale_mapper()
        return mapper | WeightsMapper(orig_to_new_suffix={".weight_shape": None})

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the quantization method of vLLM's layer `prefix`.

        A dense linear gets vLLM's method without quantization, other dense layers get None.
        """
        from quantkit.runtime.vllm import methods

        schemes = self.schemes
        if isinstance(layer, methods.LinearBase):
            return self.linear_method(methods, prefix, methods.UnquantizedLinearMethod())
        if isinstance(layer, methods.VocabParallelEmbedding):
            return self.table_method(methods, layer, prefix)
        if isinstance(layer, methods.RoutedExperts):
            stored = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            matrices = schemes.experts(prefix, [name for name in stored if name])
            if all(scheme is None for _, scheme in matrices):
                return None
            schemes.asked.add(prefix)
            return methods.QuantkitExpertsMethod(layer.moe_config, matrices, schemes.container)
        return None
