"""Columns of x in the order of the fragments, as tiles take them."""

import torch

from quantkit.kernels.fused.launch.operands import Grouping, Operands, empty
from quantkit.kernels.fused.layout import Geometry
from quantkit.kernels.launcher import Launch, overlap
from quantkit.kernels.problem import COLUMN_ORDERS


def column_order(shape: Geometry) -> str:
    """The one of `COLUMN_ORDERS` that `tiled` has columns of x in."""
    return "fragments of 16" if shape.group == 16 else "fragments"


def ordering(name: str) -> dict[str, tuple[int, ...]]:
    """What kernels know of one of `COLUMN_ORDERS`."""
    shape, axes = COLUMN_ORDERS[name]
    return {"SHAPE": shape, "AXES": axes}


def order_launch(
    m: int, shape: Geometry, features: frozenset[str], grouping: Grouping | None = None
) -> Launch:
    """The launch that puts columns of x, or of what pairs have of it, in order."""
    from quantkit.kernels.fused.tiled import order_columns

    return Launch(
        order_columns,
        (m if grouping is None else grouping.count, -(-shape.spans * shape.span // 1024)),
        **({"order": None} if grouping is None else {}),
        SLOTS=1 if grouping is None else grouping.slots,
        **ordering(column_order(shape)),
        BLOCK=1024,
        **overlap(features),
    )


def in_order(op: Operands, order: Launch, rows: int, columns: int) -> torch.Tensor:
    """x in the order of the fragments, [rows, columns] with zeros at the end, by `order` unless it is so."""
    if op.ordered:
        return op.x
    found = empty(op, rows, columns)
    order(op.x, found, op.x.shape[1], columns, *op.grouped[:1])
    return found
