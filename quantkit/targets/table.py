"""The targets of `export`, by name. Adding one is a file of this folder and a row here."""

from collections.abc import Mapping

from quantkit.targets.awq import AWQ
from quantkit.targets.gguf import GGUF
from quantkit.targets.gptq import GPTQ
from quantkit.targets.mlx import MLX
from quantkit.targets.target import Target

TARGETS: Mapping[str, Target] = {target.name: target for target in (GPTQ, AWQ, GGUF, MLX)}
