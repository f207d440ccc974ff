"""What the warps of `hopper` wait for is needed: without it there is NaN, or wrong codes, or no end."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.kernels.fused.launch import hopper
from quantkit.kernels.fused.launch.hopper import HopperTile
from quantkit.packing.tensor import PackedTensor

from ..conftest import GLUON
from ..gluon import interpreted
from .test_fused import HOPPER, LIMIT, error, operands

InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be stuck")

#: In so many orders warps take turns.
ORDERS = 8
#: One that decodes codes that it loads, and others with codes in shared memory, of which the last two decode
#: them while their own products are done, one 256 columns at a time.
CASES = (
    ("int4", HopperTile(64)),
    ("int4", HopperTile(16, ahead=4)),
    ("int4", HopperTile(64, ahead=3, share=True)),
    ("int3", HopperTile(128, ahead=4, share=True)),
)
KERNEL = "quantkit.kernels.fused.hopper"
FREED = """                for piece in gl.static_range(PIECES):
                    mbarrier.arrive(free.index((count + piece) % STAGES), count=1)
"""
BEGUN = """                    total = warpgroup_mma(weights[piece], x, total, is_async=True)
"""
WAIT = "mbarrier.wait(ready.index(stage), (count + piece) // STAGES % 2)"
WAITED = """                # Weights stay in their registers until the products are done.
"""
#: What is said in the kernel, and what instead.
CHANGES = {
    "copies wait for nobody": [("mbarrier.wait(free.index(stage), count // STAGES % 2 ^ 1)", "pass")],
    "products wait for no copy": [(WAIT, "pass")],
    "products are begun before copies are there": [
        (WAIT, "pass"),
        (BEGUN, BEGUN + f"                    if not EARLY:\n                        {WAIT}\n"),
    ],
    "the first products wait for no copy": [("_wait_for_x(ready, count, jobs > 0, PIECES, STAGES)", "pass")],
    "the next products wait for no copy": [
        ("_wait_for_x(ready, count + PIECES, more, PIECES, STAGES)", "pass")
    ],
    "products wait for one block of x of two": [
        ("static_range(PIECES):\n        number", "static_range(1):\n        number")
    ],
    "products wait for the phase of another block": [
        ("number // STAGES % 2, pred", "count // STAGES % 2, pred")
    ],
    "after the last products another copy is waited for": [("PIECES, more, PIECES", "PIECES, True, PIECES")],
    "memory is free before products are done": [(FREED, ""), (WAITED, FREED)],
    "one group frees for all": [("count=ROWS // 64)", "count=1)")],
    "copies wait for the other phase": [("count // STAGES % 2 ^ 1)", "count // STAGES % 2)")],
    "fewer bytes are expected": [("BM * 128 * 2)", "BM * 128)")],
    "codes are taken before they are there": [("wait_group(AHEAD - 1)", "wait_group(AHEAD)")],
    "codes of the unit after are asked for": [("turn, unit + AHEAD,", "turn, unit + AHEAD + 1,")],
    "groups of warps have one ring": [("(which * AHEAD + turn % AHEAD)", "(turn % AHEAD)")],
    "a tile begins at the first place": [
        ("_fill(ring, words_at, which, count // PIECES, first", "_fill(ring, words_at, which, 0, first")
    ],
    "codes go where others are yet to be decoded": [("turn, unit + AHEAD,", "turn + 1, unit + AHEAD,")],
    "codes of a tile are asked for after its end": [("if unit < end:", "if unit <= end:")],
    "codes are asked for after the last tile": [
        ("until = gl.where(number + 1 < jobs, last * 2, 0)", "until = last * 2")
    ],
    "another place is free": [
        ("free.index((count + piece) % STAGES)", "free.index((count + piece + 1) % STAGES)")
    ],
}


def multiply(
    make_packed: Callable[..., PackedTensor], path: Path, seed: int, name: str, tile: HopperTile
) -> float:
    """The error of products of more blocks of x than there is room for, in parts of 5, 8 and 3 steps."""
    assert HOPPER is not None
    dtype, features = HOPPER
    op, packed = operands(make_packed, name, 100, 2600, 70, dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, KERNEL, interpreted(GLUON | {KERNEL: path}, seed)[KERNEL])
        hopper._launches.cache_clear()
        try:
            y = hopper.run(op, tile, features)
        finally:
            hopper._launches.cache_clear()
    return error(y, op.x, packed, op.bias)


@pytest.mark.parametrize(("name", "tile"), [*CASES, ("int4", HopperTile(128, 192, 2))], ids=str)
@pytest.mark.parametrize("seed", range(ORDERS // 2))
def test_warps_may_run_in_any_order(
    make_packed: Callable[..., PackedTensor], seed: int, name: str, tile: HopperTile
) -> None:
    assert HOPPER is not None
    assert multiply(make_packed, GLUON[KERNEL], seed, name, tile) < LIMIT[HOPPER[0]]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_waited_for_is_needed(
    make_packed: Callable[..., PackedTensor], tmp_path: Path, change: str
) -> None:
    assert HOPPER is not None
    text = GLUON[KERNEL].read_text()
    for old, new in CHANGES[change]:
        assert old in text
        text = text.replace(old, new)
    changed = tmp_path / "hopper.py"
    changed.write_text(text)

    def is_wrong(seed: int, name: str, tile: HopperTile) -> bool:
        try:
            return not multiply(make_packed, changed, seed, name, tile) < LIMIT[HOPPER[0]]
        except InterpreterError as stuck:
            return isinstance(stuck.__cause__, AssertionError)

    assert any(is_wrong(seed, *case) for seed in range(ORDERS) for case in CASES)
