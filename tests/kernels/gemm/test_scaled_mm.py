"""The library's FP8 product of blocks against rounded inputs and the dequantized weight.

On a CPU the unpacking runs in Triton's interpreter, and a slow twin stands for the library.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.kernels import library_gemm
from quantkit.kernels.gemm.dequantize import dequantize_launch
from quantkit.kernels.gemm.dequantize.dequantize_launch import dequantize
from quantkit.kernels.gemm.scaled_mm import scaled_mm_launch
from quantkit.kernels.gemm.support import UNPACKED_ROWS, why_unsupported_scaled_mm
from quantkit.kernels.layouts.fragment_layout import build, join
from quantkit.kernels.library_gemm import BLOCK, MULTIPLE_OF_K, MULTIPLE_OF_M, multiplies_blocks, product
from quantkit.kernels.ops.quantize_x import NATURAL_ORDER, quantize_x
from quantkit.kernels.problem import GPU_FEATURES, Problem
from quantkit.kernels.registry import choose, why_rounded_before
from quantkit.packing.tensor import PackedTensor

from ...support.compare import assert_close, assert_equal
from .test_fused import DEVICE, HOPPER
from .test_wgmma_8bit import assert_product_of_rounded, case_of, operands_of

FEATURES = GPU_FEATURES if HOPPER is None else HOPPER[1]
DTYPE = torch.bfloat16
NAME = "FP8_BLOCK"
needs_product = pytest.mark.skipif(
    DEVICE == "cuda" and not multiplies_blocks(torch.device("cuda")),
    reason="torch has no FP8 product of blocks for this GPU",
)


def multiplied_slowly(
    x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """The slow twin of `product`."""
    assert x.shape[0] % MULTIPLE_OF_M == 0 and x.shape[1] % MULTIPLE_OF_K == 0 and len(weight) % BLOCK == 0
    assert x_scales.shape == (x.shape[1] // BLOCK, len(x)) and x_scales.is_contiguous()
    assert weight_scales.shape == (len(weight) // BLOCK, x.shape[1] // BLOCK)
    assert weight_scales.is_contiguous()
    wide = x.double() * x_scales.double().t().repeat_interleave(BLOCK, 1)
    rows = weight_scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (wide @ (weight.double() * rows).t()).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(scaled_mm_launch, "product", multiplied_slowly)


@needs_product
@pytest.mark.parametrize(("n", "k", "m"), [(384, 1024, 70), (128, 512, 1), (256, 512, 32)])
@pytest.mark.parametrize("at_once", [1 << 27, 128 * 1024])
def test_products_are_those_of_rounded_inputs(
    make_packed: Callable[..., PackedTensor],
    poisoned: None,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    k: int,
    m: int,
    at_once: int,
) -> None:
    monkeypatch.setattr(dequantize_launch, "AT_ONCE", at_once)
    op, packed = operands_of(make_packed, NAME, n, k, m, DTYPE)
    assert op.activations is not None
    y = scaled_mm_launch.run(op, None, FEATURES)
    assert_product_of_rounded(y, op, packed)
    assert_equal(y, scaled_mm_launch.run(op, None, FEATURES))
    codes = quantize_x(op.x, op.activations, NATURAL_ORDER)
    given = replace(op, x=torch.full_like(op.x, torch.nan), codes=codes)
    assert_equal(y, scaled_mm_launch.run(given, None, FEATURES))


def test_every_code_is_unpacked_to_itself(make_packed: Callable[..., PackedTensor]) -> None:
    op, packed = operands_of(make_packed, NAME, 256, 512, 1, DTYPE)
    # Bytes 0x7F and 0xFF are NaN, which a layout refuses.
    codes = torch.arange(256).remainder(0x7F) + torch.arange(256).div(128, rounding_mode="floor") * 0x80
    codes = codes.to(torch.uint8).repeat(2 * 256).view(256, 512)
    packed = PackedTensor.from_codes(codes, packed.part("scale"), None, packed.scheme).to(DEVICE)
    op = replace(op, layout=build(packed, DTYPE))
    found = dequantize(op, 512, 0, 256, FEATURES, torch.float8_e4m3fn)
    assert_equal(found.view(torch.uint8), codes.to(DEVICE))


@needs_product
def test_a_row_that_is_not_finite_is_nan_alone(make_packed: Callable[..., PackedTensor]) -> None:
    op, _ = operands_of(make_packed, NAME, 128, 512, 5, DTYPE)
    op.x[1, 3], op.x[3, 200] = torch.inf, torch.nan
    y = scaled_mm_launch.run(op, None, FEATURES)
    assert y[[1, 3]].isnan().all() and y[[0, 2, 4]].isfinite().all()


@needs_product
@pytest.mark.skipif(DEVICE == "cpu", reason="the library's product is that of a GPU")
def test_the_library_multiplies_as_its_slow_twin() -> None:
    generator = torch.Generator().manual_seed(3)
    for m, n, k in ((16, 128, 512), (48, 640, 1536), (2064, 256, 1024)):
        x, weight = (torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (m, n))
        of_x, of_weight = (torch.rand(*s, generator=generator) for s in ((k // 128, m), (n // 128, k // 128)))
        given = [one.to(DEVICE) for one in (x, weight, of_x, of_weight)]
        y, expected = product(*given), multiplied_slowly(*given).double()
        assert_close(y.double(), expected, rtol=2.0**-7, atol=2.0**-8 * expected.abs().mean())


def test_weights_that_end_within_a_block_are_not_joined(make_packed: Callable[..., PackedTensor]) -> None:
    """The second and third would share a block of 128 rows, with a scale each."""
    for rows, joined in (((256, 64, 64), False), ((256, 128, 64), True)):
        weights = [make_packed("fp8", (n, 512), group_size="128x128") for n in rows]
        layouts = [build(one, DTYPE) for one in weights]
        assert (join(layouts, rows, weights[0].scheme, 512, DTYPE) is not None) == joined


def pretend(monkeypatch: pytest.MonkeyPatch, multiply: Callable[..., None], capturing: Any = None) -> None:
    """Let `multiplies_blocks` call `multiply` for the library's product, as on a Hopper GPU."""
    states = iter(capturing or ())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(states, False))
    monkeypatch.setattr(library_gemm, "product", multiply)
    monkeypatch.setattr(library_gemm, "_is_major", lambda _: True)
    monkeypatch.setattr(library_gemm, "_found", {})


@pytest.mark.parametrize(
    ("raised", "found"), [(None, True), (RuntimeError, False), (AttributeError, False), (TypeError, False)]
)
def test_a_product_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, raised: type[Exception] | None, found: bool
) -> None:
    tried = []

    def multiply(*given: torch.Tensor) -> None:
        tried.append(given)
        if raised is not None:
            raise raised

    pretend(monkeypatch, multiply)
    device = torch.device(DEVICE)
    assert [multiplies_blocks(device) for _ in range(2)] == [found, found] and len(tried) == 1


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda *_: None, capturing=[True, False])
    device = torch.device(DEVICE)
    assert not multiplies_blocks(device) and multiplies_blocks(device)


def test_a_full_gpu_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([torch.OutOfMemoryError("full"), None])

    def multiply(*_: torch.Tensor) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    pretend(monkeypatch, multiply)
    device = torch.device(DEVICE)
    assert not multiplies_blocks(device) and multiplies_blocks(device)


def ask(m: int, name: str = NAME, n: int = 4096, k: int = 4096, **changed: object) -> Problem:
    whole = case_of(name)
    problem = Problem(m, n, k, whole.of_weights, DTYPE, "cuda", GPU_FEATURES, activations=whole.activations)
    return replace(problem, **changed)  # type: ignore[arg-type]


def test_many_rows_choose_it() -> None:
    assert choose(ask(UNPACKED_ROWS)).kernel.name == "scaled-mm"
    assert choose(ask(UNPACKED_ROWS - 1)).kernel.name == "fused-wgmma-8bit"
    assert choose(ask(UNPACKED_ROWS, "FP8_DYNAMIC")).kernel.name == "fused-wgmma-8bit"
    assert choose(ask(UNPACKED_ROWS, n=1024)).kernel.name == "fused-wgmma-8bit"


def test_why_no_kernel_multiplies_bytes_is_told_of_the_one_for_most_schemes() -> None:
    problem = ask(512, "FP8_DYNAMIC", features=GPU_FEATURES - {"gluon", "scaled_mm"})
    assert why_rounded_before(problem) == "it is for compute capability 9, and a Triton whose Gluon compiles"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ask(4096, activations=None), "inputs are rounded to 8 bits"),
        (ask(4096, "FP8_DYNAMIC"), "in blocks of 128x128"),
        (ask(4096, "W8A8"), "in blocks of 128x128"),
        (ask(4096, dtype=torch.float16), "bfloat16"),
        (ask(4096, n=1000), "multiples of 128 rows"),
        (ask(4096, k=640), "of 512 columns"),
        (ask(4096, features=GPU_FEATURES - {"scaled_mm"}), "FP8 products of blocks"),
    ],
)
def test_other_problems_are_refused(problem: Problem, reason: str) -> None:
    assert reason in (why_unsupported_scaled_mm(problem) or "")
