"""Base of the config classes of the plug-ins for vLLM and SGLang."""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.checkpoint.quantization_config import SECTION
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.runtime.serving.stored_schemes import StoredSchemes


class PackedConfig:
    """Mixin for an engine's config class of the method `quantkit`; it comes before the engine's base class.

    The engine asks the config for the method's name, activation dtypes and least compute capability, and for
    the method object of each layer.

    ties                     True if the head is tied to the embedding
    packed_modules_mapping   names of the linears that the engine fuses, by the name of the fused layer
    """

    schemes: StoredSchemes
    ties: bool
    packed_modules_mapping: dict[str, Any]

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
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return "quantkit" if `user_quant` is "quantkit" and quantkit wrote the config; else None."""
        return "quantkit" if user_quant == "quantkit" and SECTION in hf_quant_cfg else None

    def linear_method(self, methods: Any, prefix: str, dense: Any) -> Any:
        """Return the quantization method of the engine's linear layer `prefix`; `dense` if it is not packed.

        A layer may join several stored linears, as qkv_proj does; it is packed if one of them is. `methods`
        is the module `methods.py` of the plug-in. The names of the linears are added to `schemes.asked`, so
        that `check_all_asked` can find packed matrices that no layer uses.
        """
        linears = self.schemes.linears(prefix, self.packed_modules_mapping)
        self.schemes.asked.update(name for name, _ in linears)
        packed = any(scheme is not None for _, scheme in linears)
        return methods.QuantkitLinearMethod(linears, self.schemes) if packed else dense

    def table_method(self, methods: Any, layer: Any, prefix: str) -> Any:
        """Return the quantization method of `layer`, an embedding or head called `prefix`; None if dense.

        `methods` is the module `methods.py` of the plug-in. The name is added to `schemes.asked`, so
        that `check_all_asked` can find packed matrices that no layer uses.
        """
        is_head = isinstance(layer, methods.ParallelLMHead)
        shape = layer.org_vocab_size, layer.embedding_dim
        name, scheme = self.schemes.linears(prefix, {})[0] if is_head else self.schemes.table(prefix, shape)
        self.schemes.asked.add(name)
        # SGLang, and some model classes of vLLM, use a tied embedding as the head too.
        is_tied = self.ties and not is_head
        given = (self.schemes.container, is_head or is_tied, is_tied)
        return None if scheme is None else methods.QuantkitEmbeddingMethod(name, scheme, *given)
