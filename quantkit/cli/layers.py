"""What plan, quantize and inspect print of a model: a table of its linears, and what stays dense and why."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.engines import ENGINES
from quantkit.cli.console import note, print_table, say
from quantkit.files import size_text

if TYPE_CHECKING:
    from quantkit.checkpoint.model_record import LayerRecord
    from quantkit.quantization.allocate.allocation import Allocation, Share
    from quantkit.verification.engine import EngineReport


Layers = Mapping[str, "LayerRecord"]


def print_layers(layers: Layers, dense: Mapping[str, str], *, every_layer: bool) -> None:
    """A line per linear, or per kind of linear unless `every_layer`, then all that is not by default."""
    groups = _grouped(layers, every_layer)
    _print_groups(groups)
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, layer in (member for members in groups for member in members):
        if layer.reason != "default":
            by_reason.setdefault((layer.scheme or "dense", layer.reason), []).append(name)
    for name, reason in dense.items():
        by_reason.setdefault(("dense", reason), []).append(name)
    for (stored, reason), names in by_reason.items():
        patterns = list(dict.fromkeys(map(_pattern, names)))
        shown = names[0] if len(names) == 1 else patterns[0] + (", ..." if len(patterns) > 1 else "")
        say(f"{len(names)} {stored}: {reason} ({shown})")


def _print_groups(groups: Collection[Sequence[tuple[str, "LayerRecord"]]]) -> None:
    """Print a row for each group of linears that differ in name alone; names are folded for 80 columns."""
    measured = any(layer.relative_error is not None for members in groups for _, layer in members)
    headings = ("linear", "count", "NxK", "stored as", "method", "bits", *(["error"] if measured else []))
    table: list[tuple[str, ...]] = []
    for members in groups:
        name, first = members[0]
        rows, columns = first.shape
        errors = [layer.relative_error for _, layer in members if layer.relative_error is not None]
        cells = (
            name if len(members) == 1 else _pattern(name),
            str(len(members)),
            f"{rows}x{columns}" + (f"x{first.matrices}" if first.matrices > 1 else ""),
            "dense" if first.scheme is None else _without_scale(first.scheme),
            first.method or "",
            "" if first.bits_per_weight is None else f"{first.bits_per_weight:.3f}",
            *([f"{sum(errors) / len(errors):.1e}" if errors else ""] if measured else []),
        )
        table.append(cells)
    print_table(headings, table, words=("linear", "stored as", "method"), folded=("linear",), narrow=True)


def _without_scale(scheme: str) -> str:
    """The scheme without the dtype of its scales, its last word; the JSON outputs have it."""
    weights, comma, inputs = scheme.partition(",")
    return (weights.rpartition(" ")[0] or weights) + comma + inputs


def _pattern(module: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", module)


def _order(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 after layer 9."""
    return [
        (int(part), "") if part.isdecimal() and len(part) < 10 else (-1, part) for part in name.split(".")
    ]


def _grouped(layers: Layers, every_layer: bool) -> list[list[tuple[str, "LayerRecord"]]]:
    groups: dict[Any, list[tuple[str, LayerRecord]]] = {}
    for name in sorted(layers, key=lambda name: (layers[name].kind == "lm_head", _order(name))):
        key = (
            name if every_layer else _pattern(name),
            replace(
                layers[name],
                relative_error=None,
                output_error=None,
                damping=None,
                note=None,
                expert_tokens=None,
            ),
        )
        groups.setdefault(key, []).append((name, layers[name]))
    return list(groups.values())


def print_allocation(allocation: "Allocation", *, every_layer: bool) -> None:
    """What each group of linears that share a format got and costs, groups of a kind together unless
    `every_layer`; and what all of them do, of what was asked for.
    """
    limit, weights = allocation.limit, allocation.weights
    kinds: dict[tuple[str, str], list[Share]] = {}
    for share in allocation.shares:
        first, *others = share.linears if every_layer else map(_pattern, share.linears)
        name = ", ".join([first, *(other.rpartition(".")[2] for other in others)])
        kinds.setdefault((name, _without_scale(share.scheme)), []).append(share)
    headings = ("allocated", "count", "stored as", limit.counts, "KL")
    table = []
    for (name, scheme), shares in kinds.items():
        cost, divergence = sum(share.cost for share in shares), sum(share.divergence for share in shares)
        table.append((name, str(len(shares)), scheme, str(cost), f"{divergence:.1e}"))
    print_table(headings, table, words=("allocated", "stored as"), folded=("allocated",), narrow=True)
    spent = f"{allocation.cost / limit.in_one(weights):.3f} of {limit.amount:g} {limit.unit}"
    bits = "" if limit.counts == "bytes" else f", {allocation.bits_per_weight:.3f} bits per weight"
    say(f"allocated: {spent}{bits}, expected KL divergence {allocation.divergence:.3g} nats per token")


def print_readers(
    container: str, reasons: Sequence[str], readers: Sequence[str], notes: Sequence[str] = ()
) -> None:
    """Who reads the checkpoint, with the versions tried; `reasons` why only quantkit does, one per linear."""
    if container == "compressed-tensors":
        tried = [str(engine) for engine in ENGINES if engine.name in readers]
        *most, last = tried or ("",)
        who = f"{', '.join(most)} and {last} read" if most else f"{last} reads"
        say(f"a compressed-tensors checkpoint{f': {who} it without quantkit' if tried else ''}")
    elif reasons:
        linears = f" (one of {len(reasons)} linears)" if len(reasons) > 1 else ""
        note(f"only quantkit can load this: {reasons[0]}{linears}.")
    for text in notes:
        note(text)


def totals(source_bytes: int | None, output_bytes: int, bits: Mapping[str, float | None]) -> str:
    """Sizes before, if known, and after, and bits per weight of the packed linears and the whole model."""
    before = "" if source_bytes is None else f"{size_text(source_bytes)} -> "
    linears = "none" if bits["linears"] is None else f"{bits['linears']:.3f}"
    return (
        f"{before}{size_text(output_bytes)}; "
        f"bits per weight: packed linears {linears}, whole model {bits['model']:.3f}"
    )


def print_engine_layers(report: "EngineReport") -> None:
    """A line per kind of linear that an engine treats alike: its scheme, and the class that reads it."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(report.layers, key=lambda name: (report.layers[name].kind == "lm_head", _order(name))):
        layer = report.layers[name]
        rows, columns = layer.shape
        key = (
            f"{rows}x{columns}" + (f"x{layer.matrices}" if layer.matrices > 1 else ""),
            "dense" if layer.scheme is None else _without_scale(layer.scheme),
            layer.reads or ("" if layer.scheme is None else "none"),
        )
        groups.setdefault((_pattern(name), *key), []).append(name)
    table = [
        (names[0] if len(names) == 1 else pattern, str(len(names)), *cells)
        for (pattern, *cells), names in groups.items()
    ]
    headings = ("linear", "count", "NxK", "stored as", f"class of {report.engine} {report.version}")
    words = ("linear", "stored as", headings[-1])
    print_table(headings, table, words=words, folded=("linear", headings[-1]), narrow=True)
