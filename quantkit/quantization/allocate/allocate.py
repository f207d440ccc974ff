"""Allocate formats automatically: from a budget of bytes or of time to a recipe with a rule for every linear.

Linears that engines fuse share a format, so formats are chosen per group of linears. The cost of a format in
bytes follows from headers, its cost in time from tile tables (`quantization/allocate/budget.py`). Its cost in
accuracy is measured once (`quantization/allocate/sensitivity.py`) and kept in the user's cache. From there a
knapsack is solved for any budget (`recipes/knapsack.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from quantkit.calibrate.data.samples import Samples, token_digest
from quantkit.calibrate.methods import Method, method_named
from quantkit.checkpoint.engines import Engine
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.model.blocks import Decoder
from quantkit.model.structure import Linear, Structure
from quantkit.packing.schemes import Scheme
from quantkit.progress import Progress
from quantkit.quantization.allocate.allocation import Allocation, Share
from quantkit.quantization.allocate.budget import Budget, stored_bytes
from quantkit.quantization.allocate.offers import offered
from quantkit.quantization.allocate.sensitivity import TOKENS, Losses, Sensitivities, measure
from quantkit.quantization.allocate.sensitivity_cache import SensitivityCache, cache_key
from quantkit.quantization.plan_warnings import fused_sets
from quantkit.recipes.knapsack import Option, allocate
from quantkit.recipes.recipe import Recipe, Rule
from quantkit.workers import cpu_workers


@dataclass(frozen=True)
class Allocated:
    """Result of an allocation: the recipe, and notes for the user."""

    recipe: Recipe
    allocation: Allocation
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; `from_dict` is the inverse."""
        recipe, allocation = self.recipe.to_dict(), self.allocation.to_dict()
        return {"recipe": recipe, "allocation": allocation, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Allocated":
        """Parse the output of `to_dict`."""
        allocation = Allocation.from_dict(data["allocation"])
        return cls(Recipe.from_dict(data["recipe"]), allocation, tuple(data["notes"]))


def groups_of(structure: Structure, recipe: Recipe) -> tuple[tuple[Linear, ...], ...]:
    """Return the groups of linears that share a format, in the order of the model.

    A group is the linears that engines fuse (q, k and v; gate and up), or the experts of a layer. Excluded
    are linears with a rule in `recipe`, lm_head, and linears that stay dense without a rule.
    """
    free = {
        name: linear
        for name, linear in structure.linears.items()
        if linear.kind != "lm_head"
        and name not in structure.kept
        and not any(fnmatchcase(name, rule.match) for rule in recipe.rules)
    }
    first: dict[str, str] = {}
    for members in fused_sets(free):
        first |= dict.fromkeys(members, next(iter(members)))
    for name, linear in free.items():
        if linear.kind == "experts":
            first[name] = name.rpartition(".")[0]
    found: dict[str, list[Linear]] = {}
    for name, linear in free.items():
        found.setdefault(first.get(name, name), []).append(linear)
    return tuple(map(tuple, found.values()))


def allocate_formats(
    checkpoint: Checkpoint,
    structure: Structure,
    recipe: Recipe,
    budget: Budget,
    device: torch.device,
    read: Callable[[int], Samples],
    report: Progress | None = None,
    engine: Engine | None = None,
) -> Allocated:
    """Choose a format for each linear of the decoder, with the least expected divergence within `budget`.

    Linears with a rule in `recipe` keep the format of the rule. All others get the default method, and the
    formats that minimize the sum of expected divergences; with `engine`, only formats that the engine reads.
    `read` gives calibration samples for an embedding with a number of rows. Raises `UsageError` for a budget
    out of reach, and for formats of unknown cost or unsupported by the method. Also raised for models whose
    sensitivity cannot be measured.
    """
    method, limit = method_named(recipe.default.method), budget.limit
    groups = groups_of(structure, recipe)
    if not groups:
        raise UsageError(
            f"{limit.option} has nothing to allocate: rules decide on every linear. Drop rules, or leave "
            f"{limit.option} out."
        )
    weights = sum(math.prod(linear.shape) * len(linear.stored) for group in groups for linear in group)
    allowed = math.floor(limit.amount * limit.in_one(weights))
    offer, unreached = offered(checkpoint, groups, budget, method.name, weights, engine)
    choices, schemes, costs = offer.choices, offer.schemes, offer.costs
    losses, notes = _losses(checkpoint, schemes, recipe, device, read, report)
    options = [
        [Option(cost, sum(losses[linear.module][i] for linear in group)) for i, cost in row.items()]
        for group, row in zip(groups, costs, strict=True)
    ]
    rules: list[Rule] = []
    shares: list[Share] = []
    for group, row, of_group, number in zip(groups, costs, options, allocate(options, allowed), strict=True):
        i, option = list(row)[number], of_group[number]
        rules += [
            Rule(linear.module, choices[i], f"allocated, {limit.amount:g} {limit.unit}") for linear in group
        ]
        modules = tuple(linear.module for linear in group)
        nbytes = sum(stored_bytes(linear, schemes[linear.module][i]) for linear in group)
        shares.append(Share(modules, str(schemes[modules[0]][i]), nbytes, option.cost, option.loss))
    return Allocated(
        replace(recipe, rules=(*recipe.rules, *rules)),
        Allocation(limit, weights, allowed, tuple(shares)),
        (*unreached, *offer.notes, *notes),
    )


def _losses(
    checkpoint: Checkpoint,
    schemes: Mapping[str, tuple[Scheme, ...]],
    recipe: Recipe,
    device: torch.device,
    read: Callable[[int], Samples],
    report: Progress | None,
) -> tuple[Losses, tuple[str, ...]]:
    """Return the loss of each scheme for each linear, from the cache or measured; and notes."""
    # float32 for every model, because the measured differences are small.
    decoder = Decoder(checkpoint, device, torch.float32)
    if decoder.head_name is None:
        raise UsageError(
            f"{checkpoint.directory}: the model has no head that predicts tokens, by which sensitivities are "
            "measured. Leave the budget out, and choose formats with --format and --rule."
        )
    for name in schemes:
        if not any(f"{name}.".startswith(f"{block}.") for block in decoder.block_names):
            raise UsageError(
                f"{name} is no linear of a block, and no sensitivity is measured of others. Decide on it "
                f"with a rule, such as --rule '{name}=int8'."
            )
    samples = read(decoder.embedding_rows)
    if samples.beside:
        raise UsageError(
            f"{samples.origin}: sensitivities are measured on text, and this has images. Give "
            "--calibration of text for the budget; `plan --json` shows the recipe that comes of it."
        )
    tokens = samples.tokens[: max(1, TOKENS // samples.tokens.shape[1])]
    method = method_named(recipe.default.method)
    key = cache_key(checkpoint, token_digest(tokens), method.name, device.type, schemes)
    cache = SensitivityCache.of(key)
    found, notes = cache.read(schemes)
    if found is None:
        lanes = cpu_workers() if device.type == "cpu" else 1
        found = measure(decoder, schemes, method, tokens, lanes, report)
        checkpoint.check_unchanged()
        notes = (*notes, *cache.write(found))
    notes = (*samples.notes, *notes, *_notes_on_experts(found), *_notes_on_scaling(method, schemes))
    return found.losses, notes


def _notes_on_scaling(method: Method, schemes: Mapping[str, tuple[Scheme, ...]]) -> Iterator[str]:
    """Yield a note if the method scales inputs that a scheme rounds."""
    rounds = any(scheme.activations is not None for of_linear in schemes.values() for scheme in of_linear)
    if method.input_scaling is not None and rounds:
        yield (
            f"the budget counts rounded inputs as they are, and --method {method.name} scales them first, so "
            "they may cost far less. Compare with the same budget without schemes that round inputs."
        )


def _notes_on_experts(found: Sensitivities) -> Iterator[str]:
    """Yield notes on experts that no token chose."""
    unchosen = {name: counts.count(0) for name, counts in found.expert_tokens.items() if 0 in counts}
    if unchosen:
        first, experts = next(iter(unchosen)), sum(map(len, found.expert_tokens.values()))
        yield (
            f"no token of the texts that sensitivity is measured on chose {sum(unchosen.values())} of "
            f"{experts} experts ({unchosen[first]} of {len(found.expert_tokens[first])} of {first}); each "
            "counts as if one token, the mean of all, had chosen it. Texts more like what the model will "
            f"see, or up to {TOKENS} tokens of them, choose more."
        )
