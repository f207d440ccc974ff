"""A LoRA beside a linear in two launches against its twin in float64, and in traced steps."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quantkit import quantize_tensor
from quantkit.kernels.lora.add_lora import (
    MOST_NUMBERS,
    add_lora,
    add_lora_reference,
    add_wide_lora_reference,
)
from quantkit.packing.schemes import scheme
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.passes.patterns import fused

from ...support.compare import assert_close, assert_equal

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
FACTOR = 1.7


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def operands(
    m: int, n: int, k: int, r: int, dtype: torch.dtype, of_lora: torch.dtype
) -> tuple[torch.Tensor, ...]:
    y, x = numbers(m, 1, n, dtype=dtype), numbers(m, 1, k, dtype=dtype, seed=1)
    return y, x, numbers(r, k, dtype=of_lora, seed=2) / k**0.5, numbers(n, r, dtype=of_lora, seed=3)


@pytest.mark.parametrize(
    ("m", "n", "k", "r"),
    [(1, 1, 1, 1), (2, 7, 20, 3), (3, 300, 100, 8), (1, 64, 5000, 16), (5, 33, 48, 256), (64, 40, 24, 4)],
)
def test_a_lora_is_added_and_rounded_once(poisoned: None, m: int, n: int, k: int, r: int) -> None:
    for dtype, step in STEP.items():
        for of_lora in {dtype, torch.float32}:
            y, x, a, b = operands(m, n, k, r, dtype, of_lora)
            exact = (y.double() + FACTOR * (x.double() @ a.double().T) @ b.double().T).float()
            found = add_lora(y, x, a, b, FACTOR)
            assert found.dtype == dtype and found.shape == y.shape
            assert_close(found.float(), exact, rtol=step, atol=2e-5)


def test_powers_of_two_are_exact(poisoned: None) -> None:
    y, x, a, b = (one.sign() for one in operands(3, 70, 130, 5, torch.bfloat16, torch.float32))
    expected = add_wide_lora_reference(y, x, a, b, 0.5)
    assert_equal(add_lora(y, x, a, b, 0.5), expected)


def test_parts_of_larger_tensors(poisoned: None) -> None:
    y, x, a, b = operands(2, 20, 30, 4, torch.float32, torch.float32)
    whole = [torch.full((*one.shape[:-1], 90), math.nan, device=DEVICE) for one in (y, x, a, b)]
    parts = [
        wide[..., 8 : 8 + one.shape[-1]].copy_(one) for wide, one in zip(whole, (y, x, a, b), strict=True)
    ]
    assert_equal(add_lora(*parts, FACTOR), add_lora(y, x, a, b, FACTOR))


def launched(step: Any, *given: torch.Tensor) -> list[str]:
    """Names of what a traced and fused step calls, after a comparison with the step."""
    with torch.no_grad():
        module = fused(step, given, "steps")
        assert_close(module(*given), step(*given), rtol=2e-2, atol=2e-2)
    return [getattr(node.target, "__name__", "") for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("of_lora", [torch.float32, torch.float16], ids=str)
def test_steps_with_a_lora_launch_two_kernels(of_lora: torch.dtype) -> None:
    y, x, a, b = operands(2, 20, 30, 4, torch.float16, of_lora)
    reference = add_wide_lora_reference if of_lora == torch.float32 else add_lora_reference
    assert launched(lambda y, x: reference(y, x, a, b, FACTOR), y, x) == ["add_lora"]


def test_what_differs_from_a_lora_stays_as_it_is() -> None:
    y, x, a, b = operands(2, 20, 30, 4, torch.float16, torch.float32)

    def with_bias(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (y + F.linear(F.linear(x.float(), a, a[:, 0]), b) * FACTOR).to(y.dtype)

    def read_twice(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(x.float(), a)
        return (y + F.linear(low, b) * FACTOR).to(y.dtype) + low.sum()

    def two(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first = y + F.linear(F.linear(x.float(), a), b) * FACTOR
        return (first + F.linear(F.linear(x.float(), a), b) * 2.0).to(y.dtype)

    assert "add_lora" not in launched(with_bias, y, x)
    # The second is added to float32 numbers.
    assert launched(two, y, x).count("add_lora") == 1
    # What others read is computed beside it.
    assert launched(read_twice, y, x).count("mm.default") <= 2
    many = operands(MOST_NUMBERS // 4 + 1, 20, 30, 4, torch.float16, torch.float32)
    wide = lambda y, x: add_wide_lora_reference(y, x, *many[2:], FACTOR)  # noqa: E731
    assert "add_lora" not in launched(wide, *many[:2])


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference"])
@pytest.mark.parametrize("wide", [True, False], ids=["float32", "float16"])
def test_adapters_of_peft_are_added_by_these_kernels(wide: bool, inference: bool) -> None:
    peft = pytest.importorskip("peft")
    packed = quantize_tensor(numbers(48, 32, dtype=torch.float16), scheme("int4", group_size=32))
    layer = PackedLinear(32, 48, packed.scheme, "quantkit")
    parts = {**dict(packed.parts()), "shape": torch.tensor(packed.shape)}
    for name, spec in layer.part_specs().items():
        getattr(layer, name).data = parts[spec.part]
    model = nn.ModuleDict({"q": layer.to(DEVICE)})
    config = peft.LoraConfig(r=4, target_modules=["q"], lora_dropout=0.1, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=wide).eval()
    with torch.inference_mode(inference):
        names = launched(adapted.base_model.model["q"], numbers(2, 1, 32, dtype=torch.float16))
    assert names == ["linear.default", "add_lora"]
