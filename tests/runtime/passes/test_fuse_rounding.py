"""Norms and gates round the inputs of the linears after them, and the numbers stay the same."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

from quantkit import quantize_tensor
from quantkit.errors import KernelError
from quantkit.kernels.linear import OPERATOR, linear_parts
from quantkit.kernels.linear_fused import code_order, linear_of_codes
from quantkit.kernels.ops import quantize_x
from quantkit.kernels.ops.activation import silu_gate_reference
from quantkit.kernels.ops.norm import rms_norm_reference
from quantkit.kernels.ops.quantize_x import CodeOrder
from quantkit.packing.activations import activations_named
from quantkit.packing.schemes import Scheme, parse_token, scheme
from quantkit.runtime.passes import fuse_linear, fuse_rounding, fused_forward
from quantkit.runtime.passes.patterns import fused

from ...support.compare import assert_close, assert_equal
from ..graphed import calls, numbers

pytest.importorskip("triton")

N = 128
INT4 = quantize_tensor(numbers(N, N), scheme("int4", group_size=32))
HALF = quantize_tensor(numbers(N // 2, N // 2), scheme("int4", group_size=32))


def rounding(name: str, stored: float | None = None) -> Scheme:
    """The scheme of `INT4` with inputs rounded as `name`; a static scheme stores `stored`."""
    found = activations_named(name)
    assert found is not None
    return replace(INT4.scheme, activations=found if stored is None else found.bind(stored))


def product(x: torch.Tensor, of: Scheme, packed: Any = INT4) -> torch.Tensor:
    return linear_parts(x, packed.tensors, None, of, packed.shape[0], None)


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_x, "is_on_gpu", lambda x: True)


@torch.no_grad()
def counted(step: Callable[..., torch.Tensor], *given: torch.Tensor) -> tuple[Any, Any]:
    """Return the module of a step and its calls, after its numbers were compared with the step's."""
    expected = step(*[one.clone() for one in given])
    module = fused(step, [one.clone() for one in given], "steps")
    assert fused_forward._rounds_inputs(module)
    found = module(*[one.clone() for one in given])
    # A sum over a row in another order moves its code now and then.
    assert_close(found, expected, rtol=2e-2, atol=2e-2)
    return module, calls(module)


def of_kind(module: Any, name: str) -> list[Any]:
    return [node for node in module.graph.nodes if getattr(node.target, "__name__", "") == name]


@pytest.mark.parametrize(
    ("name", "stored"),
    [("fp8", None), ("int8", None), ("fp8-g128", None), ("fp8-static", 0.02), ("int8-static", 0.02)],
)
def test_norms_round_for_linears_and_gates_do_not(name: str, stored: float | None) -> None:
    of = rounding(name, stored)
    half = replace(HALF.scheme, activations=of.activations)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = rms_norm_reference(x, weight, 1e-5)
        q, k = product(y, of), product(y, of)
        total = x + q * k
        y = product(rms_norm_reference(total, weight, 1e-5), of)
        halves = y.chunk(2, dim=-1)
        gate = silu_gate_reference(*halves)
        if name == "fp8-g128":
            return total + gate.sum(-1, keepdim=True)
        return total + product(gate, half, HALF).sum(-1, keepdim=True)

    module, found = counted(step, numbers(2, 3, N).half(), numbers(N).half())
    assert (
        found["round_inputs"] == (name != "fp8-g128") and found["linear.default"] == 3 + found["round_inputs"]
    )
    tokens = [node.kwargs.get("rounding") for node in of_kind(module, "rms_norm")]
    tokens += [node.kwargs.get("rounding") for node in of_kind(module, "add_rms_norm")]
    assert [parse_token(token).activations for token in tokens] == [of.activations] * 2
    for node in of_kind(module, "linear.default"):
        assert parse_token(node.args[4]).activations is None


def test_the_numbers_are_those_of_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return product(rms_norm_reference(x, weight, 1e-5), rounding("fp8"))

    given = numbers(2, 3, N).half(), numbers(N).half()
    module, found = counted(step, *given)
    assert found["round_inputs"] == 0
    monkeypatch.setattr(fuse_rounding, "_can_round", lambda *of: False)
    apart, found = counted(step, *given)
    assert found["round_inputs"] == 1 and "rounding" not in of_kind(apart, "rms_norm")[0].kwargs
    with torch.no_grad():
        assert_equal(module(*given), apart(*given))


def test_what_others_read_is_not_rounded() -> None:
    of, other = rounding("fp8"), rounding("int8")

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        read = rms_norm_reference(x, weight, 1e-5)
        both = rms_norm_reference(x + 1, weight, 1e-5)
        part = rms_norm_reference(x + 2, weight, 1e-5)
        plain = rms_norm_reference(x + 3, weight, 1e-5)
        written = rms_norm_reference(x + 4, weight, 1e-5)
        first = product(written, of)
        written.add_(1)
        return (
            product(read, of)
            + read
            + product(both, of)
            + product(both, other)
            + product(part[:, -1:], of)
            + product(plain, of)
            + product(plain, INT4.scheme)
            + first
            + product(written, of)
        )

    module, found = counted(step, numbers(2, 3, N).half(), numbers(N).half())
    assert found["round_inputs"] == 7
    assert not any("rounding" in node.kwargs for node in of_kind(module, "rms_norm"))


def test_equal_inputs_are_rounded_once_unless_written_between() -> None:
    of = rounding("fp8")

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first = product(y, of) + product(y, of)
        y.add_(1)
        return first + product(y, of)

    assert counted(step, numbers(3, N).half())[1]["round_inputs"] == 2


def test_numbers_of_float32_are_rounded_by_torch() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return product(rms_norm_reference(x, weight, 1e-5), rounding("fp8"))

    assert counted(step, numbers(3, N), numbers(N))[1]["round_inputs"] == 1


def test_kernels_that_round_inputs_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_rounding, "rounds_before", lambda *of: False)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return product(rms_norm_reference(x, weight, 1e-5), rounding("fp8"))

    module, found = counted(step, numbers(3, N).half(), numbers(N).half())
    assert found["round_inputs"] == 0 and found["rms_norm"] == 1
    (node,) = of_kind(module, "linear.default")
    assert parse_token(node.args[4]).activations is not None


def test_rounded_norms_are_not_fused_into_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernels would norm without rounding.
    monkeypatch.setattr(fuse_linear, "does_norm", lambda *of: True)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x + product(x, INT4.scheme)
        return product(rms_norm_reference(total, weight, 1e-5), rounding("fp8"))

    _, found = counted(step, numbers(3, N).half(), numbers(N).half())
    assert found["add_rms_norm"] == 1 and found["linear.default"] == 2 and found["round_inputs"] == 0


def of_codes(
    codes: Any, scales: Any, sums: Any, order: Any, shape: Any, dtype: Any, *weight: Any
) -> torch.Tensor:
    """`linear_of_codes` as the product of what codes stand for."""
    order, (parts, layout, bias, token, *rest) = CodeOrder(*order), weight
    assert order == CodeOrder(32, True)
    scheme_of, rows = parse_token(token), math.prod(shape[:-1])
    plain = codes.float().view(rows, -1, order.span // 2, 2).transpose(2, 3).reshape(rows, -1)
    blocks = plain.view(rows, -1, 128)
    assert_close(sums[:, :rows].T, blocks.sum(-1), rtol=1e-6, atol=1e-3)
    assert plain[:, shape[-1] :].count_nonzero() == 0
    each = scales[:rows, None, None] if scales.dim() == 1 else scales[:, :rows].T[..., None]
    x = (blocks * each).view(rows, -1)[:, : shape[-1]].reshape(shape).to(dtype)
    return OPERATOR(x, parts, layout, bias, scheme_of.of_weights.token, *rest)


@pytest.mark.parametrize("name", ["fp8", "int8", "fp8-g128"])
def test_norms_and_gates_quantize_for_linears_that_read_codes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = rounding(name)

    def order_of(rows: int, columns: int, dtype: Any, device: Any, token: str, *rest: Any) -> Any:
        return CodeOrder(32, True) if parse_token(token).activations is not None else None

    monkeypatch.setattr(fuse_rounding, "rounds_before", lambda *of: False)
    monkeypatch.setattr(fuse_rounding, "code_order", order_of)
    monkeypatch.setattr(fuse_rounding, "linear_of_codes", of_codes)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = rms_norm_reference(x, weight, 1e-5)
        total = x + product(y, of) * product(y, of)
        y = product(rms_norm_reference(total, weight, 1e-5), of)
        y = product(silu_gate_reference(y, y + 1), of)
        last = rms_norm_reference(y + 1, weight, 1e-5)
        # What others read, parts of rows, and other schemes are not quantized before.
        read = rms_norm_reference(total + y, weight, 1e-5)
        both = rms_norm_reference(y + 2, weight, 1e-5)
        rest = product(read, of) + read + product(both, of) + product(both, INT4.scheme)
        part = rms_norm_reference(y + 3, weight, 1e-5)
        return total + product(last, of) + rest + product(part[:, -1:], of)

    _, found = counted(step, numbers(2, 3, N).half(), numbers(N).half())
    assert found["norm_codes"] == 3 and found["gate_codes"] == 1 and found["of_codes"] == 5
    assert found["linear.default"] == 4 and found["round_inputs"] == 0


def test_codes_for_another_kernel_are_refused() -> None:
    x = quantize_x.quantize_x(numbers(6, N).half(), rounding("fp8").activations, CodeOrder(32, True))
    of = list(INT4.tensors), [], None, rounding("fp8").token, N, ""
    with pytest.raises(KernelError, match="does not read codes of x in this order"):
        linear_of_codes(x.codes, x.scales, x.sums, astuple(x.order), (2, 3, N), torch.float16, *of)


def test_linears_round_what_no_norm_or_gate_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fuse_rounding, "rounds_within", lambda *of: parse_token(of[4]).activations is not None
    )
    of = rounding("fp8")

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = rms_norm_reference(x, weight, 1e-5)
        alone, shared, written = y * 2, y * 3, y * 4
        found = product(y, of) + product(alone, of) + product(shared, of) + product(shared, of)
        return found + product(written.add_(1), of)

    module, found = counted(step, numbers(2, 3, N).half(), numbers(N).half())
    # The norm is read as it is, and two linears share a rounding.
    assert found["round_inputs"] == 1
    rounds = [parse_token(node.args[4]).activations for node in of_kind(module, "linear.default")]
    assert rounds.count(of.activations) == 3 and rounds.count(None) == 2


def test_steps_without_rounded_inputs_are_compared_more_strictly() -> None:
    given = numbers(3, N).half(), numbers(N).half()
    module = fused(
        lambda x, weight: product(rms_norm_reference(x, weight, 1e-5), INT4.scheme), given, "steps"
    )
    assert not fused_forward._rounds_inputs(module) and not fused_forward._rounds_inputs(product)
    for text in ("{", "{x}", '{"a": 1}', "[]"):
        assert not fused_forward._rounds(text)


def test_short_rows_have_no_codes() -> None:
    of = torch.bfloat16, torch.device("cpu"), rounding("fp8").token, N, ""
    assert code_order(6, 127, *of) is None
