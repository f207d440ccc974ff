"""What the warps of `wgmma_gemm` wait for is needed: without it there is NaN, or wrong codes, or no end."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.kernels.gemm.wgmma import wgmma_launch, wgmma_tiles
from quantkit.kernels.gemm.wgmma.wgmma_tiles import WgmmaTile
from quantkit.packing.tensor import PackedTensor

from ..conftest import GLUON
from ..gluon import interpreted, rewritten
from ..memory import OutOfBoundsError
from .test_fused import HOPPER, LIMIT, error, operands

InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be stuck")

#: In so many orders warps take turns.
ORDERS = 8
#: The second multiplies with 256 columns at a time, the third with the halves of a span of as many.
CASES = (
    ("int4", WgmmaTile(64)),
    ("int3", WgmmaTile(128, prefetch=2, stream_k=True, block_k=256)),
    ("int3", WgmmaTile(128, prefetch=2, stream_k=True)),
)
KERNEL = "quantkit.kernels.gemm.wgmma.wgmma_kernel"
OPERAND = "quantkit.kernels.gemm.wgmma.wgmma_operand"
FREED = """                    for subtile in gl.static_range(SUBTILES):
                        mbarrier.arrive(empty.index((count + subtile) % STAGES), count=1)
"""
BEGUN = """                        total = warpgroup_mma(weights[subtile], x, total, is_async=True)
"""
WAIT = "mbarrier.wait(full.index(stage), (count + subtile) // STAGES % 2)"
WAITED = """                    # Keep weights in their registers until the products are done.
"""
#: What is said in the kernel, and what instead.
CHANGES = {
    "copies wait for nobody": [("mbarrier.wait(empty.index(stage), count // STAGES % 2 ^ 1)", "pass")],
    "products wait for no copy": [(WAIT, "pass")],
    "products are begun before copies are there": [
        (WAIT, "pass"),
        (BEGUN, BEGUN + f"                        {WAIT}\n"),
    ],
    "products wait for the first block of x of two": [
        (WAIT, "mbarrier.wait(full.index(count % STAGES), count // STAGES % 2)")
    ],
    "memory is free before products are done": [(FREED, ""), (WAITED, FREED)],
    "one group frees for all": [("count=BN // 64)", "count=1)")],
    "copies wait for the other phase": [("count // STAGES % 2 ^ 1)", "count // STAGES % 2)")],
    "fewer bytes are expected": [("TMA_ROWS * 128 * 2,", "TMA_ROWS * 128,")],
    "nobody arrives for what is not copied": [("pred=row >= M)", "pred=row < 0)")],
    "one part arrives for all": [("count=BM // TMA_ROWS)", "count=1)")],
    "codes of the unit after are loaded": [
        ("step * 2 + half + PREFETCH,", "step * 2 + half + PREFETCH + 1,")
    ],
    "another place is free": [
        ("empty.index((count + subtile) % STAGES)", "empty.index((count + subtile + 1) % STAGES)")
    ],
}


#: What is said of where a program loads from, and what instead.
LOADS = {
    "codes after the last unit": [
        ("gl.minimum(step * 2 + half + PREFETCH, last_k_step)", "step * 2 + half + PREFETCH")
    ],
    "codes of row tiles that are not there": [("(N + 15) // 16 - 1", "(N + 15) // 16 + 7")],
}


def multiply(
    make_packed: Callable[..., PackedTensor], paths: dict[str, Path], seed: int, name: str, tile: WgmmaTile
) -> float:
    """The error of products of more blocks of x than there is room for, in parts of 5, 8 and 3 steps."""
    assert HOPPER is not None
    dtype, features = HOPPER
    # Half a step is left over at the end of both.
    k = 2600 if tile.block_k == wgmma_tiles.COLUMNS else 2816
    # Two tiles of rows of x, the last not whole, or a tile of which a part has no row.
    m = 70 if tile.block_m == 64 else 60
    op, packed = operands(make_packed, name, 100, k, m, dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, KERNEL, interpreted(GLUON | paths, seed)[KERNEL])
        wgmma_launch._launches.cache_clear()
        try:
            y = wgmma_launch.run(op, tile, features)
        finally:
            wgmma_launch._launches.cache_clear()
    return error(y, op.x, packed, op.bias)


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        *CASES,
        ("int4", WgmmaTile(64, 192, 2)),
        ("int6", WgmmaTile(64, block_k=256)),
        ("nf4", WgmmaTile(64)),
        ("book4", WgmmaTile(256)),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(ORDERS // 2))
@pytest.mark.sampled(3)
def test_warps_may_run_in_any_order(
    make_packed: Callable[..., PackedTensor], seed: int, name: str, tile: WgmmaTile
) -> None:
    assert HOPPER is not None
    assert multiply(make_packed, {}, seed, name, tile) < LIMIT[HOPPER[0]]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_waited_for_is_needed(
    make_packed: Callable[..., PackedTensor], tmp_path: Path, change: str
) -> None:
    assert HOPPER is not None
    paths = rewritten({KERNEL: GLUON[KERNEL]}, CHANGES[change], tmp_path)

    def is_wrong(seed: int, name: str, tile: WgmmaTile) -> bool:
        try:
            return not multiply(make_packed, paths, seed, name, tile) < LIMIT[HOPPER[0]]
        except InterpreterError as stuck:
            found = stuck.__cause__
            return isinstance(found, AssertionError) and not isinstance(found, OutOfBoundsError)

    assert any(is_wrong(seed, *case) for seed in range(ORDERS) for case in CASES)


@pytest.mark.parametrize("change", LOADS)
def test_nothing_is_read_outside_of_a_weight(
    make_packed: Callable[..., PackedTensor], tmp_path: Path, change: str
) -> None:
    paths = rewritten({name: GLUON[name] for name in (OPERAND, KERNEL)}, LOADS[change], tmp_path)
    with pytest.raises(InterpreterError, match="OutOfBoundsError"):
        multiply(make_packed, paths, 0, *CASES[0])
