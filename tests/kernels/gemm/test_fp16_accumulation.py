"""Sums of a step in float16: asked for by torch's switch, bounded, and never silent."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quantkit.kernels import registry as kernel_table
from quantkit.kernels.gemm.operands import Operands
from quantkit.kernels.gemm.portable import portable_gemm_launch
from quantkit.kernels.gemm.portable.portable_gemm_launch import PortableGemmTile, fp16_weight_scale
from quantkit.kernels.layouts.fragment_layout import build
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem, device_features
from quantkit.kernels.registry import choose, choose_by_rules, log_choice
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor

from ...support.compare import assert_equal

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GEFORCE = Gpu("GeForce", (8, 9), 128, 99 << 10)
HOPPER = Gpu("Hopper", (9, 0), 132, 227 << 10)
#: A step sums up to 256 products, and rounds by up to 2^-11 of the sum so far at each.
BOUND = 256 * 2.0**-11
#: Roundings of float16 weights and outputs.
ROUNDING = 2.0**-10
SIMPLE = {name for name in PRESETS if scheme(name).planes == 1 and not scheme(name).column_scale}


def asked(m: int = 64, gpu: Gpu = GEFORCE, fp16_accumulation: bool = True, name: str = "int4") -> Problem:
    features = GPU_FEATURES if gpu.capability == (9, 0) else GPU_FEATURES - {"wgmma"}
    return Problem(m, 4096, 4096, scheme(name), torch.float16, "cuda", features, None, gpu, fp16_accumulation)


def product(x: torch.Tensor, packed: PackedTensor, fp16_accumulation: bool) -> torch.Tensor:
    op = Operands(x, build(packed, x.dtype), None, packed.scheme, packed.shape[0])
    return portable_gemm_launch.run(
        op, PortableGemmTile(4, 16, stages=2, fp16_accumulation=fp16_accumulation), device_features(DEVICE)
    )


def half_twin(x: torch.Tensor, weight: torch.Tensor, step: int) -> torch.Tensor:
    """x W^T one product at a time, in float16 within a step, then in float32: the worst order there is."""
    y = torch.zeros(x.shape[0], weight.shape[0])
    for start in range(0, weight.shape[1], step):
        total = torch.zeros_like(y, dtype=torch.float16)
        for column in range(start, min(start + step, weight.shape[1])):
            total += x[:, column, None] * weight[None, :, column]
        y += total.float()
    return y


def errors(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Errors against the sum of the magnitudes of what an output is the sum of."""
    x, weight = x.double(), weight.double()
    return (y.double() - x @ weight.T).abs() / (x.abs() @ weight.abs().T)


@pytest.mark.parametrize("name", sorted(SIMPLE))
def test_the_error_is_within_the_bound(make_packed: Callable[..., PackedTensor], name: str) -> None:
    packed = make_packed(name, (40, 384)).to(DEVICE)
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    weight = packed.dequantize()
    found = errors(product(x, packed, True), x, weight)
    assert bool(found.isfinite().all())
    assert float(found.max()) < BOUND + ROUNDING
    # What is typical is far below: most roundings cancel.
    assert float(found.mean()) < 2.0**-9
    assert float(errors(product(x, packed, False), x, weight).max()) < ROUNDING


def test_the_slow_twin_is_within_the_bound_too() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1024, generator=generator).half()
    for weight in (torch.randn(24, 1024, generator=generator).half(), torch.ones(24, 1024).half()):
        # Of one sign, every addition makes the sum larger and its roundings with it.
        for operand in (x, x.abs()):
            found = errors(half_twin(operand, weight, 128), operand, weight)
            assert 2.0**-14 < float(found.max()) < 128 * 2.0**-11


def test_steps_are_added_up_in_float32(make_packed: Callable[..., PackedTensor]) -> None:
    """30 steps of 129: float16 has each of them and the result, but not the sums in between, above 2048."""
    steps, value = 30, 129 / 128
    packed = make_packed("int4", (16, steps * 128), exact=True).to(DEVICE)
    packed.words.fill_(-0x66666667)  # Code 9, value 1, in every nibble.
    packed.scale.fill_(1.0)
    y = product(torch.full((1, steps * 128), value, device=DEVICE, dtype=torch.float16), packed, True)
    assert_equal(y, torch.full_like(y, steps * 129))
    total = torch.zeros((), dtype=torch.float16)
    for _ in range(steps):
        total += 129
    assert total != steps * 129


def test_weights_of_one_scale_per_channel_do_not_overflow(make_packed: Callable[..., PackedTensor]) -> None:
    """128 weights of 127 or 448 times x of 8 is more than 65504, before their scale is applied."""
    for name in ("int8", "fp8", "fp8-e5m2"):
        packed = make_packed(name, (16, 256)).to(DEVICE)
        layout = packed.scheme
        assert fp16_weight_scale(16, 256, layout) * layout.format.max <= 1
        x = torch.full((2, 256), 8.0, device=DEVICE, dtype=torch.float16)
        found = errors(product(x, packed, True), x, packed.dequantize())
        assert float(found.max()) < BOUND + ROUNDING
    assert fp16_weight_scale(16, 256, scheme("int4")) == 1.0
    assert fp16_weight_scale(16, 256, scheme("int8", zero_point="integer")) == 2.0**-8


def test_what_overflows_is_no_number_and_not_wrong(make_packed: Callable[..., PackedTensor]) -> None:
    """A step's sum of more than 65504 is infinite in float16, also where the next step would take it away."""
    packed = make_packed("int4", (16, 256), exact=True).to(DEVICE)
    packed.words[:, :16].fill_(-1)  # Code 15, value 7, in every nibble.
    packed.words[:, 16:].fill_(0x11111111)  # Code 1, value -7.
    packed.scale.fill_(1.0)
    x = torch.ones(2, 256, device=DEVICE, dtype=torch.float16)
    x[1] = 100.0
    assert_equal(product(x, packed, False), torch.zeros_like(x[:, :16]))
    y = product(x, packed, True)
    assert_equal(y[0], torch.zeros_like(y[0]))
    assert not y[1].isfinite().any()


def test_only_where_torch_is_told_to() -> None:
    assert portable_gemm_launch.TILE_SPACE.rule(asked()).fp16_accumulation
    assert not portable_gemm_launch.TILE_SPACE.rule(asked(fp16_accumulation=False)).fp16_accumulation
    assert not portable_gemm_launch.TILE_SPACE.rule(asked(gpu=HOPPER)).fp16_accumulation, (
        "it brings nothing there"
    )
    assert not portable_gemm_launch.TILE_SPACE.rule(replace(asked(), gpu=None)).fp16_accumulation
    tile = PortableGemmTile(4, 64, fp16_accumulation=True)
    assert portable_gemm_launch.TILE_SPACE.why_invalid(asked(), tile) is None
    assert portable_gemm_launch.TILE_SPACE.why_invalid(asked(gpu=HOPPER), tile) is None, (
        "whoever measures may find otherwise"
    )
    assert "allow_fp16_accumulation is not set" in str(
        portable_gemm_launch.TILE_SPACE.why_invalid(asked(fp16_accumulation=False), tile)
    )
    assert choose_by_rules(asked(fp16_accumulation=False)).tile != choose_by_rules(asked()).tile


def test_the_switch_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    switch = torch.backends.cuda.matmul
    assert not switch.allow_fp16_accumulation, "off unless somebody asks for it"
    shape = (1, 64, 64, scheme("int4"))
    try:
        switch.allow_fp16_accumulation = True
        assert Problem.on(device, *shape, torch.float16).fp16_accumulation
        assert not Problem.on(device, *shape, torch.bfloat16).fp16_accumulation
        assert not Problem.on(torch.device("cpu"), *shape, torch.float16).fp16_accumulation
    finally:
        switch.allow_fp16_accumulation = False
    assert not Problem.on(device, *shape, torch.float16).fp16_accumulation


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (asked(), "fp16_accumulation=True accumulators=1 occupancy=0, sums of a step in float16"),
        (asked(gpu=HOPPER), "block_k=256, sums in float32 (float16 is allowed, but brings nothing here)"),
        (
            asked(m=1),
            "int8_mma=True, sums in float32 (float16 is allowed, but brings nothing here)",
        ),
        (asked(fp16_accumulation=False), "fp16_accumulation=False"),
    ],
)
def test_the_log_says_how_sums_are_made(
    problem: Problem, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_table, "_logged", set())
    monkeypatch.setenv("QUANTKIT_VERBOSE", "1")
    with caplog.at_level(logging.WARNING):
        log_choice(problem, choose(problem))
    assert text in caplog.messages[0]
    assert ("sums" in caplog.messages[0].replace("fp16_accumulation=", "")) is problem.fp16_accumulation
