"""Plans of eager mode: they are taken where they may be, and compute what the operator does.

A kernel that computes on addresses stands for a compiled one, in a row of the table for CPUs.
"""

import copy
import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import quantkit
from quantkit.errors import KernelError
from quantkit.kernels import eager, linear, registry
from quantkit.kernels.gemm.bound import BIAS, SUMS, Bound, X, Y
from quantkit.kernels.gemm.operands import aligned
from quantkit.kernels.jit.compile_pool import COMPILERS, Compilers
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.problem import Kernel, Layout, Problem, always
from quantkit.packing.schemes import scheme
from quantkit.runtime import packed_linear
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.shared_input import shared_inputs

from ..support.compare import assert_equal

pytest.importorskip("triton")

N, K = 48, 64
FAST, ANY = "by addresses", "by tensors"


class Compiled:
    """A compiled kernel that is run as Triton does since 3.6; `ran` gets how it was launched."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, ran: list[str]) -> None:
        self._ran = ran

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, stream: int = 5) -> None:
            hooks = "record", "enter", "exit"
            self.run(*grid, stream, self.function, self.packed_metadata, *hooks, *arguments)

        return launch

    def run(self, *given: Any) -> None:
        hooks, (x, weight, bias, y, sums, m, n, has_bias) = given[6:9], given[9:]
        by_tensors = isinstance(x, torch.Tensor)
        self._ran.append(ANY if by_tensors else FAST)
        assert given[:6] == (3, 1, 1, 5 if by_tensors else 11, self.function, self.packed_metadata)
        assert hooks == (("record", "enter", "exit") if by_tensors else (None, None, None))
        x, y, weight = _at(x, m, K), _at(y, m, n), _at(weight, n, K)
        assert _at(sums, 1).data_ptr() != y.data_ptr()
        y.copy_(nn.functional.linear(x, weight, _at(bias, n) if has_bias else None))


def _at(address: int | torch.Tensor, *size: int) -> torch.Tensor:
    count = torch.Size(size).numel()
    if isinstance(address, torch.Tensor):
        address = address.data_ptr()
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32).view(size)


class FakeKernel:
    """A kernel of Triton that compiles to `compiled`; the last of its arguments is a constexpr."""

    arg_names = ("x", "weight", "bias", "y", "sums", "m", "n", "HAS_BIAS")
    compiled: type[Compiled] = Compiled

    def __init__(self, ran: list[str]) -> None:
        self._ran = ran

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def run(*arguments: Any, **options: Any) -> Compiled:
            compiled = self.compiled(self._ran)
            compiled[3, 1, 1](*arguments, options[self.arg_names[-1]])
            return compiled

        return run

    def warmup(self, *_: Any, **__: Any) -> Compiled:
        return self.compiled(self._ran)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How the kernel of a row that computes everything was launched."""
    found: list[str] = []

    @cache
    def launch_of(m: int, n: int, has_bias: bool) -> Launch:
        return Launch(FakeKernel(found), (3,), HAS_BIAS=has_bias)

    def bind(x, weight, layout, bias, tile=None) -> Bound:
        m = x.shape[0]
        n = weight.shape[0]
        launches = ((launch_of(m, n, bias is not None), (X, *layout, BIAS, Y, SUMS, m, n)),)
        return Bound(launches, (m, n), x.dtype, x.device, aligned, (2, 3))

    def join(weights, rows, *_):
        whole = torch.cat([dense for (dense,) in weights])
        return (whole,), tuple((part,) for part in torch.split(whole, rows))

    row = Kernel(
        name="dense",
        summary="",
        devices=("cpu",),
        why_unsupported=lambda problem: None if problem.dtype == torch.float32 else "it is for float32",
        why_slower=always,
        layout=Layout("dense", lambda packed, dtype: (packed.dequantize(dtype),), join),
        launch=lambda x, weight, layout, bias: bind(x, weight, layout, bias)(
            x, None if bias is None else bias.contiguous()
        ),
        bind=bind,
    )
    monkeypatch.setattr(registry, "KERNELS", (row, *registry.KERNELS))
    monkeypatch.setattr(eager, "_current_device", lambda: -1)
    monkeypatch.setattr(eager, "stream_getter", lambda: lambda index: 11)
    registry.forget_tile_tables()
    yield found
    registry.forget_tile_tables()


@contextmanager
def by_the_operator() -> Iterator[None]:
    """The slow twin: all goes through torch's dispatcher."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((linear, "is_eager"), (packed_linear, "is_plain")):
            patch.setattr(module, name, lambda x: False)
        yield


def layer_of(bias: bool = True, seed: int = 0) -> PackedLinear:
    generator = torch.Generator().manual_seed(seed)
    packed = quantkit.quantize_tensor(torch.randn(N, K, generator=generator), scheme("int4", group_size=32))
    return PackedLinear.from_packed(packed, torch.randn(N, generator=generator) if bias else None)


def x_of(*size: int) -> torch.Tensor:
    return torch.randn(*size, K, generator=torch.Generator().manual_seed(1))


def check(layer: nn.Module, x: torch.Tensor, ran: list[str], *expected: str) -> None:
    """The layer computes what it does by the operator, and launches as expected."""
    ran.clear()
    found = layer(x)
    assert ran == list(expected)
    with by_the_operator():
        ran.clear()
        other = layer(x)
        assert FAST not in ran
    assert_equal(found, other)
    assert found.shape == other.shape and found.dtype == other.dtype
    assert found.requires_grad == other.requires_grad and found.is_contiguous()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_second_call_of_a_size_is_by_its_plan(ran, mode, bias):
    layer = layer_of(bias)
    with mode():
        for size in ((1,), (2,), (1, 2), (2, 1, 3), (17,)):
            layer(x_of(*size))
            check(layer, x_of(*size), ran, FAST)
        assert layer(x_of(1)).is_inference() == torch.is_inference_mode_enabled()


@torch.no_grad()
def test_a_vector_has_the_plan_of_one_row(ran):
    layer = layer_of()
    layer(x_of(1))
    check(layer, x_of(), ran, FAST)


@torch.no_grad()
def test_the_function_has_plans_too(ran):
    packed, bias = layer_of().packed, torch.randn(N)
    expected = quantkit.linear(x_of(2), packed, bias)
    assert_equal(quantkit.linear(x_of(2), packed, bias), expected)
    assert ran == [ANY, FAST]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.randn(K, 2).T, [FAST]),
        (lambda: torch.randn(2, 2 * K)[:, ::2], [FAST]),
        (lambda: torch.randn(2 * K + 1)[1:].view(2, K), [ANY]),
        (lambda: x_of(2)[:, None].expand(2, 1, K), [FAST]),
        (lambda: torch._neg_view(x_of(2)), [ANY]),
        (lambda: x_of(0), []),
        (lambda: x_of(2).requires_grad_(), [FAST]),
        (lambda: nn.Parameter(x_of(2)), [ANY]),
    ],
    ids=[
        "transposed",
        "strided",
        "not aligned",
        "expanded",
        "negative view",
        "no rows",
        "a leaf",
        "parameter",
    ],
)
@torch.no_grad()
def test_any_x_is_taken(ran, make, expected):
    layer = layer_of()
    layer(x_of(2))
    check(layer, make(), ran, *expected)


@pytest.mark.parametrize(
    "x",
    [x_of(2).double(), x_of(2)[:, 1:], torch.tensor(1.0), torch.zeros(2, K, dtype=torch.int64), "text"],
    ids=["dtype", "columns", "scalar", "integers", "no tensor"],
)
@torch.no_grad()
def test_errors_are_those_of_the_operator(ran, x):
    layer = layer_of()
    layer(x_of(2))
    with pytest.raises(KernelError) as found:
        layer(x)
    with by_the_operator(), pytest.raises(KernelError) as expected:
        layer(x)
    assert str(found.value) == str(expected.value)


@torch.no_grad()
def test_x_on_the_meta_device_gives_y_there(ran):
    layer = layer_of()
    layer(x_of(2))
    assert layer(x_of(2).to("meta")).is_meta


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda layer: layer.bias.add_(1), [FAST]),
        (lambda layer: layer.bias.data.copy_(torch.arange(float(N))), [FAST]),
        (lambda layer: setattr(layer.bias, "data", torch.arange(float(N))), [FAST]),
        (lambda layer: setattr(layer.bias, "data", torch.arange(2.0 * N)[::2]), [ANY]),
        (lambda layer: setattr(layer.bias, "data", torch.arange(N + 1.0)[1:]), [ANY]),
        (lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(N))), [FAST]),
        (lambda layer: layer._parameters.__setitem__("bias", nn.Parameter(torch.ones(N))), [FAST]),
        (lambda layer: setattr(layer, "bias", None), [ANY]),
    ],
    ids=["in place", "data in place", "data", "strided", "not aligned", "set", "behind its back", "none"],
)
@torch.no_grad()
def test_a_changed_bias_is_seen(ran, change, expected):
    layer = layer_of()
    layer(x_of(2))
    before = layer(x_of(2))
    change(layer)
    check(layer, x_of(2), ran, *expected)
    assert not torch.equal(layer(x_of(2)), before)


@pytest.mark.parametrize("bias", [torch.ones(N + 1), torch.ones(1, N), torch.ones(N).double()])
@torch.no_grad()
def test_a_bias_that_does_not_fit_is_refused(ran, bias):
    layer = layer_of()
    layer(x_of(2))
    layer.bias.data = bias
    with pytest.raises(KernelError, match="bias"):
        layer(x_of(2))
    assert FAST not in ran


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, other: layer.load_state_dict(other.state_dict()),
        lambda layer, other: setattr(layer, "weight", other.weight),
        lambda layer, other: layer._parameters.__setitem__("weight", other.weight),
        lambda layer, other: layer.drop_kernel_layouts(),
        lambda layer, other: layer.double().float(),
        lambda layer, other: layer.to("cpu"),
        lambda layer, other: layer.half().float(),
        lambda layer, other: layer.build_kernel_layouts(torch.bfloat16),
    ],
    ids=["loaded", "set", "behind its back", "dropped", "cast", "moved", "cast to less", "another dtype"],
)
@torch.no_grad()
def test_a_changed_weight_is_seen(ran, change):
    layer, other = layer_of(), layer_of(seed=1)
    layer(x_of(2))
    layer(x_of(2))
    change(layer, other)
    for _ in range(2):
        found = layer(x_of(2))
        # Rounded alike: the layout is of the weight that is there.
        expected = nn.functional.linear(x_of(2), layer.packed.dequantize(torch.float32), layer.bias)
        assert_equal(found, expected)
    check(layer, x_of(2), ran, FAST)


@torch.no_grad()
def test_another_scale_behind_its_back_has_a_plan_of_its_own(ran):
    layer = layer_of()
    layer(x_of(2))
    (scale,) = (name for name in layer._parameters if name.endswith("scale"))
    layer._parameters[scale] = nn.Parameter(layer._parameters[scale].half(), requires_grad=False)
    check(layer, x_of(2), ran, ANY)
    check(layer, x_of(2), ran, FAST)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
@torch.no_grad()
def test_a_copy_plans_for_itself(ran, duplicate):
    layer = layer_of()
    layer(x_of(2))
    twin = duplicate(layer)
    twin.weight = layer_of(seed=1).weight
    for one in (twin, layer):
        one(x_of(2))
        check(one, x_of(2), ran, FAST)
    assert not torch.equal(twin(x_of(2)), layer(x_of(2)))


@torch.no_grad()
def test_a_forced_row_is_seen_between_calls(ran, monkeypatch):
    layer = layer_of()
    layer(x_of(2))
    check(layer, x_of(2), ran, FAST)
    monkeypatch.setenv(registry.FORCE_VARIABLE, "unpack")
    check(layer, x_of(2), ran)
    monkeypatch.setenv(registry.FORCE_VARIABLE, "nothing")
    with pytest.raises(KernelError, match="unknown kernel 'nothing'"):
        layer(x_of(2))
    monkeypatch.delenv(registry.FORCE_VARIABLE)
    check(layer, x_of(2), ran, FAST)


@torch.no_grad()
def test_who_asks_to_see_choices_sees_them(ran, monkeypatch, caplog):
    layer = layer_of()
    layer(x_of(2))
    layer(x_of(2))
    monkeypatch.setattr(registry, "_logged", set())
    monkeypatch.setenv(registry.VERBOSE_VARIABLE, "1")
    layer(x_of(2))
    assert f"M=2 N={N} K={K}" in caplog.text and ": dense" in caplog.text
    check(layer, x_of(2), ran, FAST)


@torch.no_grad()
def test_tile_tables_that_are_read_anew_are_asked(ran, monkeypatch):
    layer = layer_of()
    layer(x_of(2))
    check(layer, x_of(2), ran, FAST)
    asked = []
    first = replace(registry.KERNELS[0], why_slower=asked.append)
    monkeypatch.setattr(registry, "KERNELS", (first, *registry.KERNELS[1:]))
    registry.forget_tile_tables()
    check(layer, x_of(2), ran, ANY)
    assert len(asked) == 1
    check(layer, x_of(2), ran, FAST)


def test_leave_to_sum_in_float16_is_part_of_a_choice():
    matmul, dtypes = torch.backends.cuda.matmul, (torch.float16, torch.bfloat16)
    allowed, before = matmul.allow_fp16_accumulation, [registry.choosing(dtype) for dtype in dtypes]
    try:
        matmul.allow_fp16_accumulation = not allowed
        after = [registry.choosing(dtype) for dtype in dtypes]
    finally:
        matmul.allow_fp16_accumulation = allowed
    assert after[0] != before[0] and after[1] == before[1]
    assert [registry.choosing(dtype) for dtype in dtypes] == before


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        self.names.append(str(operation))
        return operation(*arguments, **(options or {}))


class SeenFunctions(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **(options or {}))


class Mine(torch.Tensor):
    """A subclass, whose results are of it too."""


@torch.no_grad()
def test_who_watches_operators_sees_the_operator(ran):
    layer = layer_of()
    layer(x_of(2))
    for mode in (Seen(), SeenFunctions()):
        with mode:
            check(layer, x_of(2), ran, ANY)
        assert any("quantkit.linear" in name for name in mode.names)
    assert isinstance(layer(x_of(2).as_subclass(Mine)), Mine)


def test_gradients_are_those_of_the_operator(ran):
    layer = layer_of()
    layer(x_of(2))
    layer.bias.requires_grad_()
    grad = torch.randn(2, N, generator=torch.Generator().manual_seed(2))

    def gradients() -> list[torch.Tensor]:
        x = x_of(2).requires_grad_()
        layer.bias.grad = None
        layer(x).backward(grad)
        assert x.grad is not None and layer.bias.grad is not None
        return [x.grad, layer.bias.grad]

    ran.clear()
    found = gradients()
    assert ran == [FAST]
    with by_the_operator():
        ran.clear()
        expected = gradients()
        assert FAST not in ran
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
    # Without a gradient of x, and with one of a part of the weight, the operator runs.
    ran.clear()
    assert layer(x_of(2)).requires_grad
    scale = next(one for name, one in layer.named_parameters() if name.endswith("scale"))
    layer.bias.requires_grad_(False)
    scale.requires_grad_()
    with pytest.raises(KernelError, match="a scale of a packed weight asks for a gradient"):
        layer(x_of(2)).sum().backward()
    assert FAST not in ran


def test_a_weight_that_changed_since_is_refused(ran):
    layer = layer_of()
    y = layer(x_of(2).requires_grad_())
    other = layer_of(seed=3).state_dict()
    layer.load_state_dict(other)
    with pytest.raises(KernelError, match=r"packed weight \(int4, 48 rows\).* was changed in place between"):
        y.sum().backward()


def test_a_graph_is_used_once_and_keeps_no_weight(ran):
    layer = layer_of()
    loss = layer(x_of(2).requires_grad_()).sum()
    loss.backward()
    with pytest.raises(KernelError, match="a second time, and its tensors were freed"):
        loss.backward()
    kept = [weakref.ref(one) for one in (*layer.parameters(), *next(iter(layer._layouts.values())).tensors)]
    del layer
    gc.collect()
    assert all(one() is None for one in kept)


def test_a_gradient_has_no_gradient(ran):
    x = x_of(2).requires_grad_()
    (first,) = torch.autograd.grad(layer_of()(x).square().sum(), x, create_graph=True)
    with pytest.raises(KernelError, match="have no gradients of gradients"):
        first.sum().backward()


def test_checkpointed_gradients_are_the_same(ran):
    layer, grad = layer_of(), torch.ones(2, N)
    plain, again = x_of(2).requires_grad_(), x_of(2).requires_grad_()
    layer(plain).backward(grad)
    torch.utils.checkpoint.checkpoint(layer, again, use_reentrant=False).backward(grad)
    assert_equal(plain.grad, again.grad)


def test_transforms_are_refused_and_traces_are_those_of_the_operator(ran):
    layer, x = layer_of(), x_of(3, 2)
    with torch.no_grad():
        expected = layer(x)
        layer(x_of(2)), layer(x_of(2))
    ran.clear()
    with pytest.raises(KernelError, match=r"do not go with torch\.vmap"):
        torch.vmap(layer)(x)
    with pytest.raises(KernelError, match="no forward derivatives"):
        torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    assert FAST not in ran
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.empty(2, K)).shape == (2, N)
    # Other tests compile the same forward, of which torch compiles 8 at most.
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert_equal(compiled(x), expected)
        assert FAST not in ran
        torch.compiler.reset()
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        assert "quantkit::linear" in str(traced.inlined_graph)


def test_autocast_has_plans_for_what_it_casts_to(ran):
    layer = layer_of()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x_of(2)).dtype == torch.bfloat16
        layer(x_of(2))
    assert ran == []


@torch.no_grad()
def test_linears_with_one_input_are_one_plan(ran):
    model = nn.Module()
    for seed, name in enumerate(("q_proj", "k_proj", "v_proj")):
        setattr(model, name, layer_of(seed=seed))
    (shared,) = shared_inputs(model)
    shared.build(torch.float32)
    layers, x = [model.q_proj, model.k_proj, model.v_proj], x_of(1, 2)
    for expected in ([ANY], [FAST]):
        ran.clear()
        found = [layer(x) for layer in layers]
        assert ran == expected
        for y, layer in zip(found, layers, strict=True):
            assert_equal(y, nn.functional.linear(x, layer.packed.dequantize(), layer.bias))
    model.k_proj.bias.add_(1)
    assert not torch.equal([layer(x) for layer in layers][1], found[1]) and ran[-1:] == [FAST]
    model.k_proj.weight = layer_of(seed=9).weight
    for expected in ([ANY, ANY, ANY], [FAST, FAST, FAST]):
        ran.clear()
        ys = [layer(x) for layer in layers]
        assert ran == expected
        for y, layer in zip(ys, layers, strict=True):
            assert_equal(y, nn.functional.linear(x, layer.packed.dequantize(), layer.bias))


@torch.no_grad()
def test_launches_that_are_left_out_or_watched_are_not_fixed(ran, monkeypatch):
    from triton import knobs

    layer = layer_of()
    layer(x_of(2))
    token = COMPILERS.set(Compilers())
    try:
        check(layer, x_of(2), ran, ANY)
        # No plan is made of what was not launched.
        check(layer, x_of(5), ran, ANY)
    finally:
        COMPILERS.reset(token)
    check(layer, x_of(5), ran, ANY)
    check(layer, x_of(5), ran, FAST)
    hook = knobs.runtime.launch_enter_hook
    called = print
    hook.add(called)
    try:
        check(layer, x_of(2), ran, ANY)
    finally:
        hook.remove(called)
    check(layer, x_of(2), ran, FAST)


@pytest.mark.parametrize(
    "change",
    [
        lambda one, grid: lambda *given, stream=5: one.run(*grid, stream, given),
        lambda one, grid: lambda *given, stream=5: one.run(*grid, stream, 8, (4, 1, 0), *"123", *given),
        lambda one, grid: lambda *given, stream=5: one.run(*grid, stream, 7, (4, 1, 0), *"123", 0, *given),
        lambda one, grid: lambda *given, stream=5: None,
        lambda one, grid: lambda *given: one.run(*grid, 5, 7, (4, 1, 0), *"123", *given),
    ],
    ids=["arguments in one", "function", "one more", "another method", "no stream"],
)
def test_no_launch_is_fixed_that_triton_would_make_otherwise(change):
    launch = Launch(FakeKernel([]), (3,), HAS_BIAS=False)
    tensors = [torch.zeros(4, K), torch.zeros(N, K), *(torch.zeros(4, N) for _ in range(3))]
    launch(*tensors, 4, N)
    assert launch.fixed([*tensors, 4, N], [(0, 0)]) is not None
    (compiled,) = launch._compiled.values()
    compiled.__class__ = type("Other", (Compiled,), {"__getitem__": change})
    assert launch.fixed([*tensors, 4, N], [(0, 0)]) is None


@torch.no_grad()
def test_another_current_device_is_no_place_for_a_plan(ran, monkeypatch):
    layer = layer_of()
    layer(x_of(2))
    monkeypatch.setattr(eager, "_current_device", lambda: 1)
    check(layer, x_of(2), ran, ANY)


@torch.no_grad()
def test_there_are_no_more_plans_than_many(ran, monkeypatch):
    monkeypatch.setattr(eager, "MOST_PLANS", 4)
    layer = layer_of()
    for rows in range(1, 12):
        layer(x_of(rows))
        check(layer, x_of(rows), ran, FAST)
        assert len(layer.layout(torch.float32).plans) <= 4


@torch.no_grad()
def test_rows_without_fixed_launches_run_as_ever(monkeypatch):
    """Here on a CPU, whose rows launch no kernels of Triton's."""
    layer = layer_of()
    with by_the_operator():
        expected = layer(x_of(2))
    for _ in range(2):
        assert_equal(layer(x_of(2)), expected)
    problem = Problem.on(torch.device("cpu"), 2, N, K, layer.scheme, torch.float32)
    assert registry.choose(problem).kernel.bind is None
