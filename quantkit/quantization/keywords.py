"""Keyword arguments of `quantize` in Python, and their conversion to `QuantizeOptions`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.errors import UsageError
from quantkit.meant import LISTS, in_python, option_meant
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.recipes.recipe_options import RecipeOptions

if TYPE_CHECKING:
    from quantkit.packing.packings import PackingName
    from quantkit.packing.schemes import GroupSize, Scheme
    from quantkit.packing.zero_points import ZeroPoint
    from quantkit.quantization.allocate.budget import Budget
    from quantkit.quantization.distill.distill_options import DistillOptions
    from quantkit.recipes.recipe import Recipe


#: Calibration data as Python gives it: a path or `NAME[:SAMPLES],...`, texts, chats or rows, also as a
#: `datasets.Dataset`, or the options themselves.
Calibration = CalibrationOptions | str | Path | Iterable[Any] | None


class QuantizeKeywords(TypedDict, total=False):
    """Keyword arguments of `quantize`; its docstring explains them."""

    format: str | None
    method: str | None
    group_size: "GroupSize"
    zero_point: "ZeroPoint | None"
    scale_dtype: str | None
    packing: "PackingName | None"
    activations: str | None
    scheme: "Scheme | str | None"
    recipe: "Recipe | str | Path | None"
    lm_head: str | None
    embeddings: str | None
    kv_scales: str | None
    rules: Sequence[str]
    rotate: bool
    model_free: bool
    bits_per_weight: float | None
    formats: Sequence[str] | None
    budget: "Budget | None"
    calibration: Calibration
    calibration_samples: int | None
    calibration_length: int | None
    seed: int
    device: str
    max_shard_bytes: int
    allow_auto_map: bool
    engine: str | None
    distillation: "DistillOptions"


_OF_RECIPE = tuple(RecipeOptions.__dataclass_fields__)
_OF_RUN = (
    "device",
    "max_shard_bytes",
    "allow_auto_map",
    "resume",
    "overwrite",
    "check",
    "engine",
    "distillation",
)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_keywords(function: _Function) -> _Function:
    """Return `function` with `**given` replaced by `QuantizeKeywords` in its signature, for `help`."""
    defaults = {
        name: field.default
        for record in (CalibrationOptions, QuantizeOptions, RecipeOptions)
        for name, field in record.__dataclass_fields__.items()
    }
    own = signature(function)
    fixed = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    keywords = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=None if name in ("calibration", "recipe") else defaults.get(name),
            annotation=getattr(kind, "__forward_arg__", kind),
        )
        for name, kind in QuantizeKeywords.__annotations__.items()
    ]
    function.__signature__ = own.replace(parameters=[*fixed, *keywords])  # type: ignore[attr-defined]
    return function


def options_of(keywords: Mapping[str, Any], function: str) -> QuantizeOptions:
    """Return the options of the keyword arguments `keywords` of `function`.

    Raises `TypeError` for an unknown argument, and `UsageError` for contradicting arguments.
    """
    names = (*QuantizeKeywords.__annotations__, *_OF_RUN)
    for name, value in keywords.items():
        if name not in names:
            hint = _meant(name, value, names)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}.{hint}")
    texts = {name: keywords[name] for name in _OF_RECIPE if name in keywords}
    recipe = texts.pop("recipe", None)
    recipe_options = RecipeOptions(**{**texts, "rules": tuple(texts.get("rules") or ())})
    if recipe is not None:
        recipe_options = _with_recipe(recipe_options, recipe)
    return QuantizeOptions(
        recipe=recipe_options,
        budget=_budget(keywords),
        calibration=_calibration(keywords),
        **{name: keywords[name] for name in _OF_RUN if name in keywords},
    )


def _meant(name: str, value: object, names: Sequence[str]) -> str:
    """Return what is likely meant by the argument `name`, which is none of `names`: "" if that is unclear."""
    options = [f"--{one.replace('_', '-')}" for one in (*names, *LISTS)]
    meant = option_meant(name, str(value), options)
    if meant is not None:
        return f" {in_python(meant)}"
    near = get_close_matches(name, names, 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _with_recipe(options: RecipeOptions, recipe: "Recipe | str | Path") -> Any:
    from dataclasses import replace

    if isinstance(recipe, str | Path):
        return replace(options, recipe=recipe)
    if options != RecipeOptions():
        raise UsageError(
            "a Recipe says all about format and rules; leave out format, method, group_size, zero_point, "
            "scale_dtype, packing, activations, scheme, lm_head, embeddings, kv_scales, rules, rotate and "
            "model_free, or make the recipe of them."
        )
    return recipe


def _budget(keywords: Mapping[str, Any]) -> "Budget | None":
    budget: Any = keywords.get("budget")
    bits, formats = keywords.get("bits_per_weight"), keywords.get("formats")
    if bits is None:
        if formats is not None:
            raise UsageError(
                "formats are what bits_per_weight chooses from; give that too, or one format as format."
            )
        return cast("Budget | None", budget)
    if budget is not None:
        raise UsageError("bits_per_weight and budget are two budgets; leave one out.")
    from quantkit.quantization.allocate.budget import BitsPerWeight, Budget

    return Budget(BitsPerWeight(bits), None if formats is None else tuple(formats))


def _calibration(keywords: Mapping[str, Any]) -> CalibrationOptions:
    texts = keywords.get("calibration")
    names = ("calibration_samples", "calibration_length", "seed")
    numbers = {name.removeprefix("calibration_"): keywords[name] for name in names if name in keywords}
    if not isinstance(texts, CalibrationOptions):
        from quantkit.calibrate.data.texts import given_texts

        return CalibrationOptions(given_texts(texts), **numbers)
    if any(value is not None for value in numbers.values()):
        raise UsageError("CalibrationOptions say the samples, their length and the seed; give them there.")
    return texts
