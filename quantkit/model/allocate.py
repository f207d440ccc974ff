"""Automatic bit allocation: from a budget in bits per weight to a recipe with a rule for every linear.

Groups of linears that share a format are chosen for together. What each format costs a group in bytes follows
from headers; what it costs the model's predictions is measured once (`model/sensitivity.py`) and kept in the
user's cache, from which any budget is solved (`calibrate/allocation.py`).
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from quantkit.calibrate.allocation import Option, allocate
from quantkit.calibrate.menu import candidates
from quantkit.calibrate.methods import method_named
from quantkit.calibrate.recipe import Choice, Recipe, Rule
from quantkit.calibrate.samples import Samples, token_digest
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.model.blocks import Decoder
from quantkit.model.notes import fused_sets
from quantkit.model.plan import QUANTIZABLE_DTYPES
from quantkit.model.sensitivity import TOKENS, Losses, Report, Sensitivities, measure
from quantkit.model.sensitivity_cache import SensitivityCache, cache_key
from quantkit.model.structure import Linear, Structure
from quantkit.packing.schemes import Scheme


@dataclass(frozen=True)
class Budget:
    """What a user asks for: so many bits per weight, scales included, and formats to choose from (None for
    the menu; see `calibrate/menu.py`).
    """

    bits_per_weight: float
    formats: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.bits_per_weight < math.inf:
            raise UsageError(
                f"{self.bits_per_weight} bits per weight are no budget; use a number such as 4.5."
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        formats = None if self.formats is None else list(self.formats)
        return {"bits_per_weight": self.bits_per_weight, "formats": formats}


@dataclass(frozen=True)
class Share:
    """What one group got: its linears, the scheme, its bytes, and the divergence that is expected of it."""

    linears: tuple[str, ...]
    scheme: str
    nbytes: int
    divergence: float


@dataclass(frozen=True)
class Allocation:
    """What was asked for and what every group got.

    `weights` are those of the groups, `budget_bytes` what they may take and `nbytes` what they take;
    `divergence` is the KL divergence in nats per token that is expected of all groups together.
    """

    bits_per_weight: float
    weights: int
    budget_bytes: int
    shares: tuple[Share, ...]

    @property
    def nbytes(self) -> int:
        return sum(share.nbytes for share in self.shares)

    @property
    def divergence(self) -> float:
        return sum(share.divergence for share in self.shares)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "bits_per_weight": 8 * self.nbytes / self.weights,
            "asked_bits_per_weight": self.bits_per_weight,
            "weights": self.weights,
            "bytes": self.nbytes,
            "budget_bytes": self.budget_bytes,
            "expected_kl": self.divergence,
            "groups": [
                {
                    "linears": list(share.linears),
                    "scheme": share.scheme,
                    "bytes": share.nbytes,
                    "expected_kl": share.divergence,
                }
                for share in self.shares
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Allocation":
        """The allocation that `to_dict` wrote; `KeyError` or `TypeError` for anything else."""
        shares = tuple(
            Share(tuple(one["linears"]), one["scheme"], one["bytes"], one["expected_kl"])
            for one in data["groups"]
        )
        return cls(data["asked_bits_per_weight"], data["weights"], data["budget_bytes"], shares)


@dataclass(frozen=True)
class Allocated:
    """The recipe of an allocation, and what the reader should know of how it came to be."""

    recipe: Recipe
    allocation: Allocation
    notes: tuple[str, ...]


def groups_of(structure: Structure, recipe: Recipe) -> tuple[tuple[Linear, ...], ...]:
    """The groups that an allocation decides on, in the order of the model: linears that share a format.

    Those are what engines fuse (q, k and v; gate and up), and gate and up, or down, of all experts of a
    layer. Linears for which `recipe` has a rule, and lm_head, are left out.
    """
    free = {
        name: linear
        for name, linear in structure.linears.items()
        if linear.kind != "lm_head" and not any(fnmatchcase(name, rule.match) for rule in recipe.rules)
    }
    first: dict[str, str] = {}
    for members in fused_sets(free):
        first |= dict.fromkeys(members, next(iter(members)))
    found: dict[str, list[Linear]] = {}
    for name, linear in free.items():
        found.setdefault(first.get(name, name), []).append(linear)
    return tuple(map(tuple, found.values()))


def stored_bytes(linear: Linear, scheme: Scheme) -> int:
    """Bytes of a linear in a scheme, all parts of all its matrices; other containers need no more."""
    parts = scheme.storage_shapes(linear.shape).values()
    return len(linear.stored) * sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts)


def allocate_bits(
    checkpoint: Checkpoint,
    structure: Structure,
    recipe: Recipe,
    budget: Budget,
    device: torch.device,
    read: Callable[[int], Samples],
    report: Report | None = None,
) -> Allocated:
    """The recipe that has the rules of `recipe` first and then, with the method of its default, for every
    other linear of the decoder the format that makes the expected divergence the smallest within `budget`.

    `read` gives calibration samples for an embedding of so many rows. `UsageError` for a budget out of reach,
    formats that the method cannot do, and models whose sensitivity cannot be measured.
    """
    method = method_named(recipe.default.method)
    choices = candidates(method.name, budget.formats)
    groups = groups_of(structure, recipe)
    if not groups:
        raise UsageError(
            "--bits-per-weight has nothing to allocate: rules decide on every linear. Drop rules, or leave "
            "--bits-per-weight out."
        )
    schemes = {linear.module: _schemes(checkpoint, linear, choices) for group in groups for linear in group}
    costs = [
        [
            sum(stored_bytes(linear, schemes[linear.module][i]) for linear in group)
            for i in range(len(choices))
        ]
        for group in groups
    ]
    weights = sum(math.prod(linear.shape) * len(linear.stored) for group in groups for linear in group)
    allowed = math.floor(budget.bits_per_weight * weights / 8)
    _check_reachable(budget, costs, weights, allowed)
    losses, notes = _losses(checkpoint, structure, schemes, recipe, device, read, report)
    options = [
        [Option(cost, sum(losses[linear.module][i] for linear in group)) for i, cost in enumerate(row)]
        for group, row in zip(groups, costs, strict=True)
    ]
    chosen = allocate(options, allowed)
    why = f"allocated, {budget.bits_per_weight:g} bits per weight"
    rules = tuple(
        Rule(linear.module, choices[i], why)
        for group, i in zip(groups, chosen, strict=True)
        for linear in group
    )
    shares = tuple(
        Share(
            tuple(linear.module for linear in group),
            str(schemes[group[0].module][i]),
            row[i].cost,
            row[i].loss,
        )
        for group, row, i in zip(groups, options, chosen, strict=True)
    )
    return Allocated(
        replace(recipe, rules=(*recipe.rules, *rules)),
        Allocation(budget.bits_per_weight, weights, allowed, shares),
        notes,
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
        found.append(scheme.for_columns(linear.shape[1]))
    return tuple(found)


def _check_reachable(budget: Budget, costs: Sequence[Sequence[int]], weights: int, allowed: int) -> None:
    least, most = (sum(map(pick, costs)) for pick in (min, max))
    if least <= allowed and budget.bits_per_weight <= 8 * most / weights + 1e-9:
        return
    # Rounded to what is in reach.
    low, high = math.ceil(8e3 * least / weights) / 1e3, math.floor(8e3 * most / weights) / 1e3
    raise UsageError(
        f"{budget.bits_per_weight:g} bits per weight are out of reach: with these formats the linears take "
        f"{low:.3f} to {high:.3f}, scales included. Ask for as many, or name other formats with --formats."
    )


def _losses(
    checkpoint: Checkpoint,
    structure: Structure,
    schemes: Mapping[str, tuple[Scheme, ...]],
    recipe: Recipe,
    device: torch.device,
    read: Callable[[int], Samples],
    report: Report | None,
) -> tuple[Losses, tuple[str, ...]]:
    """What each scheme costs each linear: from the cache, or measured and put there; and notes."""
    # float32 whatever the model is in: what is measured are small differences.
    decoder = Decoder(checkpoint, device, torch.float32)
    for name in schemes:
        if not any(name.startswith(f"{block}.") for block in decoder.block_names):
            raise UsageError(
                f"{name} is outside the decoder's blocks, where no sensitivity is measured. Decide on it "
                f"with a rule, such as --rule '{name}=int8'."
            )
    samples = read(decoder.embedding_rows)
    tokens = samples.tokens[: max(1, TOKENS // samples.tokens.shape[1])]
    method = method_named(recipe.default.method)
    key = cache_key(checkpoint, token_digest(tokens), method.name, device.type, schemes)
    cache = SensitivityCache.of(key)
    found, notes = cache.read(schemes)
    if found is None:
        lanes = max(1, os.cpu_count() or 1) if device.type == "cpu" else 1
        found = measure(decoder, schemes, method, tokens, lanes, report)
        checkpoint.check_unchanged()
        notes = (*notes, *cache.write(found))
    return found.losses, (*samples.notes, *notes, *_notes_on_experts(found))


def _notes_on_experts(found: Sensitivities) -> Iterator[str]:
    """Which experts nothing is known of."""
    unchosen = {name: counts.count(0) for name, counts in found.expert_tokens.items() if 0 in counts}
    if unchosen:
        first, experts = next(iter(unchosen)), sum(map(len, found.expert_tokens.values()))
        yield (
            f"no token of the texts that sensitivity is measured on chose {sum(unchosen.values())} of "
            f"{experts} experts ({unchosen[first]} of {len(found.expert_tokens[first])} of {first}); each "
            "counts as if one token, the mean of all, had chosen it. Texts more like what the model will "
            f"see, or up to {TOKENS} tokens of them, choose more."
        )
