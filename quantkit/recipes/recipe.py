"""Recipes: which linear gets which scheme and method, or stays dense.

A recipe is an ordered list of rules over module names; the first that matches decides. A pattern is a
shell-style glob over the whole name (`*` also crosses dots), so an exact name is a pattern too. As TOML:

    [[rule]]
    match = "*.down_proj"
    format = "int8"

    [[rule]]
    match = "model.layers.0.*"
    keep = true

Linears without a matching rule get the recipe's default. A pattern that matches no linear is an error.
`[embeddings]` is for the token embedding. `rotate = true` at the top rotates the model first.
"""

import io
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.methods import METHODS, Method, method_named
from quantkit.calibrate.summaries import DEFAULT_METHOD
from quantkit.errors import QuantkitError, UsageError, unknown_name
from quantkit.files import open_regular
from quantkit.packing.activations import activations_named
from quantkit.packing.packings import PACKINGS, PackingName
from quantkit.packing.presets import DEFAULT_FORMAT, KV_SCALES, preset_named
from quantkit.packing.scale_types import MAX_GROUP_SIZE, SCALE_DTYPES
from quantkit.packing.schemes import BLOCK, GroupSize, Scheme, scheme
from quantkit.packing.zero_points import ZERO_POINTS, ZeroPoint, searched


@dataclass(frozen=True)
class Choice:
    """Treatment of a linear: a format with its options and a method, or `keep` to leave it dense.

    `exact` is a whole scheme, in place of the format and its options.
    """

    format: str = DEFAULT_FORMAT
    group_size: GroupSize = None
    zero_point: ZeroPoint = "none"
    scale_dtype: str | None = None
    method: str = DEFAULT_METHOD
    keep: bool = False
    packing: PackingName = "bits"
    activations: str = "none"
    exact: Scheme | None = None

    def scheme(self, weight_dtype: torch.dtype) -> Scheme | None:
        """Return the scheme for a weight of `weight_dtype`; None to keep it dense."""
        if self.keep or self.exact is not None:
            return None if self.keep else self.exact
        return scheme(
            self.format,
            group_size=self.group_size,
            zero_point=self.zero_point,
            scale_dtype=scale_dtype_named(self.scale_dtype),
            packing=self.packing,
            activations=self.activations,
            weight_dtype=weight_dtype,
        )

    def group_of_rows(self) -> int | None:
        """Return the weights of a row that share a scale; None for a whole row or tensor, or if dense."""
        chosen = self.scheme(torch.bfloat16)
        return None if chosen is None or not isinstance(chosen.group_size, int) else chosen.group_size

    def check(self) -> None:
        """Raise `UsageError` for an unknown method, `FormatError` if it cannot quantize to the scheme."""
        method, chosen = method_named(self.method), self.scheme(torch.bfloat16)
        if chosen is not None:
            method.suited(chosen).check(chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, for `Recipe.to_dict`."""
        named = {name: value for name, value in vars(self).items() if name != "exact"}
        return named if self.exact is None else {**named, "exact": self.exact.to_dict()}

    def of_format(self, name: str) -> "Choice":
        """Return this choice with format `name`; all else is kept if it has this format already.

        Else the format's own group size and scale dtype are taken. Method and activations are kept, and the
        zero-point and the packing if the format supports them. Of a choice with an `exact` scheme only the
        method is kept.
        """
        if self.exact is not None:
            return Choice(name, method=self.method)
        if name == self.format:
            return replace(self, keep=False)
        other = scheme(name) if preset_named(name) else None
        shiftable = other is not None and ZERO_POINTS[self.zero_point].why_not(other.format) is None
        packable = other is not None and PACKINGS[self.packing].why_not(other.format, other.planes) is None
        return Choice(
            name,
            zero_point=self.zero_point if shiftable else "none",
            method=self.method,
            packing=self.packing if packable else "bits",
            activations=self.activations,
        )


@dataclass(frozen=True)
class Rule:
    """Treatment of the linears whose names match a glob; `why` is the reason if quantkit wrote the rule."""

    match: str
    choice: Choice
    why: str | None = None


@dataclass(frozen=True)
class Fate:
    """Decision for one linear: its scheme, None if dense; its method, None if none rounds; and the reason."""

    scheme: Scheme | None
    method: Method | None
    reason: str


@dataclass(frozen=True)
class Recipe:
    """Ordered rules, and the default for linears without a rule; `rotate` to rotate the model first.

    `embeddings` is the treatment of the token embedding, which no rule matches; None leaves it dense. With
    `model_free`, names and shapes classify tensors (`model/model_free.py`). `kv_scales` is the format of a KV
    cache for which scales of keys and values are measured and stored; None stores none. Without a model that
    runs, methods with data, `rotate` and `kv_scales` are refused.
    """

    default: Choice = Choice()
    rules: tuple[Rule, ...] = ()
    rotate: bool = False
    model_free: bool = False
    embeddings: Choice | None = None
    kv_scales: str | None = None

    def __post_init__(self) -> None:
        if self.kv_scales not in (None, *KV_SCALES):
            raise unknown_name("format of KV scales", str(self.kv_scales), KV_SCALES)
        choices = (self.default, *(rule.choice for rule in self.rules))
        for choice in (*choices, *([] if self.embeddings is None else [self.embeddings])):
            choice.check()
        if self.embeddings is not None and (method := method_named(self.embeddings.method)).needs_data:
            raise UsageError(
                f"method {method.name!r} takes calibration data, and an embedding has no inputs. Choose a "
                f"method without data, such as {DEFAULT_METHOD}."
            )
        if self.embeddings is not None and self.embeddings.activations != "none":
            raise UsageError("an embedding has no inputs to round; leave out its activations.")
        if not self.model_free:
            return
        if self.kv_scales is not None:
            raise UsageError("--model-free runs no model, and --kv-scales measures one; leave one out.")
        if self.rotate:
            raise UsageError("--model-free does not go with --rotate, which asks the class of the model.")
        for choice in choices:
            if not choice.keep and method_named(choice.method).needs_data:
                without = ", ".join(name for name, method in METHODS.items() if not method.needs_data)
                raise UsageError(
                    f"--model-free runs no model, and method {choice.method!r} takes data of a run; use one "
                    f"of {without}."
                )

    def embeddings_fate(self, dtype: torch.dtype) -> Fate | None:
        """Return the decision for a token embedding of `dtype`; None if it stays dense."""
        return None if self.embeddings is None else _fate(None, self.embeddings, None, dtype)

    def fates(
        self, linears: Mapping[str, torch.dtype], kept: Mapping[str, str], dense: Mapping[str, str]
    ) -> dict[str, Fate]:
        """Return the decision for every linear.

        linears   weight dtype by module name
        kept      linears that only a rule quantizes, with the reason
        dense     modules that no rule can quantize, with the reason

        Raises `UsageError` for a pattern that matches no linear.
        """
        used: set[int] = set()
        fates = {}
        for name, dtype in linears.items():
            at = next((i for i, rule in enumerate(self.rules) if fnmatchcase(name, rule.match)), None)
            if at is not None:
                used.add(at)
            rule = None if at is None else self.rules[at]
            fates[name] = _fate(rule, self.default, kept.get(name), dtype)
        for i, rule in enumerate(self.rules):
            if i not in used:
                shadowed = any(fnmatchcase(name, rule.match) for name in linears)
                raise UsageError(_unmatched(rule.match, shadowed, linears, dense))
        return fates

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values for the manifest; `from_dict` is the inverse."""
        return {
            "rotate": self.rotate,
            **({} if self.embeddings is None else {"embeddings": self.embeddings.to_dict()}),
            **({"model_free": True} if self.model_free else {}),
            **({} if self.kv_scales is None else {"kv_scales": self.kv_scales}),
            "default": self.default.to_dict(),
            "rules": [
                {
                    "match": rule.match,
                    **rule.choice.to_dict(),
                    **({} if rule.why is None else {"why": rule.why}),
                }
                for rule in self.rules
            ],
        }

    @classmethod
    def from_dict(cls, data: Any) -> "Recipe":
        """Parse the output of `to_dict`; raise `UsageError` for anything else."""
        if not isinstance(data, dict) or data.keys() - {"embeddings", "kv_scales"} != {
            "rotate",
            "default",
            "rules",
        }:
            raise UsageError(
                "a recipe is an object of 'rotate', 'default' and 'rules', and of 'embeddings' if it packs "
                "them, and 'kv_scales' if it measures them."
            )
        rules = data["rules"]
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise UsageError("the 'rules' of a recipe are a list of objects.")
        found = []
        for rule in rules:
            why = rule.get("why")
            if why is not None and not isinstance(why, str):
                raise UsageError(f"the 'why' of a rule is {why!r}; it is a text.")
            given = {k: v for k, v in rule.items() if v is not None and k not in ("why", "exact")}
            made = _rule(given, Choice())
            found.append(Rule(made.match, _exactly(made.choice, rule), why))
        default, table = (
            {k: v for k, v in one.items() if v is not None and k != "exact"} if isinstance(one, dict) else one
            for one in (data["default"], data.get("embeddings"))
        )
        embeddings = None if table is None else _exactly(_choice(table, Choice()), data["embeddings"])
        chosen = _exactly(_choice(default, Choice()), data["default"])
        kv_scales = data.get("kv_scales")
        return cls(chosen, tuple(found), _flag(data["rotate"]), embeddings=embeddings, kv_scales=kv_scales)


def _exactly(choice: Choice, data: Mapping[str, Any]) -> Choice:
    """Return `choice` with the scheme in `data`, the output of `to_dict`, if there is one."""
    exact = data.get("exact")
    return choice if exact is None else replace(choice, exact=Scheme.from_dict(exact))


def _fate(rule: Rule | None, default: Choice, kept: str | None, dtype: torch.dtype) -> Fate:
    if rule is None and kept is not None:
        return Fate(None, None, kept)
    choice = default if rule is None else rule.choice
    reason = "default" if rule is None else rule.why or f"rule {rule.match!r}"
    if choice.keep:
        return Fate(None, None, f"kept by {reason}")
    chosen = choice.scheme(dtype)
    return Fate(chosen, method_named(choice.method).suited(chosen), reason)


def _unmatched(
    pattern: str, shadowed: bool, linears: Mapping[str, torch.dtype], dense: Mapping[str, str]
) -> str:
    if shadowed:
        return f"rule {pattern!r} never applies: earlier rules match all it matches. Move it up or drop it."
    other = next((name for name in dense if fnmatchcase(name, pattern)), None)
    if other is not None:
        return f"rule {pattern!r} matches no linear; {other!r} stays dense: {dense[other]}. Drop the rule."
    examples = ", ".join(repr(name) for name in list(linears)[:3])
    return (
        f"rule {pattern!r} matches no linear of the model. Names look like {examples}; correct the pattern."
    )


def parse_rule(text: str, default: Choice) -> Rule:
    """Parse a rule `PATTERN=FORMAT[:GROUP][:METHOD]` or `PATTERN=keep`.

    Missing options are those of `default` if it has this format. Else a missing group size and the scale
    dtype are the format's own. Activations and a missing method are `default`'s; zero-point and packing are,
    too, if the format supports them.
    """
    pattern, separator, value = text.partition("=")
    if not separator or not pattern or not value:
        raise UsageError(f"rule {text!r} is not PATTERN=FORMAT[:GROUP][:METHOD] or PATTERN=keep.")
    if value == "keep":
        return Rule(pattern, Choice(keep=True))
    name, *options = value.split(":")
    if len(options) > 2:
        raise UsageError(f"rule {text!r} has more than FORMAT:GROUP:METHOD after the '='.")
    choice = default.of_format(name)
    if options and options[0]:
        choice = replace(choice, group_size=parse_group_size(options[0]))
    if len(options) > 1:
        choice = replace(choice, method=options[1])
    return Rule(pattern, choice)


def parse_group_size(text: str | None) -> GroupSize:
    """Parse a group size: an integer above 0, `channel`, `tensor` or a block (`128x128`); None stays None."""
    if text in (None, "channel", "tensor") or BLOCK.fullmatch(text):
        return text
    # Check the length first: Python refuses to convert thousands of digits.
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= MAX_GROUP_SIZE:
        raise UsageError(
            f"group size {text!r} is not a positive integer, 'channel' or 'tensor', nor a block such as "
            "'128x128'."
        )
    return int(text)


def parse_zero_point(text: str) -> ZeroPoint:
    """Parse a kind of zero-point from the command line or a file."""
    if text not in searched():
        raise unknown_name("zero-point", text, searched())
    return ZERO_POINTS[text].name


def parse_packing(text: str) -> PackingName:
    """Parse a packing from the command line or a file."""
    if text not in PACKINGS:
        raise unknown_name("packing", text, PACKINGS)
    return PACKINGS[text].name


def scale_dtype_named(name: str | None) -> torch.dtype | None:
    """Return the scale dtype called `name`; None, for the format's default, stays None."""
    if name is not None and name not in SCALE_DTYPES:
        raise unknown_name("scale dtype", name, SCALE_DTYPES)
    return None if name is None else SCALE_DTYPES[name]


def _parse_toml(text: str) -> dict[str, Any]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS:
            raise ValueError(
                f"line {number} has more than {_MAX_DOTS} dots; expected keys of one or two names"
            )
    return tomllib.loads(text)


MAX_CHARACTERS = 1 << 20  # Rules for ten thousand linears.
#: Most dots in a line: tomllib takes at least quadratic time in the names of a dotted key.
_MAX_DOTS = 200
#: Example of a rule for errors.
_EXAMPLE = """a line [[rule]], then lines such as match = "*.down_proj" and format = "int8\""""


def read_recipe(path: Path, default: Choice) -> Recipe:
    """Read a recipe from a TOML file.

    Rules inherit missing options from the file's `default`, and that from the argument. Raises `UsageError`
    naming the file and the key, or the line, for anything that is not a recipe.
    """
    if path.suffix.lower() != ".toml":
        found = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise UsageError(f"recipe {path} {found}; expected TOML in a file that ends in '.toml': {_EXAMPLE}.")
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"it has more than the {MAX_CHARACTERS} characters it may have. Let patterns stand for names"
            )
        data = _parse_toml(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"recipe {path} cannot be read: {error}.") from error
    if unknown := set(data) - {"rotate", "embeddings", "kv_scales", "default", "rule"}:
        raise UsageError(
            f"recipe {path} has unknown keys {sorted(unknown)}; it has 'rotate', 'embeddings', 'kv_scales', "
            "'default' and 'rule'."
        )
    try:
        base = _choice(data.get("default", {}), default)
        rules = data.get("rule", [])
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise UsageError("'rule' must be an array of tables; write [[rule]] above each.")
        rotate = _flag(data.get("rotate", False))
        embeddings = _choice(data["embeddings"], Choice()) if "embeddings" in data else None
        written = tuple(_written_rule(rule, base) for rule in rules)
        return Recipe(base, written, rotate, embeddings=embeddings, kv_scales=data.get("kv_scales"))
    except QuantkitError as error:
        raise UsageError(f"recipe {path}: {error}") from error


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"'rotate' is {value!r}; expected true or false.")
    return value


def _rule(data: dict[str, Any], default: Choice) -> Rule:
    match = data.get("match")
    if not isinstance(match, str) or not match:
        raise UsageError(f"a rule needs a 'match' pattern; found {match!r}.")
    return Rule(match, _choice({k: v for k, v in data.items() if k != "match"}, default))


def _written_rule(data: dict[str, Any], default: Choice) -> Rule:
    """Parse a rule of a file; refuse keys without effect."""
    rule = _rule(data, default)
    idle = sorted(data.keys() - {"match", "keep"})
    if rule.choice.keep and idle:
        raise UsageError(
            f"rule {rule.match!r} keeps its linears dense, so {idle} would do nothing; set 'keep' to false, "
            "or leave that out."
        )
    return rule


_TYPES: dict[str, tuple[type, ...]] = {
    "format": (str,),
    "group_size": (int, str),
    "zero_point": (str,),
    "scale_dtype": (str,),
    "method": (str,),
    "keep": (bool,),
    "packing": (str,),
    "activations": (str,),
}


def _choice(data: Any, default: Choice) -> Choice:
    if not isinstance(data, dict):
        raise UsageError(f"'default' must be a table; found {type(data).__name__}.")
    known = {field.name for field in fields(Choice)} - {"exact"}
    if unknown := set(data) - known:
        raise UsageError(f"unknown keys {sorted(unknown)}; known are {sorted(known)}.")
    for key, value in data.items():
        if not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and bool not in _TYPES[key]):
            expected = " or ".join(kind.__name__ for kind in _TYPES[key])
            raise UsageError(f"{key!r} is {value!r}; expected {expected}.")
    inherited = default.of_format(data["format"]) if "format" in data else default
    if inherited.exact is not None and (idle := sorted(data.keys() - {"method", "keep"})):
        raise UsageError(f"a Scheme says all about the format, so {idle} would do nothing; leave that out.")
    merged = {**vars(inherited), **data}
    if isinstance(merged["group_size"], str):
        merged["group_size"] = parse_group_size(merged["group_size"])
    merged["zero_point"] = parse_zero_point(merged["zero_point"])
    merged["packing"] = parse_packing(merged["packing"])
    # Raises for an unknown name.
    activations_named(merged["activations"])
    return Choice(**merged)
