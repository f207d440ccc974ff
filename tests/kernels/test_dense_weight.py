"""Weights written whole for products with gradients: taken for many rows, by a prepared launch.

A kernel that computes on addresses stands for a compiled one, in a row of the table for CPUs.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import quantkit
from quantkit.kernels import eager, registry
from quantkit.kernels.gemm.bound import Bound, Y
from quantkit.kernels.jit.compile_pool import COMPILERS, Compilers
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.linear_grad import DENSE_ROWS
from quantkit.kernels.lora.lora_linear import Lora
from quantkit.kernels.problem import Kernel, Layout, always
from quantkit.packing.schemes import scheme
from quantkit.runtime.packed_linear import PackedLinear

from ..support.compare import assert_equal
from .test_eager import ANY, FAST, Compiled, FakeKernel, K, N, _at

pytest.importorskip("triton")


class CompiledCopy(Compiled):
    """A compiled kernel that copies a dense weight [N, K] to the address that it is given."""

    def run(self, *given: Any) -> None:
        weight, out, start, stop, _ = given[9:]
        self._ran.append(ANY if isinstance(out, torch.Tensor) else FAST)
        assert (start, stop) == (0, N)
        _at(out, N, K).copy_(_at(weight, N, K))


class FakeCopy(FakeKernel):
    arg_names = ("weight", "out", "start", "stop", "W")
    compiled = CompiledCopy


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How weights were written by the kernel of a row that has nothing else."""
    found: list[str] = []
    launch = Launch(FakeCopy(found), (3,), W=4)
    row = Kernel(
        name="dense",
        summary="",
        devices=("cpu",),
        why_unsupported=lambda problem: None if problem.dtype == torch.float32 else "it is for float32",
        why_slower=always,
        layout=Layout("dense", lambda packed, dtype: (packed.dequantize(dtype),), lambda *_: None),
        launch=lambda x, weight, layout, bias: nn.functional.linear(x, layout[0], bias),
        bind_weight=lambda x, weight, layout: Bound(
            ((launch, (*layout, Y, 0, N)),), (N, K), x.dtype, x.device, lambda one: one
        ),
        grad_x=lambda grad, weight, layout: grad @ layout[0],
    )
    monkeypatch.setattr(registry, "KERNELS", (row, *registry.KERNELS))
    monkeypatch.setattr(eager, "_current_device", lambda: -1)
    monkeypatch.setattr(eager, "stream_getter", lambda: lambda index: 11)
    registry.forget_tile_tables()
    registry.grad_kernel.cache_clear()
    yield found
    registry.forget_tile_tables()
    registry.grad_kernel.cache_clear()


def layer_of(bias: bool = True, name: str = "int4", **options: Any) -> PackedLinear:
    generator = torch.Generator().manual_seed(0)
    packed = quantkit.quantize_tensor(torch.randn(N, K, generator=generator), scheme(name, **options))
    return PackedLinear.from_packed(packed, torch.randn(N, generator=generator) if bias else None)


def pass_of(layer: PackedLinear, rows: int) -> list[torch.Tensor]:
    """Return y and the gradient of x."""
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def dense_of(layer: PackedLinear, rows: int) -> list[torch.Tensor]:
    """The slow twin: the same by torch, with the dequantized weight."""
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    y = nn.functional.linear(x, layer.packed.dequantize(torch.float32), layer.bias)
    y.sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_take_the_weight_by_one_launch_each_way(ran: list[str], bias: bool) -> None:
    layer = layer_of(bias)
    for rows in (DENSE_ROWS, DENSE_ROWS + 7):
        for one, other in zip(pass_of(layer, rows), dense_of(layer, rows), strict=True):
            assert_equal(one, other)
    assert ran == [ANY, FAST, FAST, FAST]


def test_few_rows_and_passes_without_gradients_take_the_usual_kernel(ran: list[str]) -> None:
    layer = layer_of()
    pass_of(layer, DENSE_ROWS - 1)
    with torch.no_grad():
        layer(torch.randn(DENSE_ROWS, K))
    assert not ran


def test_a_forced_kernel_computes_the_forward_pass(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    monkeypatch.setenv(registry.FORCE_VARIABLE, "dense")
    pass_of(layer, DENSE_ROWS)
    assert ran == [ANY]


def test_weights_with_column_scales_are_not_written_whole(ran: list[str]) -> None:
    pass_of(layer_of(name="binary-rank1"), DENSE_ROWS)
    assert not ran


def test_a_launch_that_is_watched_is_not_prepared(ran: list[str]) -> None:
    layer = layer_of()
    token = COMPILERS.set(Compilers())
    try:
        layer.layout(torch.float32)
        found = layer.layout(torch.float32)
        assert found is not None
        x = torch.randn(DENSE_ROWS, K)
        assert eager.dense_weight(found, x, layer.scheme, N, K) is None and not found.weight_plans
    finally:
        COMPILERS.reset(token)
    pass_of(layer, DENSE_ROWS)
    assert ran == [ANY, FAST]


def test_a_weight_that_no_kernel_writes_is_asked_for_once(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, asked = layer_of(), []
    monkeypatch.setattr(eager, "grad_kernel", asked.append)
    first, second = pass_of(layer, DENSE_ROWS), pass_of(layer, DENSE_ROWS)
    assert len(asked) == 1 and not ran
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other)


def test_who_asks_to_see_choices_sees_this_one_once(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = layer_of()
    pass_of(layer, DENSE_ROWS)
    assert not caplog.messages
    monkeypatch.setattr(registry, "_logged", set())
    monkeypatch.setenv(registry.VERBOSE_VARIABLE, "1")
    pass_of(layer, DENSE_ROWS)
    pass_of(layer, DENSE_ROWS)
    assert len(caplog.messages) == 1
    assert (
        f"M=512 N={N} K={K}" in caplog.text
        and ": multiplied dense, as the product has a gradient" in caplog.text
    )


def test_a_bias_of_another_dtype_is_left_to_the_usual_kernel(ran: list[str]) -> None:
    layer = layer_of()
    layer.bias = nn.Parameter(torch.zeros(N, dtype=torch.float64), requires_grad=False)
    with pytest.raises(quantkit.errors.QuantkitError):
        pass_of(layer, DENSE_ROWS)
    assert not ran


def test_y_may_be_changed_in_place(ran: list[str]) -> None:
    x = torch.randn(2, DENSE_ROWS // 2, K).requires_grad_()
    y = layer_of()(x)
    y += 1
    y.sum().backward()
    assert ran == [ANY, FAST] and x.grad is not None


@pytest.mark.parametrize("grad", [False, True])
def test_a_lora_takes_the_weight_whole_for_gradients_alone(ran: list[str], grad: bool) -> None:
    layer, x = layer_of(), torch.randn(DENSE_ROWS, K)
    lora = Lora(torch.zeros(4, K, requires_grad=True), torch.zeros(N, 4), 1.0)
    with torch.set_grad_enabled(grad):
        assert layer.with_lora(x, lora, None) is not None
    assert ran == ([ANY] if grad else [])
    frozen = Lora(lora.a.detach(), lora.b, 1.0)
    assert layer.with_lora(x, frozen, None) is not None
    assert ran == ([ANY] if grad else [])


def test_a_launch_that_fails_is_tried_again(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    with monkeypatch.context() as patch:
        patch.setattr(Bound, "__call__", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            pass_of(layer, DENSE_ROWS)
    pass_of(layer, DENSE_ROWS)
    assert ran == [ANY, FAST]


def test_nothing_is_launched_while_another_device_is_current(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of()
    pass_of(layer, DENSE_ROWS)
    (plan,) = layer.layout(torch.float32).weight_plans.values()
    monkeypatch.setattr(eager, "_current_device", lambda: 3)
    assert plan() is None
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    layout = layer_of().layout(torch.float32)
    x = torch.randn(DENSE_ROWS, K)
    assert eager.dense_weight(layout, x, layer.scheme, N, K) is None and not layout.weight_plans
