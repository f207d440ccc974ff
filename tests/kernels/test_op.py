"""The registered operator: its contract with torch, and under torch.compile."""

import shutil
import subprocess
import sys

import pytest
import torch

from quantkit.errors import FormatError, KernelError
from quantkit.kernels.linear import linear, linear_parts
from quantkit.kernels.registry import FORCE_VARIABLE
from quantkit.kernels.weight_layouts import build_layout

from ..support.compare import assert_close, assert_equal


def arguments(packed, x, *, bias=None, layout=None):
    tensors = list(layout.tensors) if layout else []
    row = layout.name if layout else ""
    token, rows = packed.scheme.token, packed.shape[0]
    return (x, list(packed.tensors), tensors, bias, token, rows, row)


def checks(packed):
    """All of opcheck's, less the one that torch's own code cannot do with 8-bit scales."""
    every = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    return every[packed.scale.itemsize == 1 :]


@pytest.mark.parametrize(
    ("row", "name", "zero_point"),
    [
        *[(row, "int4", kind) for row in ("unpack", "int-digits") for kind in ("none", "integer")],
        ("unpack", "int4", "float"),
        ("unpack", "nvfp4", "none"),
        ("int-digits", "nvfp4", "none"),
        ("unpack", "book4", "none"),
        ("unpack", "binary-residual", "none"),
        ("unpack", "binary-rank1", "none"),
        ("int-digits", "binary-rank1", "none"),
    ],
)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.sampled(2)
def test_the_operator_keeps_its_contract_with_torch(
    row, name, zero_point, needs_grad, make_packed, monkeypatch
):
    monkeypatch.setenv(FORCE_VARIABLE, row)
    packed = make_packed(name, (17, 60), group_size=32, zero_point=zero_point)
    layout = build_layout(packed, torch.float32)
    x = torch.randn(2, 3, 60, requires_grad=needs_grad)
    bias = torch.randn(17, requires_grad=needs_grad)
    operands = arguments(packed, x, bias=bias, layout=layout)
    torch.library.opcheck(torch.ops.quantkit.linear, operands, test_utils=checks(packed))


@pytest.mark.parametrize("name", ["fp6", "nvfp4", "binary-residual", "binary-rank1", "book4"])
def test_opcheck_of_the_gradient(name, make_packed):
    packed = make_packed(name, (17, 60), group_size=32)
    grad = torch.randn(2, 3, 17)
    operands = (grad, list(packed.tensors), [], packed.scheme.token, 60, "")
    torch.library.opcheck(torch.ops.quantkit.linear_grad_x, operands, test_utils=checks(packed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_casts_x_and_bias(dtype, make_packed):
    packed = make_packed("int4", (17, 60), group_size=32)
    x, bias = torch.randn(3, 60, dtype=dtype), torch.randn(17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = linear(x, packed, bias), torch.nn.functional.linear(x, packed.dequantize(), bias)
    assert y.dtype == expected.dtype
    # Dense weights are rounded to bfloat16 first.
    assert_close(y, expected, rtol=2e-2, atol=1e-1)
    assert_close(y, linear(x.bfloat16(), packed, bias.bfloat16()), rtol=0, atol=0)


@pytest.mark.parametrize("warm", [False, True], ids=["no layout", "layout"])
def test_compiles_in_one_graph(warm, make_packed, monkeypatch):
    packed = make_packed("int4", (512, 256), exact=True)
    x = torch.ones(3, 256)
    eager = linear(x, packed)
    if not warm:
        packed.kernel_cache.clear()
    compiled = torch.compile(lambda x: linear(x, packed).relu(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_equal(compiled(x), eager.relu())


def test_compiles_for_any_number_of_rows(make_packed):
    packed = make_packed("int4", (64, 128), exact=True)
    compiled = torch.compile(lambda x: linear(x, packed), fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (2, 5, 70):
        x = torch.ones(m, 128)
        assert_equal(compiled(x), linear(x, packed))


def test_compiles_with_gradients(make_packed):
    packed = make_packed("int4", (16, 64), group_size=32, exact=True)
    x = torch.ones(2, 64, requires_grad=True)
    compiled = torch.compile(lambda x: linear(x, packed), fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    assert_equal(x.grad, torch.ones(2, 16) @ packed.dequantize())


class Packed(torch.nn.Module):
    """A module over the parts, as `quantkit.model` has."""

    def __init__(self, packed):
        super().__init__()
        self.words = torch.nn.Parameter(packed.words, requires_grad=False)
        self.scale = torch.nn.Parameter(packed.scale, requires_grad=False)
        self.scheme, self.rows = packed.scheme, packed.shape[0]

    def forward(self, x):
        return linear_parts(x, (self.words, self.scale), None, self.scheme, self.rows, None)


def test_a_module_over_the_parts_compiles(make_packed):
    first, second = make_packed("int4", (32, 64), exact=True), make_packed("fp6", (16, 32), exact=True)
    model = torch.nn.Sequential(Packed(first), Packed(second))
    x = torch.ones(2, 64)
    with torch.inference_mode():
        assert_equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_runs_it(make_packed):
    packed = make_packed("int4", (16, 64), group_size=32, exact=True)
    x = torch.ones(2, 64)
    with torch.no_grad():
        assert_equal(torch.compile(lambda x: linear(x, packed) + 1, fullgraph=True)(x), linear(x, packed) + 1)


def test_the_fake_result_is_the_real_one(make_packed):
    packed = make_packed("int4", (17, 60), group_size=32)
    x = torch.randn(2, 5, 60, dtype=torch.bfloat16)
    fake = torch.ops.quantkit.linear(
        *torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), arguments(packed, x))
    )
    real = linear(x, packed)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


WORDS = torch.zeros(16, 8, dtype=torch.int32)
SCALE = torch.ones(16, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.ones(2, 96)}, r"part 'packed'.*\(16, 8\); expected torch.int32 \(16, 12\)"),
        ({5: 24}, r"part 'packed'.*expected torch.int32 \(24, 8\)"),
        (
            {1: [WORDS, torch.ones(16, 3, dtype=torch.bfloat16)]},
            r"part 'scale'.*\(16, 3\); expected torch.bfloat16 \(16, 2\)",
        ),
        ({1: [WORDS, torch.ones(16, 2)]}, r"part 'scale'.*torch.float32"),
        ({1: [WORDS.long(), SCALE]}, r"part 'packed'.*torch.int64"),
        ({1: [WORDS, SCALE, torch.ones(1)]}, r"has the parts packed, scale; got 3 tensors"),
        ({1: [WORDS]}, r"has the parts packed, scale; got 1 tensors"),
        ({0: torch.ones(2, 64, dtype=torch.float64)}, r"x is torch.float64"),
        ({3: torch.ones(3)}, r"bias has shape \(3,\)"),
    ],
)
def test_parts_that_do_not_fit_never_reach_a_kernel(change, message, make_packed):
    packed = make_packed("int4", (16, 64), group_size=32)
    operands = list(arguments(packed, torch.ones(2, 64)))
    for position, value in change.items():
        operands[position] = value
    with pytest.raises((FormatError, KernelError, KeyError), match=message):
        torch.ops.quantkit.linear(*operands)


def test_importing_is_light():
    code = (
        "import sys, quantkit.kernels.linear, quantkit.kernels.report, torch\n"
        "heavy = {'triton', 'transformers', 'torch._dynamo'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
