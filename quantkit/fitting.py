"""Find the formats in which a model fits a memory, with its KV cache for a context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.memory import CONTEXT_BYTES, WORKSPACE_BYTES
from quantkit.model.forward.kv_size import kv_bytes
from quantkit.planning import open_structure
from quantkit.quantization.plan import Plan, make_plan
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.recipes.candidates import candidates
from quantkit.recipes.recipe import Choice
from quantkit.recipes.recipe_options import RecipeOptions
from quantkit.runtime.cache.kv_cache import kv_scheme

#: What is tried by default: what engines read, and fewer bits that quantkit reads.
FORMATS = ("engine", "int6", "int5", "int3:64", "int2:64")


@dataclass(frozen=True)
class Need:
    """Memory of a device, and the use that a model must support in it.

    memory      bytes of the device
    context     tokens of a sequence, prompt and answer together
    batch       sequences at a time
    kv_cache    format of the KV cache, None for 16 bits
    on_gpu      True to count CUDA's context and the workspaces of its libraries
    """

    memory: int
    context: int
    batch: int = 1
    kv_cache: str | None = None
    on_gpu: bool = True

    def __post_init__(self) -> None:
        if min(self.context, self.batch) < 1:
            raise UsageError(f"context {self.context} and batch {self.batch} are both at least 1.")

    @property
    def beside(self) -> int:
        """Return the bytes that are neither weights nor cache, as counted on an H200 (`gpu_memory.py`)."""
        return CONTEXT_BYTES + WORKSPACE_BYTES if self.on_gpu else 0

    def row_bytes(self, size: int) -> int:
        """Return the bytes of a key or value of one head with `size` numbers."""
        if self.kv_cache is None:
            return 2 * size
        shapes = kv_scheme(self.kv_cache).for_columns(size).storage_shapes((1, size))
        return sum(
            dtype.itemsize * math.prod(shape) for part, (dtype, shape) in shapes.items() if part != "shape"
        )


@dataclass(frozen=True)
class Fit:
    """Format of the linears, `choice` (None: unquantized), and bytes of the model in this format.

    They are those of its `weights`, of the KV `cache`, and of what is in memory `beside`. `readers` are tools
    that can load it.
    """

    choice: Choice | None
    weights: int
    cache: int
    beside: int
    bits_per_weight: float
    readers: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Return the bytes of weights, KV cache and the rest."""
        return self.weights + self.cache + self.beside

    @property
    def options(self) -> str:
        """Return the options of `quantize` for this format."""
        if self.choice is None:
            return ""
        parts = [f"--format {self.choice.format}"]
        if self.choice.group_size is not None:
            parts.append(f"-g {self.choice.group_size}")
        if self.choice.scale_dtype is not None:
            parts.append(f"--scale-dtype {self.choice.scale_dtype}")
        return " ".join(parts)


def fits(
    source: str | Path, options: QuantizeOptions, need: Need, formats: Sequence[str] | None = None
) -> tuple[Checkpoint, tuple[Fit, ...]]:
    """Return the bytes of the model, unquantized and in every format, largest first.

    `formats` are names as `--formats` takes them. Linears with a rule keep it. Reads headers only. Raises
    `UsageError` for options that choose a format, and for a model whose cache is not known.
    """
    recipe = options.recipe
    recipe = recipe.to_recipe("--fit") if isinstance(recipe, RecipeOptions) else recipe
    checkpoint, structure = open_structure(resolve(source, headers_only=True), recipe, options.allow_auto_map)
    cache = kv_bytes(checkpoint.config, checkpoint.directory, need.context, need.batch, need.row_bytes)
    found = []
    for choice in candidates(recipe.default.method, tuple(formats or FORMATS)):
        planned = make_plan(
            checkpoint, structure, replace(recipe, default=choice), max_shard_bytes=options.max_shard_bytes
        )
        found.append(_fit(choice, planned, cache, need))
    if not found:
        raise UsageError(f"method {recipe.default.method!r} can do none of the formats. Name others.")
    weights = sum(tensor.elements for tensor in checkpoint.tensors.values())
    dense = Fit(None, 2 * weights, cache, need.beside, 16.0, ("transformers",))
    ordered = sorted(found, key=lambda one: -one.total)
    return checkpoint, (dense, *ordered)


def _fit(choice: Choice, planned: Plan, cache: int, need: Need) -> Fit:
    bits = planned.bits_per_weight["model"]
    return Fit(choice, planned.output_bytes, cache, need.beside, float(bits or 0.0), planned.readers)
