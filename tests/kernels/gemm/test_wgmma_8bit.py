"""GEMMs of 8-bit operands against the product of rounded inputs and the dequantized weight.

In the interpreter on a CPU, for real on a Hopper GPU.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quantkit.kernels.gemm.operands import Operands
from quantkit.kernels.gemm.wgmma_8bit import wgmma_8bit_launch
from quantkit.kernels.gemm.wgmma_8bit.wgmma_8bit_launch import Wgmma8BitTile
from quantkit.kernels.layouts.fragment_layout import build
from quantkit.kernels.layouts.geometry import geometry
from quantkit.kernels.ops import quantize_x as quantized
from quantkit.kernels.ops.quantize_x import (
    BLOCK,
    DTYPES,
    ROWS,
    CodeOrder,
    QuantizedX,
    blocks_of,
    quantize_x,
    round_x,
)
from quantkit.kernels.problem import Problem, device_features
from quantkit.kernels.registry import choose, explain
from quantkit.packing.activations import ActivationScheme, activations_named
from quantkit.packing.formats import FloatFormat
from quantkit.packing.presets import SCHEMES
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor

from ...support.compare import assert_close, assert_equal
from .test_fused import DEVICE, HOPPER, needs_hopper

#: Schemes of llm-compressor, and others: a format, its group size and activations.
CASES = {
    **{
        name: (SCHEMES[name].format, SCHEMES[name].group_size, SCHEMES[name].activations)
        for name in ("FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4A8", "W4AFP8")
    },
    "int2 in fp8": ("int2", 256, "fp8"),
    "int4 per channel in int8": ("int4", "channel", "int8"),
    "int8 in groups of 128": ("int8", 128, "int8"),
}
TILES = (
    Wgmma8BitTile(64, 2),
    Wgmma8BitTile(64, 1, stream_k=True),
    Wgmma8BitTile(128, 2, stream_k=True),
    Wgmma8BitTile(256, 1, promote=False),
)


def case_of(name: str) -> Scheme:
    number_format, group_size, activations = CASES[name]
    return scheme(number_format, group_size=group_size, activations=activations)


def operands_of(
    make: Callable[..., PackedTensor], name: str, n: int, k: int, m: int, dtype: torch.dtype
) -> tuple[Operands, PackedTensor]:
    """Operands with a bias, and the weight."""
    asked = case_of(name)
    group_size = CASES[name][1]
    packed = make(CASES[name][0], (n, k), group_size=group_size).to(DEVICE)
    generator = torch.Generator().manual_seed(1)
    x, bias = (torch.randn(*size, generator=generator).to(DEVICE, dtype) for size in ((m, k), (n,)))
    op = Operands(x, build(packed, dtype), bias, packed.scheme, n, activations=asked.activations)
    return op, packed


def assert_product_of_rounded(y: torch.Tensor, op: Operands, packed: PackedTensor, name: str = "") -> None:
    """y is the product of rounded inputs and the dequantized weight, plus the bias, within bfloat16."""
    assert op.activations is not None and op.bias is not None
    rounded = op.activations.round(op.x.float()).double()
    weight = packed.dequantize(torch.float32).double()
    expected = rounded @ weight.T + op.bias.double()
    size = rounded.abs() @ weight.abs().T + op.bias.double().abs()
    assert_close(y.double(), expected, rtol=0, atol=2.0**-8 * size, name=name)


def runs(tile: Wgmma8BitTile, op: Operands) -> bool:
    """Whether a tile of 256 rows of x has registers for the sums of a scheme."""
    assert op.activations is not None
    return tile.block_m < 256 or not wgmma_8bit_launch.promotes(op.shape, op.scheme, op.activations)


@needs_hopper
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_products_of_bytes_are_those_of_rounded_inputs(
    make_packed: Callable[..., PackedTensor], poisoned: None, name: str, tile: Wgmma8BitTile
) -> None:
    assert HOPPER is not None
    dtype, features = HOPPER
    sizes = [(272, 896, 300), (40, 128, 1)] if DEVICE == "cuda" else [(144, 640, 70), (40, 128, 1)]
    for n, k, m in sizes:
        op, packed = operands_of(make_packed, name, n, k, m, dtype)
        if not runs(tile, op):
            continue
        y = wgmma_8bit_launch.run(op, tile, features)
        assert_product_of_rounded(y, op, packed, f"{n} x {k}, M={m}")
        assert_equal(y, wgmma_8bit_launch.run(op, tile, features))


@needs_hopper
@pytest.mark.parametrize("name", ["W8A8", "W4A8", "W4AFP8", "FP8_DYNAMIC"])
def test_sums_of_integers_are_exact(make_packed: Callable[..., PackedTensor], name: str) -> None:
    # Integers, and the largest number of the format in each row of x: scales are powers of two. Tensor cores
    # add products of e4m3 with some 13 bits below the largest, so weights of FP8 are small integers.
    assert HOPPER is not None
    dtype, features = HOPPER
    n, k, m = 144, 256, 70
    op, packed = operands_of(make_packed, name, n, k, m, dtype)
    assert op.activations is not None
    few = torch.randint(-3, 4, (m, k), generator=torch.Generator().manual_seed(2)).float()
    few[:, 0] = op.activations.number_format.absmax
    scale = torch.exp2(
        torch.randint(-3, 3, packed.group_scale().shape, generator=torch.Generator().manual_seed(3))
    )
    of_weights = packed.scheme.format
    small = torch.randint(-7, 8, (n, k), generator=torch.Generator().manual_seed(4)).float()
    codes = of_weights.encode(small) if isinstance(of_weights, FloatFormat) else packed.codes().cpu()
    packed = PackedTensor.from_codes(codes, scale, None, packed.scheme).to(DEVICE)
    x = few.to(DEVICE, dtype)
    op = replace(op, x=x, layout=build(packed, dtype), bias=None)
    y = wgmma_8bit_launch.run(op, None, features)
    expected = x.double() @ packed.dequantize(torch.float32).double().T
    assert_equal(y, expected.to(dtype))


@needs_hopper
def test_a_row_that_is_not_finite_is_nan_alone(make_packed: Callable[..., PackedTensor]) -> None:
    assert HOPPER is not None
    dtype, features = HOPPER
    for name in ("W4AFP8", "FP8_BLOCK"):
        op, _ = operands_of(make_packed, name, 40, 256, 5, dtype)
        op.x[1, 3], op.x[3, 200] = torch.inf, torch.nan
        y = wgmma_8bit_launch.run(op, None, features)
        assert y[[1, 3]].isnan().all() and y[[0, 2, 4]].isfinite().all(), name


@pytest.mark.parametrize(
    ("n", "m", "rows", "stream_k"),
    [
        (28672, 64, 64, False),
        (6144, 64, 64, True),
        (4096, 512, 128, False),
        # 192 tiles on 132 multiprocessors.
        (6144, 512, 128, True),
        (28672, 512, 128, False),
        (4096, 4096, 256, False),
        # Too few of 256 rows: 96; of 128 rows 160.
        (4096, 640, 128, True),
    ],
)
def test_stream_k_divides_what_would_leave_multiprocessors_idle(
    n: int, m: int, rows: int, stream_k: bool
) -> None:
    shape = geometry(n, 4096, scheme("fp8"), torch.bfloat16)
    tile = wgmma_8bit_launch.wgmma_8bit_tile(shape, m, False, 132)
    assert (tile.block_m, tile.stream_k) == (rows, stream_k)


def inputs_named(name: str) -> ActivationScheme:
    """The scheme of a name; a static one saturates some of the inputs of these tests."""
    found = activations_named(name)
    assert found is not None
    return found.fit(11.7) if found.static else found


def quantize_x_reference(x: torch.Tensor, scheme: ActivationScheme, order: CodeOrder) -> QuantizedX:
    """`quantize_x` of `x` [M, K] by torch."""
    (m, k), span, sums = x.shape, order.span, order.sums
    blocks, grouped = blocks_of(k), scheme.group_size is not None
    wide = torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - k))
    groups = wide.view(m, blocks, BLOCK) if grouped else wide.view(m, 1, -1)
    scale = scheme.scales(groups)
    rounded = scheme.number_format.round((groups / scale).nan_to_num(0.0)).view(m, -1)
    ordered = rounded.view(m, -1, 2, span // 2).transpose(2, 3).reshape(m, -1)
    stride = -(-m // ROWS) * ROWS
    scales = wide.new_full((blocks, stride) if grouped else (1, stride), torch.nan)
    scales[:, :m] = scale.squeeze(-1).T
    added = wide.new_full((blocks, stride) if sums else (0, stride), torch.nan)
    if sums:
        added[:, :m] = ordered.view(m, blocks, BLOCK).sum(-1).T
    return QuantizedX(
        ordered.to(DTYPES[scheme.number_format]), scales if grouped else scales[0], added, order
    )


@pytest.mark.parametrize("activations", ["int8", "fp8", "fp8-g128", "fp8-static", "int8-static"])
def test_inputs_are_quantized_as_by_torch(activations: str) -> None:
    found = inputs_named(activations)
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float16,) if DEVICE == "cpu" else (torch.bfloat16, torch.float16)
    for k, order in ((128, CodeOrder(32, True)), (384, CodeOrder(64, True)), (1024, CodeOrder(128, True))):
        for dtype in dtypes:
            x = torch.randn(6, k, generator=generator) * torch.rand(6, 1, generator=generator) * 9
            x[1] = 0
            x[2, 7], x[3, k - 1] = torch.inf, torch.nan
            # Halves of a step are ties, which round to even.
            x[4] = torch.arange(k) % 255 / 2 - 63.5
            x[4, 0] = found.number_format.absmax
            x = x.to(DEVICE, dtype)
            got, expected = quantize_x(x, found, order), quantize_x_reference(x, found, order)
            assert_equal(got.codes.float(), expected.codes.float())
            assert_equal(got.scales[..., :6].nan_to_num(-1.0), expected.scales[..., :6].nan_to_num(-1.0))
            assert_close(got.sums[:, :6], expected.sums[:, :6], rtol=1e-6, atol=1e-3)


def test_every_int8_and_e4m3_code_is_reached() -> None:
    for activations, count in (("int8", 255), ("fp8", 253)):
        found = activations_named(activations)
        assert found is not None
        numbers = sorted(
            set(found.number_format.numbers) - {-128.0}
            if activations == "int8"
            else set(found.number_format.numbers)
        )
        x = torch.tensor(numbers + [0.0] * (256 - len(numbers))).to(DEVICE, torch.float16)[None]
        got = quantize_x(x, found, CodeOrder(32, False))
        assert len(got.codes.float().unique()) == count
        assert_equal(got.scales[:1], torch.ones(1, device=DEVICE))


def test_rounding_in_one_launch_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU `round_x` is torch's: there the kernel is asked for as on a GPU.
    monkeypatch.setattr(quantized, "is_on_gpu", lambda x: True)
    for activations in ("int8", "fp8", "fp8-g128", "fp8-static", "int8-static"):
        found = inputs_named(activations)
        for dtype in (torch.float16,) if DEVICE == "cpu" else (torch.bfloat16, torch.float16):
            x = torch.randn(9, 1408, device=DEVICE).to(dtype) * 40
            x[2, 5], x[3, 1], x[4] = torch.nan, 65504.0, 0
            assert_equal(round_x(x, found).nan_to_num(-1.0), found.round(x).nan_to_num(-1.0))


def test_the_kernel_is_chosen_for_rounded_inputs_alone() -> None:
    features = frozenset({"triton", "ptx", "overlap", "wgmma", "gluon"})
    if DEVICE == "cuda":
        features = device_features("cuda")
        if "wgmma" not in features:
            pytest.skip("this GPU is not of compute capability 9.0")
    for name in CASES:
        asked = case_of(name)
        problem = Problem(512, 4096, 4096, asked.of_weights, torch.bfloat16, "cuda", features, None)
        rounded = replace(problem, activations=asked.activations)
        assert choose(rounded).kernel.rounds_x, name
        assert not choose(problem).kernel.rounds_x, name
        assert not choose(replace(rounded, m=16)).kernel.rounds_x, name


@pytest.mark.parametrize(
    ("number_format", "activations", "reason"),
    [
        ("int4", "mxfp8", "a scale per token or 128 inputs"),
        ("int4", "fp8-g128", "8-bit weights only"),
        ("nf4", "fp8", "no operand beside fp8-e4m3"),
        ("fp8", "int8", "no operand beside int8"),
        ("mxfp8", "fp8", "multiples of 128 columns"),
    ],
)
def test_it_says_what_it_does_not_multiply(number_format: str, activations: str, reason: str) -> None:
    asked = scheme(number_format, activations=activations)
    features = frozenset({"triton", "ptx", "overlap", "wgmma", "gluon"})
    problem = Problem(512, 4096, 4096, asked.of_weights, torch.bfloat16, "cuda", features, None)
    reasons = dict(explain(replace(problem, activations=asked.activations)))
    assert reason in (reasons["fused-wgmma-8bit"] or "")
