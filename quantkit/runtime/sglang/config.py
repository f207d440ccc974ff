"""`quantization_config` of a packed checkpoint for SGLang: the quantization method of each layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.layers.quantization.base_config import QuantizationConfig as SglangConfig

from quantkit.checkpoint.engines import FUSED, SGLANG
from quantkit.checkpoint.hub.repository import locate
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import EnvironmentProblem
from quantkit.runtime.serving.config import PackedConfig
from quantkit.runtime.serving.stored_schemes import StoredSchemes
from quantkit.runtime.serving.versions import moved


class QuantkitConfig(PackedConfig, SglangConfig):  # type: ignore[misc]
    """Config of a packed checkpoint for SGLang; it gives each layer its quantization method."""

    def __init__(self, schemes: StoredSchemes, fused: Mapping[str, Sequence[str]], *, ties: bool) -> None:
        super().__init__()
        self.schemes, self.ties = schemes, ties
        self.packed_modules_mapping = {**FUSED, **fused}

    def get_scaled_act_names(self) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuantkitConfig":
        """Parse `quantization_config`, and read the names of the tensors in the files.

        Raises `EnvironmentProblem` if SGLang moved its classes, and `CheckpointError` for a checkpoint that
        breaks its format. Raises `UsageError` if SGLang would reorder the rows of only some tensors of a
        matrix.
        """
        try:
            import quantkit.runtime.sglang.methods  # noqa: F401

            model = config["hf_config"]
        except (ImportError, AttributeError, KeyError) as error:
            raise EnvironmentProblem(moved(SGLANG, error)) from error
        revision = getattr(model, "_commit_hash", None)
        directory = locate(model.name_or_path, revision=revision, headers_only=True).directory
        checkpoint = Checkpoint.open(directory)
        own = QuantizationConfig.from_dict(config)
        schemes = StoredSchemes(own, checkpoint.tensors, checkpoint.config, directory)
        schemes.check_rows(SGLANG)
        ties = model.get_text_config().tie_word_embeddings
        return cls(schemes, config.get("packed_modules_mapping", {}), ties=ties)

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Rename the modules as SGLang does."""
        self.schemes.rename(hf_to_sglang_mapper)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the quantization method of SGLang's layer `prefix`; None for a dense layer."""
        from quantkit.runtime.sglang import methods

        schemes = self.schemes
        if isinstance(layer, methods.LinearBase):
            return self.linear_method(methods, prefix, methods.DenseLinearMethod(schemes))
        if isinstance(layer, methods.VocabParallelEmbedding):
            return self.table_method(methods, layer, prefix)
        if isinstance(layer, methods.FusedMoE):
            schemes.asked.add(prefix)
            matrices = schemes.experts(prefix, ())
            if all(scheme is None for _, scheme in matrices):
                return None
            return methods.QuantkitExpertsMethod(matrices, schemes.container)
        return None
