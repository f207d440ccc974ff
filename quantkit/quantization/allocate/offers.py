"""List the schemes that a budget chooses from, for every linear, and the cost of each."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from quantkit.checkpoint.engines import Engine
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.model.structure import QUANTIZABLE_DTYPES, Linear
from quantkit.packing.presets import ENGINE_MENU
from quantkit.packing.schemes import Scheme
from quantkit.quantization.allocate.budget import Budget, Limit, Price
from quantkit.quantization.allocate.readable import expressible, readable
from quantkit.recipes.candidates import MENU, MENU_OF_ENGINES, NAMED_OF_ENGINES, candidates
from quantkit.recipes.recipe import Choice

Groups = Sequence[Sequence[Linear]]
#: Formats that an error suggests where those of a budget take too much, or too little: the nearest first.
SMALLER, LARGER = ("int4", "int3", "int2", "ternary", "binary"), ("int8",)


@dataclass(frozen=True)
class Offer:
    """Schemes to choose from, by linear, and the cost of each group by index of its scheme.

    choices  what the schemes are in a recipe
    notes    what the user should know of schemes that were left out
    """

    choices: tuple[Choice, ...]
    schemes: Mapping[str, tuple[Scheme, ...]]
    costs: Sequence[Mapping[int, int]]
    notes: tuple[str, ...]

    @property
    def range(self) -> tuple[int, int]:
        """Return the least and the largest cost of all groups together."""
        least, most = (sum(pick(row.values()) for row in self.costs) for pick in (min, max))
        return least, most


def offered(
    checkpoint: Checkpoint,
    groups: Groups,
    budget: Budget,
    method: str,
    weights: int,
    engine: Engine | None,
) -> tuple[Offer, tuple[str, ...]]:
    """Return the first offer of `budget` that reaches its limit, and a note if that is not the first.

    `weights` is the number of weights of all groups. With `engine` only formats that it reads are offered.
    Raises `UsageError` if no offer reaches the limit.
    """
    limit, in_one = budget.limit, budget.limit.in_one(weights)
    menus: tuple[tuple[str, ...] | None, ...] = budget.asked if engine is None else (budget.formats,)
    notes = list[str]()
    offer_of = partial(_offer, checkpoint, groups, limit, method, engine=engine)
    for names in menus:
        menu = ",".join(names or ())
        offer = offer_of(names)
        least, most = offer.range
        if least <= math.floor(limit.amount * in_one) and limit.amount <= most / in_one + 1e-9:
            return offer, tuple(f"{note}; --formats {menu} reaches them." for note in notes)
        low, high = _inwards(offer.range, in_one)
        few = f"{limit.amount:g} {limit.unit} are out of reach of --formats {menu}"
        notes.append(f"{few}, {low:.3f} to {high:.3f}")
    if low > high:
        raise UsageError(
            f"{limit.amount:g} {limit.unit}: the linears take {most / in_one:.5f} in each of these formats, "
            "so a budget chooses nothing. Name other formats with --formats, or leave the budget out and "
            "name one by --format or --scheme."
        )
    remedy = _remedy(offer_of, names or (ENGINE_MENU,), limit.amount, in_one)
    raise UsageError(
        f"{limit.amount:g} {limit.unit} are out of reach: with these formats the linears take {low:.3f} to "
        f"{high:.3f}, all parts counted. {remedy}"
    )


def _offer(
    checkpoint: Checkpoint,
    groups: Groups,
    limit: Limit,
    method: str,
    names: tuple[str, ...] | None,
    engine: Engine | None,
) -> Offer:
    menus = (MENU,) if engine is None else (MENU_OF_ENGINES, NAMED_OF_ENGINES)
    choices = candidates(method, names, *menus)
    schemes = {linear.module: _schemes(checkpoint, linear, choices) for group in groups for linear in group}
    if engine is None:
        every = frozenset(range(len(choices)))
        portable = names == (ENGINE_MENU,)
        allowed = [expressible(group, schemes) if portable else every for group in groups]
    else:
        allowed = readable(engine, groups, schemes)
    return Offer(choices, schemes, *_costs(limit, limit.price(checkpoint), groups, schemes, allowed))


def _remedy(
    offer_of: Callable[[tuple[str, ...]], Offer], names: tuple[str, ...], limit: float, in_one: float
) -> str:
    """Return what a user can do whose `limit` formats `names` do not reach, a sentence or two.

    Formats are suggested from the nearest on, until the limit is reached. Only those are that change the
    range of costs.
    """
    costs = offer_of(names).range
    below = costs[0] > math.floor(limit * in_one)
    found = names
    for name in SMALLER if below else LARGER:
        try:
            wider = offer_of((*found, name)).range
        except UsageError:
            continue
        if wider[0] < costs[0] if below else wider[1] > costs[1]:
            found, costs = (*found, name), wider
        if costs[0] <= math.floor(limit * in_one) and limit <= costs[1] / in_one:
            break
    if found != names:
        low, high = _inwards(costs, in_one)
        kind, menu = "smaller" if below else "larger", ",".join(found)
        ask = f"Ask for as many, or name {kind} formats too: those of --formats {menu}"
        return f"{ask} take {low:.3f} to {high:.3f}."
    if below:
        return (
            "Ask for as many: no smaller format is there for this method, nor for an engine if one is named."
        )
    return (
        "Ask for as many; rules, whose linears the budget does not count, keep some dense, such as --rule "
        "'*.down_proj=keep'."
    )


def _inwards(costs: tuple[int, int], in_one: float) -> tuple[float, float]:
    """Return a range of costs in the unit of a limit, rounded so that the budgets named can be reached."""
    return math.ceil(1e3 * costs[0] / in_one) / 1e3, math.floor(1e3 * costs[1] / in_one) / 1e3


def _costs(
    limit: Limit,
    price: Price,
    groups: Sequence[Sequence[Linear]],
    schemes: Mapping[str, Sequence[Scheme]],
    allowed: Sequence[Collection[int]],
) -> tuple[list[dict[int, int]], tuple[str, ...]]:
    """Return the cost of each group by index of its scheme, and a note on schemes of unknown cost.

    Schemes of unknown cost, or not in `allowed`, are left out. Raises `UsageError` for a group without any
    remaining scheme.
    """
    rows = []
    unknown: dict[tuple[int, int], dict[str, None]] = {}
    for group, numbers in zip(groups, allowed, strict=True):
        row: dict[int, int] = {}
        for i in sorted(numbers):
            prices = [price(linear, schemes[linear.module][i]) for linear in group]
            known = [one for one in prices if one is not None]
            if len(known) == len(group):
                row[i] = sum(known)
            for linear, one in zip(group, prices, strict=True):
                if one is None:
                    unknown.setdefault(linear.shape, {})[str(schemes[linear.module][i])] = None
        if not row:
            names, kinds = (
                ", ".join(dict.fromkeys(found))
                for found in (
                    [linear.module for linear in group],
                    [f"{linear.shape[0]}x{linear.shape[1]}" for linear in group],
                )
            )
            raise UsageError(
                f"there is no format to choose for {names} ({kinds}): the {limit.unit} of none is known. "
                f"{limit.remedy} Or decide on them with a rule, such as --rule '{group[0].module}=int4'."
            )
        rows.append(row)
    return rows, (_note_on_unknown(limit, unknown),) if unknown else ()


def _note_on_unknown(limit: Limit, unknown: Mapping[tuple[int, int], Collection[str]]) -> str:
    """Return a note on the schemes that were not considered, by shape [N, K] of linears."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for (n, k), names in unknown.items():
        alike.setdefault(tuple(names), []).append(f"{n}x{k}")
    listed = "; ".join(f"{', '.join(names)} at {', '.join(shapes)}" for names, shapes in alike.items())
    return (
        f"the {limit.unit} of some formats are not known, so these are not chosen: {listed}. {limit.remedy}"
    )


def _schemes(checkpoint: Checkpoint, linear: Linear, choices: Sequence[Choice]) -> tuple[Scheme, ...]:
    source = checkpoint.tensors[f"{linear.stored[0]}.weight"]
    if source.dtype not in QUANTIZABLE_DTYPES:
        raise UsageError(
            f"{source.name!r} is {source.dtype}, which is some format's codes already. Keep it dense with "
            f"--rule '{linear.module}=keep'."
        )
    found = []
    for choice in choices:
        scheme = choice.scheme(source.torch_dtype)
        assert scheme is not None
        reason = None if scheme.activations is None else scheme.activations.why_not(linear.shape[1])
        if reason is not None:
            raise UsageError(
                f"{linear.module!r} cannot be packed as {scheme}: {reason}. Leave that scheme out of "
                f"--formats, or decide on the linear with a rule, such as --rule '{linear.module}=int8'."
            )
        found.append(scheme.for_columns(linear.shape[1]))
    return tuple(found)
