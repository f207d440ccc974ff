"""Options of formats, methods and rules, and their conversion to a recipe.

Torch is imported only by the conversion, because the command line uses the record.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from quantkit.packing.packings import PackingName
    from quantkit.packing.schemes import GroupSize, Scheme
    from quantkit.packing.zero_points import ZeroPoint
    from quantkit.recipes.recipe import Choice, Recipe

#: Options that `--scheme` stands for; a group size may be given beside it.
_SAID_BY_SCHEME = ("format", "zero_point", "packing", "activations")


@dataclass(frozen=True)
class RecipeOptions:
    """Formats, methods and rules. A field that is None is that of the file `recipe`, else of `Choice`.

    Rules apply in this order: `rules` (`PATTERN=FORMAT[:GROUP][:METHOD]` or `PATTERN=keep`), `lm_head` (a
    format), the rules of the file, then the default made of the other fields. `embeddings`
    (`FORMAT[:GROUP][:METHOD]`) is for the token embedding. The model is rotated if `rotate` or the file says
    so. `model_free` classifies tensors by names and shapes. `activations` (a name of `ACTIVATIONS`) says how
    linears round their inputs. `scheme` (a name of `SCHEMES`) stands for a format, its zero-point, the
    activations, and the group size unless that is given; a `Scheme` says all of these itself.
    """

    format: str | None = None
    method: str | None = None
    group_size: "GroupSize" = None
    zero_point: "ZeroPoint | None" = None
    scale_dtype: str | None = None
    packing: "PackingName | None" = None
    activations: str | None = None
    scheme: "Scheme | str | None" = None
    recipe: str | Path | None = None
    lm_head: str | None = None
    embeddings: str | None = None
    #: Format of a KV cache, "fp8", for which scales of keys and values are measured and stored.
    kv_scales: str | None = None
    rules: tuple[str, ...] = ()
    rotate: bool = False
    model_free: bool = False

    def to_recipe(self, allocated_by: str | None = None) -> "Recipe":
        """Return the recipe of these options.

        `allocated_by` is the option by which formats are allocated later to linears without a rule; no other
        option may set these formats. Raises `UsageError` or `FormatError` naming the option.
        """
        from quantkit.recipes.recipe import Choice, Recipe, parse_rule, read_recipe

        given: dict[str, Any] = {
            "format": self.format,
            "group_size": self.group_size,
            "method": self.method,
            "zero_point": self.zero_point,
            "scale_dtype": self.scale_dtype,
            "packing": self.packing,
            "activations": self.activations,
        }
        if isinstance(self.scheme, str):
            given |= _of_scheme(self.scheme, given)
        elif self.scheme is not None:
            given |= _of_exact(self.scheme, given)
        if allocated_by is not None:
            # A budget may be combined with a method.
            named = {**given, "method": None} if self.scheme is None else {"scheme": self.scheme}
            _check_left_out({**named, "recipe": self.recipe}, allocated_by)
            if self.model_free:
                raise UsageError(
                    f"--model-free runs no model, and {allocated_by} measures one; leave one out."
                )
        default = Choice(**{name: value for name, value in given.items() if value is not None})
        if self.recipe is not None:
            from_file = read_recipe(Path(self.recipe), default)
            if isinstance(self.scheme, str):
                # A scheme says all of these, also where it leaves them to the defaults.
                given |= {name: getattr(default, name) for name in (*_SAID_BY_SCHEME, "group_size")}
            _check_agreeing(given, from_file.default, self.recipe)
        else:
            from_file = Recipe(default)
        first = [parse_rule(rule, from_file.default) for rule in self.rules]
        if self.lm_head is not None:
            first.append(parse_rule(f"*lm_head={self.lm_head}", Choice(method=from_file.default.method)))
        embeddings = from_file.embeddings
        if self.embeddings is not None:
            embeddings = parse_rule(f"embeddings={self.embeddings}", Choice()).choice
        rotate, rules = self.rotate or from_file.rotate, (*first, *from_file.rules)
        kv_scales = self.kv_scales or from_file.kv_scales
        return Recipe(from_file.default, rules, rotate, self.model_free, embeddings, kv_scales)


def _of_scheme(name: str, given: Mapping[str, object]) -> dict[str, object]:
    """Return the options of the scheme `name`; raise `UsageError` if `given` has one of these options."""
    from quantkit.packing.presets import SCHEMES

    preset = SCHEMES.get(name)
    if preset is None:
        raise unknown_name("scheme", name, SCHEMES)
    for option in _SAID_BY_SCHEME:
        if given[option] is not None:
            raise UsageError(
                f"--scheme {name} says the {option.replace('_', '-')}, so it does not go with "
                f"{_option(option)}. Leave one out."
            )
    size = preset.group_size if given["group_size"] is None else given["group_size"]
    return {
        "format": preset.format,
        "group_size": size,
        "zero_point": preset.zero_point,
        "packing": None if preset.packing == "bits" else preset.packing,
        "activations": preset.activations,
    }


def _of_exact(scheme: "Scheme", given: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a `Scheme`; raise `UsageError` if `given` has an option that the scheme sets."""
    for option in (*_SAID_BY_SCHEME, "group_size", "scale_dtype"):
        if given[option] is not None:
            raise UsageError(
                f"a Scheme ({scheme}) says the {option.replace('_', '-')}, so it does not go with "
                f"{_option(option)}. Leave one out."
            )
    return {"exact": scheme}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_left_out(given: Mapping[str, object], allocated_by: str) -> None:
    """Raise `UsageError` for the first option with a value, because `allocated_by` decides it."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{allocated_by} chooses the formats, so it does not go with {_option(name)}. Leave "
                "one out; --formats says what to choose from, and --rule what certain linears get."
            )


def _check_agreeing(given: Mapping[str, object], default: "Choice", recipe: str | Path) -> None:
    """Raise `UsageError` for the first option that differs from the `default` of a recipe file."""
    for name, value in given.items():
        found = getattr(default, name)
        if value is not None and found != value:
            raise UsageError(
                f"{_option('scheme' if name == 'exact' else name)} {value} and [default] of recipe {recipe} "
                f"({'its own' if found is None else found}) differ. "
                f"Give the {name.replace('_', '-')} in one place."
            )
