"""What the warps of `hopper` wait for is needed: without it the interpreter finds NaN, or nobody to go on."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import InterpreterError

from quantkit.kernels.fused.launch import hopper
from quantkit.kernels.fused.launch.hopper import HopperTile
from quantkit.packing.tensor import PackedTensor

from ..conftest import GLUON
from ..gluon import interpreted
from .test_fused import HOPPER, LIMIT, error, operands

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be stuck")

#: In so many orders warps take turns.
ORDERS = 8
KERNEL = "quantkit.kernels.fused.hopper"
FREED = """                for piece in gl.static_range(PIECES):
                    mbarrier.arrive(free.index((count + piece) % STAGES), count=1)
"""
WAITED = """                # Weights stay in their registers until the products are done.
"""
#: What is said in the kernel, and what instead.
CHANGES = {
    "copies wait for nobody": [("mbarrier.wait(free.index(stage), count // STAGES % 2 ^ 1)", "pass")],
    "products wait for no copy": [
        ("mbarrier.wait(ready.index(stage), (count + piece) // STAGES % 2)", "pass")
    ],
    "memory is free before products are done": [(FREED, ""), (WAITED, FREED)],
    "one group frees for all": [("count=ROWS // 64)", "count=1)")],
    "copies wait for the other phase": [("count // STAGES % 2 ^ 1)", "count // STAGES % 2)")],
    "fewer bytes are expected": [("BM * 128 * 2)", "BM * 128)")],
    "another place is free": [
        ("free.index((count + piece) % STAGES)", "free.index((count + piece + 1) % STAGES)")
    ],
}


def multiply(make_packed: Callable[..., PackedTensor], path: Path, seed: int) -> float:
    """The error of products of more blocks of x than there is room for, by the kernel in a file."""
    assert HOPPER is not None
    dtype, features = HOPPER
    op, packed = operands(make_packed, "int4", 100, 2048, 70, dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, KERNEL, interpreted(GLUON | {KERNEL: path}, seed)[KERNEL])
        hopper._launches.cache_clear()
        y = hopper.run(op, HopperTile(64), features)
    hopper._launches.cache_clear()
    return error(y, op.x, packed, op.bias)


@pytest.mark.parametrize("seed", range(ORDERS))
def test_warps_may_run_in_any_order(make_packed: Callable[..., PackedTensor], seed: int) -> None:
    assert multiply(make_packed, GLUON[KERNEL], seed) < LIMIT[torch.float16]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_waited_for_is_needed(
    make_packed: Callable[..., PackedTensor], tmp_path: Path, change: str
) -> None:
    text = GLUON[KERNEL].read_text()
    for old, new in CHANGES[change]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    changed = tmp_path / "hopper.py"
    changed.write_text(text)

    def is_wrong(seed: int) -> bool:
        try:
            return math.isnan(multiply(make_packed, changed, seed))
        except InterpreterError as stuck:
            return isinstance(stuck.__cause__, AssertionError)

    found = [is_wrong(seed) for seed in range(ORDERS)]
    assert any(found)
