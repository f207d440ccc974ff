"""Options of a run of `quantize`. Imports no torch, because the command line takes its defaults from here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.errors import UsageError
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.recipes.recipe_options import RecipeOptions

if TYPE_CHECKING:
    from quantkit.checkpoint.output.directory import Mode
    from quantkit.quantization.allocate.budget import Budget
    from quantkit.recipes.recipe import Recipe


#: Defaults.
DEFAULT_RECIPE, DEFAULT_CALIBRATION = RecipeOptions(), CalibrationOptions()
DEFAULT_DISTILLATION = DistillOptions()


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of a run: its recipe or budget, its device, and the handling of the output.

    recipe            scheme and method of each linear
    budget            bits per weight or milliseconds per token: linears without a rule get the formats that
                      cost the least accuracy within it; a resumed run keeps them
    calibration       texts for methods with data, and to measure sensitivities for a budget
    device            where the arithmetic runs; "auto" takes a GPU if there is one
    allow_auto_map    accept a config that names remote code, which is dropped and never run
    resume            continue an interrupted run
    overwrite         replace an earlier output
    check             run the result on a fixed prompt before it is finished, and store the logits for
                      `verify`; `QuantizeResult.unchecked` is the reason if memory is too small
    engine            "vllm" or "sglang", or a version such as "vllm==0.26.0": a budget chooses formats that
                      the engine reads, and a plan that it cannot load is refused
    distillation      time or steps of methods that train the model end to end
    """

    recipe: "RecipeOptions | Recipe" = DEFAULT_RECIPE
    budget: "Budget | None" = None
    calibration: CalibrationOptions = DEFAULT_CALIBRATION
    device: str = "auto"
    max_shard_bytes: int = 2 * 10**9
    allow_auto_map: bool = False
    resume: bool = False
    overwrite: bool = False
    check: bool = False
    engine: str | None = None
    distillation: DistillOptions = DEFAULT_DISTILLATION

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("resume and overwrite exclude each other: continue the run, or start it anew.")

    def to_recipe(self) -> "Recipe":
        """Return the recipe of these options; with a budget, before formats are allocated."""
        if isinstance(self.recipe, RecipeOptions):
            return self.recipe.to_recipe(None if self.budget is None else self.budget.limit.option)
        return self.recipe

    @property
    def mode(self) -> "Mode":
        """Return the accepted states of the output directory."""
        from quantkit.checkpoint.output.directory import Mode

        return Mode.of(self.resume, self.overwrite)
