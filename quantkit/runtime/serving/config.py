"""Base of the config classes of plug-ins, a mixin before the engine's own base class."""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.checkpoint.quantization_config import SECTION
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.runtime.serving.stored_schemes import StoredSchemes


class PackedConfig:
    """Name, dtypes and GPUs of the quantization method `quantkit`."""

    schemes: StoredSchemes

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
