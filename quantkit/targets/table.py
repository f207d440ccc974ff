"""Table of the targets of `export`, by name. A new target is a module in this folder and a row."""

from collections.abc import Mapping

from quantkit.targets.awq import AWQ
from quantkit.targets.gguf import GGUF
from quantkit.targets.gptq import GPTQ
from quantkit.targets.mlx import MLX
from quantkit.targets.target import Target

TARGETS: Mapping[str, Target] = {target.name: target for target in (GPTQ, AWQ, GGUF, MLX)}
