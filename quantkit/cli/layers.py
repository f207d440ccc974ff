"""The per-layer table that plan, quantize and inspect print: every fate with its reason."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from quantkit.cli.console import size

if TYPE_CHECKING:
    from quantkit.model.record import LayerRecord


def layer_table(layers: Mapping[str, "LayerRecord"], *, every_layer: bool) -> Table:
    """A line per linear; unless `every_layer`, those that only differ in layer numbers share one."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("linear", overflow="fold")
    for title in ("layers", "N x K"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("stored as", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for title in ("bits", "rel. error"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why")
    for members in _grouped(layers, every_layer):
        name, first = members[0]
        rows, columns = first.shape
        errors = [layer.relative_error for _, layer in members if layer.relative_error is not None]
        table.add_row(
            name if len(members) == 1 else _pattern(name),
            str(len(members)),
            f"{rows} x {columns}" + (f" x {first.matrices}" if first.matrices > 1 else ""),
            first.scheme or "dense",
            first.method or "",
            "" if first.bits_per_weight is None else f"{first.bits_per_weight:.3f}",
            f"{sum(errors) / len(errors):.2e}" if errors else "",
            first.reason,
        )
    return table


def _pattern(module: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", module)


def _grouped(layers: Mapping[str, "LayerRecord"], every_layer: bool) -> list[list[tuple[str, "LayerRecord"]]]:
    groups: dict[Any, list[tuple[str, LayerRecord]]] = {}
    for name, layer in layers.items():
        key = (name if every_layer else _pattern(name), replace(layer, relative_error=None))
        groups.setdefault(key, []).append((name, layer))
    return list(groups.values())


def dense_summary(dense: Mapping[str, str]) -> list[str]:
    """One line per reason that tensors other than linears stay dense."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in dense.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"{len(names)} dense: {reason} ({_pattern(names[0])}{', ...' if len(names) > 1 else ''})"
        for reason, names in by_reason.items()
    ]


def totals(source_bytes: int, output_bytes: int, bits: Mapping[str, float | None]) -> str:
    """Sizes before and after, and bits per weight of the packed linears and the whole model."""
    linears = "none packed" if bits["linears"] is None else f"{bits['linears']:.3f}"
    return (
        f"{size(source_bytes)} -> {size(output_bytes)}; "
        f"bits per weight: linears {linears}, whole model {bits['model']:.3f}"
    )
