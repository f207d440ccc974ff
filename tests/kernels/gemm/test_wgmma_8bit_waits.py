"""What the warps of `wgmma_8bit_gemm` wait for is needed: without it there is NaN, or no end."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.kernels.gemm.wgmma_8bit import wgmma_8bit_launch
from quantkit.kernels.gemm.wgmma_8bit.wgmma_8bit_launch import Wgmma8BitTile
from quantkit.packing.tensor import PackedTensor

from ..conftest import GLUON
from ..gluon import interpreted, rewritten
from .test_fused import HOPPER
from .test_wgmma_8bit import operands_of

InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be stuck")

#: In so many orders warps take turns.
ORDERS = 6
CASES = (
    ("W4AFP8", Wgmma8BitTile(64, 2)),
    ("FP8_BLOCK", Wgmma8BitTile(64, 1, stream_k=True)),
    ("W8A8", Wgmma8BitTile(256, 1)),
)
KERNEL = "quantkit.kernels.gemm.wgmma_8bit.wgmma_8bit_kernel"
WAIT = "mbarrier.wait(full.index(count % STAGES), count // STAGES % 2)"
NEXT = "mbarrier.wait(full.index(after % STAGES), after // STAGES % 2)"
FREED = """                    if i == PARTS - 1 and block == BLOCKS - 1:
                        mbarrier.arrive(empty.index(stage), count=1)
"""
WAITED = """                    part = _wait(part, kept)
"""
#: What is said in the kernel, and what instead.
CHANGES = {
    "copies wait for nobody": [("mbarrier.wait(empty.index(stage), count // STAGES % 2 ^ 1)", "pass")],
    "the first products wait for no copy": [(WAIT, "pass")],
    "the next products wait for no copy": [(NEXT, "pass")],
    "memory is free before products are done": [(FREED, ""), (WAITED, FREED + WAITED)],
    "one group frees for all": [("count=BN // 64)", "count=1)")],
    "fewer bytes are expected": [("TMA_ROWS * 128, row < M", "TMA_ROWS * 64, row < M")],
    "scales are not expected": [("(2 if GROUPS > 1 else 0)", "0")],
    "nobody arrives for what is not copied": [("pred=row >= M)", "pred=row < 0)")],
    "the codes of another block are loaded": [("following = buffer + 1", "following = buffer")],
}


def error(
    make_packed: Callable[..., PackedTensor], path: Path, seed: int, name: str, tile: Wgmma8BitTile
) -> float:
    """The error of products of more blocks than there is room for, in parts of 64 columns and of rows."""
    assert HOPPER is not None
    dtype, features = HOPPER
    op, packed = operands_of(make_packed, name, 200, 2560, 70, dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, KERNEL, interpreted(GLUON | {KERNEL: path}, seed)[KERNEL])
        patched.setattr(wgmma_8bit_launch, "STAGES", 3)
        wgmma_8bit_launch._launches.cache_clear()
        try:
            y = wgmma_8bit_launch.run(op, tile, features).double()
        finally:
            wgmma_8bit_launch._launches.cache_clear()
    assert op.activations is not None and op.bias is not None
    x, weight = op.activations.round(op.x.float()).double(), packed.dequantize(torch.float32).double()
    size = x.abs() @ weight.abs().T + op.bias.double().abs()
    return float(((y - (x @ weight.T + op.bias.double())).abs() / size).max())


@pytest.mark.parametrize(("name", "tile"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(ORDERS // 2))
@pytest.mark.sampled(3)
def test_warps_may_run_in_any_order(
    make_packed: Callable[..., PackedTensor], seed: int, name: str, tile: Wgmma8BitTile
) -> None:
    assert error(make_packed, GLUON[KERNEL], seed, name, tile) < 2.0**-8


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_waited_for_is_needed(
    make_packed: Callable[..., PackedTensor], tmp_path: Path, change: str
) -> None:
    path = rewritten({KERNEL: GLUON[KERNEL]}, CHANGES[change], tmp_path)[KERNEL]

    def is_wrong(seed: int, name: str, tile: Wgmma8BitTile) -> bool:
        try:
            return not error(make_packed, path, seed, name, tile) < 2.0**-8
        except InterpreterError as stuck:
            return isinstance(stuck.__cause__, AssertionError)

    assert any(is_wrong(seed, *case) for seed in range(ORDERS) for case in CASES)
