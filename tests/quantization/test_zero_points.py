"""A kind of zero-point is a row of a table: kinds made up here work from quantizing to generating."""

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.calibrate.methods import quantize_tensor
from quantkit.errors import FormatError, KernelError, UsageError
from quantkit.kernels.linear import linear, linear_parts
from quantkit.kernels.problem import GPU_FEATURES, Problem
from quantkit.kernels.registry import FORCE_VARIABLE, KERNELS, choose, kernel_named
from quantkit.kernels.weight_layouts import build_layout
from quantkit.packing.activations import activations_named
from quantkit.packing.formats import NumberFormat
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.packing.zero_points import ZERO_POINTS, ZeroPoint, ZeroPointType, plain_storage, searched
from quantkit.recipes.recipe import parse_zero_point
from quantkit.runtime.load import load
from quantkit.runtime.replace import packed_modules

from ..support.compare import assert_close, assert_equal
from .test_quantize import check_tensors, write

ROOT = Path(__file__).parents[2]
REFUSED = "its zero-points are bytes, which no kernel here reads; use an integer one"


def _round_to_byte(number_format: NumberFormat, z: torch.Tensor, _: torch.dtype) -> torch.Tensor:
    return torch.round(z).clamp(-128, 127).float()


def _round_to_float8(number_format: NumberFormat, z: torch.Tensor, _: torch.dtype) -> torch.Tensor:
    return z.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _made_up(name: str) -> ZeroPoint:
    return cast(ZeroPoint, name)


#: A signed byte per group, also beyond the codes: for groups without a weight near zero.
BYTE = replace(
    ZERO_POINTS["float"],
    name=_made_up("byte"),
    suffix=" asym-byte",
    storage=plain_storage(lambda scale_dtype: torch.int8),
    round=_round_to_byte,
    step=1.0,
    is_continuous=False,
    why_not_fused=REFUSED,
    why_not_int8=REFUSED,
)
#: A float of 8 bits per group.
FLOAT8 = replace(
    ZERO_POINTS["float"],
    name=_made_up("float8"),
    suffix=" asym-float8",
    storage=plain_storage(lambda scale_dtype: torch.float8_e4m3fn),
    round=_round_to_float8,
)
STORED = {"byte": torch.int8, "float8": torch.float8_e4m3fn}


@pytest.fixture(params=[BYTE, FLOAT8], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ZeroPointType:
    made_up: ZeroPointType = request.param
    monkeypatch.setitem(ZERO_POINTS, made_up.name, made_up)
    return made_up


def weight(rows: int = 80, columns: int = 200) -> torch.Tensor:
    """Groups that lie aside of zero."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) + 0.7


def definition(packed: PackedTensor) -> torch.Tensor:
    """The slow twin of `dequantize` from the stored parts: `scale * (code - z)`, a weight at a time."""
    codes, scale, zero = packed.codes().tolist(), packed.scale.tolist(), packed.part("zero_point")
    assert zero is not None
    zeros, size = zero.float().tolist(), packed.scheme.group_columns(packed.shape[1])
    return torch.tensor(
        [
            [scale[n][k // size] * (code - zeros[n][k // size]) for k, code in enumerate(row)]
            for n, row in enumerate(codes)
        ]
    )


@pytest.mark.parametrize("method", ["rtn", "mse", "hqq"])
@pytest.mark.parametrize("group_size", ["channel", 32])
def test_a_tensor_is_quantized_saved_and_read(
    kind: ZeroPointType, method: str, group_size: Any, tmp_path: Path
) -> None:
    source = weight()
    packed = quantize_tensor(source, "int4", group_size=group_size, zero_point=kind.name, method=method)
    save_file(dict(packed.parts()), tmp_path / "one.safetensors")
    parts = load_file(tmp_path / "one.safetensors")
    assert parts["zero_point"].dtype == STORED[kind.name]
    assert parts["zero_point"].shape == (80, packed.scheme.groups(200))
    again = PackedTensor.from_parts(parts, Scheme.from_dict(packed.scheme.to_dict()), (80, 200))
    assert_close(again.dequantize(), definition(packed), rtol=1e-6, atol=1e-6)
    assert_equal(again.dequantize(start=3, stop=9), packed.dequantize()[3:9])
    symmetric = quantize_tensor(source, "int4", group_size=group_size, method=method)
    errors = [float((one.dequantize() - source).square().sum()) for one in (packed, symmetric)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("row", [row.name for row in KERNELS if "cpu" in row.devices])
def test_cpu_kernels_multiply_or_say_why_not(
    kind: ZeroPointType, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = quantize_tensor(weight(64, 256), "int4", group_size=32, zero_point=kind.name)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    if kernel_named(row).rounds_x:
        rounding = activations_named("int8")
        asked = replace(packed.scheme, activations=rounding)
        assert kernel_named(row).why_unsupported(Problem.on(x.device, 3, 64, 256, asked, x.dtype)) == (
            kind.why_not_int8
        )
        if kind.why_not_int8 is None:
            assert rounding is not None
            y = linear_parts(x, packed.tensors, None, asked, 64, build_layout(packed, x.dtype, rounding))
            expected = rounding.round(x.double()).double() @ packed.dequantize().double().T
            assert (y.double() - expected).norm() / expected.norm() < 2e-2
        return
    problem = Problem.on(x.device, 3, 64, 256, packed.scheme, x.dtype)
    reason = kernel_named(row).why_unsupported(problem)
    monkeypatch.setenv(FORCE_VARIABLE, row)
    if reason is not None:
        assert row == "torch-int8" or reason == kind.why_not_int8
        with pytest.raises(KernelError, match=re.escape(reason)):
            linear(x, packed)
        return
    expected = x.double() @ packed.dequantize().double().T
    error = (linear(x, packed).double() - expected).norm() / expected.norm()
    assert error < 2e-2


def test_fused_kernels_refuse_by_the_reason_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ZERO_POINTS, BYTE.name, BYTE)
    for name in ("byte", "integer"):
        chosen = scheme("int4", group_size=128, zero_point=cast(ZeroPoint, name))
        problem = Problem(1, 4096, 4096, chosen, torch.bfloat16, "cuda", GPU_FEATURES)
        refused = {
            row.name for row in KERNELS if row.why_unsupported(problem) == REFUSED and "cuda" in row.devices
        }
        fused = {row.name for row in KERNELS if "cuda" in row.devices} - {"unpack"}
        assert refused == (fused if name == "byte" else set())
        if name == "byte":
            assert choose(problem).kernel.name == "unpack"


def test_a_model_is_quantized_loaded_cast_and_run(kind: ZeroPointType, tmp_path: Path) -> None:
    source, out = write(tmp_path), tmp_path / "out"
    options: dict[str, Any] = {"zero_point": kind.name, "group_size": 32}
    report = quantkit.quantize(source, out, format="int4", **options)
    assert report is not None
    assert check_tensors(source, out, format="int4", **options) > 0
    model = load(out, device="cpu", dtype=torch.float32)
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        logits = model(tokens).logits
        assert_equal(model.to(torch.float64).to(torch.float32)(tokens).logits, logits)
        dense = load(source, device="cpu", dtype=torch.float32)
        for name, module in packed_modules(model):
            dense.get_submodule(name).weight.data = module.dense_weights(torch.float32)["weight"]
        assert_close(logits, dense(tokens).logits, rtol=1e-4, atol=1e-4)
    zeros = {module.matrix.parts[2].dtype for _, module in packed_modules(model)}
    assert zeros == {STORED[kind.name]}


def test_options_take_it_and_name_it(kind: ZeroPointType) -> None:
    assert parse_zero_point(kind.name) == kind.name
    assert str(scheme("int4", zero_point=kind.name)) == f"int4 g128{kind.suffix} bfloat16"
    with pytest.raises(UsageError, match=f"known are none, integer, float, {kind.name}"):
        parse_zero_point("other")


def test_a_kind_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(FormatError, match="unknown zero-point 'byte'; known are none, integer, float"):
        scheme("int4", zero_point=_made_up("byte"))


def comparisons(source: str) -> list[str]:
    """Comparisons of a zero-point with the name of a kind, and look-ups of it in a literal."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = any(isinstance(side, ast.Constant) and side.value in ZERO_POINTS for side in sides)
        else:
            names = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict)
            sides = [node.slice] if isinstance(node, ast.Subscript) else []
        if names and any(ast.unparse(side).endswith("zero_point") for side in sides):
            found.append(ast.unparse(node))
    return found


def test_no_module_asks_which_kind_it_is() -> None:
    planted = 'a.zero_point != "none"; {"none": 0, "integer": 2}[b.zero_point]; c.zero_point is None'
    assert len(comparisons(planted)) == 2
    package = Path(quantkit.__file__).parent
    found = {
        str(path.relative_to(package)): comparisons(path.read_text("utf-8")) for path in package.rglob("*.py")
    }
    assert {name: all_ for name, all_ in found.items() if all_} == {}


@pytest.mark.parametrize("name", searched())
def test_help_and_pages_name_every_kind(name: str) -> None:
    assert name in (ROOT / "tests/golden/help.txt").read_text("utf-8")
    for page in ("cli.md", "format.md"):
        lines = [
            line for line in (ROOT / "docs" / page).read_text("utf-8").splitlines() if "zero" in line.lower()
        ]
        assert any(f"`{name}`" in line or f'"{name}"' in line for line in lines), page
