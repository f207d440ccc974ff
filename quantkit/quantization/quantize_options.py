"""Options of a run of `quantize`. Imports no torch: the command line takes its defaults from here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.errors import UsageError
from quantkit.recipes.recipe_options import RecipeOptions

if TYPE_CHECKING:
    from quantkit.checkpoint.output.directory import Mode
    from quantkit.quantization.allocate.budget import Budget
    from quantkit.recipes.recipe import Recipe


#: Where nothing is said.
DEFAULT_RECIPE, DEFAULT_CALIBRATION = RecipeOptions(), CalibrationOptions()


@dataclass(frozen=True)
class QuantizeOptions:
    """The recipe or budget of a run, where it computes, and what it does with its output.

    `recipe` says what linears get. A `budget` is in bits per weight or milliseconds per token. Linears
    without a rule then get the formats that cost the least accuracy within it. Sensitivities are measured on
    the texts of `calibration`; a resumed run keeps the formats. `calibration` also says what texts methods
    with data are calibrated on.

    `device` is where the arithmetic runs; "auto" takes a GPU if there is one. `allow_auto_map` accepts a
    config that names remote code, which is dropped and never run. With `resume` a run that was interrupted
    goes on, with `overwrite` an earlier output is replaced. With `check` the result is run on a fixed prompt
    before it is finished. Its logits are stored in the manifest, with which `verify` compares. Where memory
    is too small for that, `QuantizeResult.unchecked` says so. `engine` is "vllm" or "sglang", or a version
    such as "vllm==0.26.0". A budget then chooses among what it reads, and what it would not load is refused.
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

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("resume and overwrite exclude each other: continue the run, or start it anew.")

    def to_recipe(self) -> "Recipe":
        """The recipe of these options; with a budget, before formats are allocated."""
        if isinstance(self.recipe, RecipeOptions):
            return self.recipe.to_recipe(None if self.budget is None else self.budget.limit.option)
        return self.recipe

    @property
    def mode(self) -> "Mode":
        """The state that the output directory may be in."""
        from quantkit.checkpoint.output.directory import Mode

        return Mode.RESUME if self.resume else Mode.OVERWRITE if self.overwrite else Mode.NEW
