"""Weights that are hard to store: rows 39 to 48."""

import json
import os
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.calibrate.methods import METHODS, quantize_tensor
from quantkit.calibrate.parameters import TensorParameters
from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES
from quantkit.checkpoint.output.shard_file import ShardFile
from quantkit.checkpoint.safetensors_header import encode_header, read_header
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import CheckpointError, FormatError
from quantkit.kernels.linear import linear
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import scheme
from quantkit.packing.zero_points import ZeroPoint
from quantkit.quantization import stream
from quantkit.quantization.task import Task
from quantkit.runtime.replace import packed_modules

from ..conftest import Run
from ..support.compare import assert_close, assert_equal
from .faults import (
    QUICK,
    SOURCE,
    WEIGHTS,
    Message,
    check_message,
    edit_tensors,
    is_unfinished,
    refused,
)

MODULE = "model.layers.1.mlp.up_proj"
UP = f"{MODULE}.weight"
FORMATS = ("int4", "fp8", "nf4", "binary", "mxfp4", "nvfp4")


def stored(out: Path) -> torch.Tensor:
    """The up_proj [172, 64] that a packed checkpoint computes with."""
    return dict(packed_modules(quantkit.load(out, device="cpu")))[MODULE].packed.dequantize()


def change_up(source: Path, weight: torch.Tensor) -> None:
    edit_tensors(source / WEIGHTS, lambda tensors: tensors.update({UP: weight}))


@pytest.mark.fault(39)
@pytest.mark.parametrize(
    ("value", "found"),
    [(float("nan"), "2 NaN and 0 infinite weights"), (float("-inf"), "0 NaN and 2 infinite weights")],
)
@pytest.mark.parametrize(
    "options", [("-m", "rtn"), ("-m", "mse"), ("-f", "fp8", "-g", "tensor", "-m", "rtn")], ids=str
)
def test_weights_that_are_no_numbers(
    run: Run, source: Path, out: Path, value: float, found: str, options: tuple[str, ...]
) -> None:
    weight = load_file(source / WEIGHTS)[UP]
    weight[40, 3] = weight[41, 5] = value
    change_up(source, weight)
    done = run("quantize", source, out, *options)
    message = Message(
        f"'{UP}', rows 0 to 171", found, "a weight must be finite", "keep the layer dense with a rule"
    )
    check_message(done, FormatError, message)
    is_unfinished(out)
    kept = ("--overwrite", "--no-check", "--rule", f"{MODULE}=keep")
    assert run("quantize", source, out, *options, *kept).code == 0
    assert_equal(load_file(out / WEIGHTS)[UP].isfinite(), weight.isfinite())


@pytest.mark.fault(40)
@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_exactly_zero(run: Run, source: Path, out: Path, format: str) -> None:
    weight = load_file(source / WEIGHTS)[UP]
    weight[:5] = 0
    weight[7, :32] = 0
    change_up(source, weight)
    assert run("quantize", source, out, "-f", format, "-g", "32", *QUICK).code == 0
    found = stored(out)
    assert found.isfinite().all()
    assert (found[:5] == 0).all() and (found[7, :32] == 0).all()


@pytest.mark.fault(41)
def test_scales_do_not_overflow(run: Run, source: Path, out: Path) -> None:
    weight = load_file(source / WEIGHTS)[UP] * 1e9
    change_up(source, weight)
    assert run("quantize", source, out, *QUICK).code == 0
    found = stored(out)
    assert found.isfinite().all()
    assert (found - weight).norm() < 0.2 * weight.norm()


@pytest.mark.fault(41)
def test_a_scale_dtype_that_overflows_is_refused(run: Run, source: Path, out: Path) -> None:
    change_up(source, load_file(source / WEIGHTS)[UP] * 1e9)
    done = run("quantize", source, out, *QUICK, "--scale-dtype", "float16")
    message = Message(
        f"'{UP}'", "a scale of ", "overflows torch.float16", "store the scales in a dtype with more range"
    )
    check_message(done, FormatError, message)
    is_unfinished(out)


@pytest.mark.fault(42)
@pytest.mark.parametrize("factor", [1e-9, 1e-42])
@pytest.mark.parametrize("format", ["int4", "binary"])
def test_weights_below_the_scale_dtype_become_zero_and_that_is_said(
    run: Run, source: Path, out: Path, factor: float, format: str
) -> None:
    change_up(source, load_file(source / WEIGHTS)[UP] * factor)
    done = run("quantize", source, out, "-f", format, *QUICK, "--scale-dtype", "float16")
    assert done.code == 0
    assert "worst 1.00e+00 in " + MODULE in done.out
    assert (
        f"note: 1 linears lost more than half of their squared weights, such as {MODULE}: its weights are "
        "too small for the scale dtype, or the format is too coarse."
    ) in done.err
    assert (stored(out) == 0).all()


@pytest.mark.fault(43)
@pytest.mark.parametrize("format", FORMATS)
def test_constant_rows_and_outliers(run: Run, source: Path, out: Path, format: str) -> None:
    weight = load_file(source / WEIGHTS)[UP]
    weight[0], weight[1] = 0.37, -0.37
    weight[2, 5] = 1e4 * weight.abs().max()
    change_up(source, weight)
    done = run("quantize", source, out, "-f", format, "-g", "32", "--json", "--no-check")
    assert done.code == 0
    found = stored(out)
    assert found.isfinite().all()
    # Constant rows to the rounding of values and scale, and the outlier, which is nearly all of its row.
    assert_close(found[:2], weight[:2], rtol=0.26, atol=0)
    assert (found[2] - weight[2]).norm() < (0.26 if format != "binary" else 1) * weight[2].norm()
    error = json.loads(done.out)["layers"][MODULE]["relative_error"]
    actual = (found.double() - weight).square().sum() / weight.double().square().sum()
    assert error == pytest.approx(float(actual), rel=1e-3, abs=1e-9)


@pytest.mark.fault(44)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_negative_zeros_and_subnormals(run: Run, source: Path, out: Path, dtype: torch.dtype) -> None:
    """Copied bit for bit where they stay dense; packed, a zero is a zero and what is left is finite."""
    tiny = torch.finfo(dtype).tiny
    odd = torch.tensor([-0.0, 0.0, tiny / 2, -tiny / 4, tiny, -tiny]).to(dtype)
    norm = "model.norm.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        tensors[norm][: len(odd)] = odd
        tensors[UP][:4, : len(odd)] = odd
        tensors[UP][4] = -0.0

    edit_tensors(source / WEIGHTS, change)
    assert run("quantize", source, out, *QUICK).code == 0
    assert_equal(
        load_file(out / WEIGHTS)[norm].view(torch.uint8), load_file(source / WEIGHTS)[norm].view(torch.uint8)
    )
    found = stored(out)
    assert found.isfinite().all()
    assert (found[4] == 0).all() and (found[:4, :2] == 0).all()


@pytest.mark.fault(45)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (3, 37), (33, 31)], ids=str)
def test_matrices_of_any_size(name: str, shape: tuple[int, int]) -> None:
    """Nothing is cut off: as many weights come back, each near the one it was, and products agree."""
    weight = torch.randn(shape)
    packed = quantize_tensor(
        weight, scheme(name, group_size=32 if name[:2] not in ("mx", "nv") else None), method="rtn"
    )
    found = packed.dequantize()
    assert found.shape == weight.shape and found.isfinite().all()
    assert (found - weight).norm() <= (0.3 if packed.scheme.format.bits > 2 else 0.9) * weight.norm() + 1e-6
    x = torch.randn(3, shape[1])
    assert_close(linear(x, packed), x @ found.T, rtol=1e-4, atol=1e-4)


@pytest.mark.fault(45)
@pytest.mark.parametrize("size", ["100", "1048576"])
def test_groups_longer_than_rows_and_of_odd_sizes(run: Run, out: Path, size: str) -> None:
    assert run("quantize", SOURCE, out, "-g", size, *QUICK).code == 0
    assert run("verify", out, "--no-reload").code == 0
    assert stored(out).shape == (172, 64)


ROWS, COLUMNS = 262_176, 16_384  # A vocabulary of 256k, and its last 32 rows beyond 2**32 elements.


@pytest.mark.fault(46)
@pytest.mark.parametrize("zero_point", ["none", "integer"])
def test_elements_beyond_2_to_the_32_are_where_the_header_says(tmp_path: Path, zero_point: ZeroPoint) -> None:
    """The last rows of a matrix of 4.3 billion weights, in files with holes: 64 bits address every byte."""
    weight, start = torch.randn(32, COLUMNS).to(torch.bfloat16), ROWS - 32
    header = encode_header([TensorSpec("w", "BF16", (ROWS, COLUMNS))], {})
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write(header)
        file.seek(start * COLUMNS * 2, os.SEEK_CUR)
        file.write(weight.view(torch.uint8).numpy().tobytes())
    checkpoint = Checkpoint.of_files([tmp_path / WEIGHTS])
    assert_equal(checkpoint.read("w", start, ROWS), weight)

    chosen = scheme("int4", group_size=128, zero_point=zero_point, scale_dtype=torch.bfloat16)
    parts = tuple(
        (part, TensorSpec(part, SAFETENSORS_DTYPES[dtype], shape))
        for part, (dtype, shape) in chosen.storage_shapes((ROWS, COLUMNS)).items()
    )
    specs = tuple(spec for _, spec in parts)
    task = Task(checkpoint.tensors["w"], specs, "w", chosen, METHODS["rtn"], parts)
    cpu, fit = torch.device("cpu"), Future[TensorParameters]()
    fit.set_result(TensorParameters())
    chunks = stream._chunks(task, cpu)
    assert [0, *(stop for _, stop in chunks)] == [*(begin for begin, _ in chunks), ROWS]
    packed = ShardFile(tmp_path, "out.safetensors", specs, {})
    for begin in (0, start):
        stream._write_rows(checkpoint, task, packed, begin, begin + 32, fit, cpu)
    found = read_header(tmp_path / ".tmp-out.safetensors")
    with (tmp_path / ".tmp-out.safetensors").open("rb") as file:
        for part, tensor in quantize_tensor(weight, chosen, method="rtn").parts():
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            file.seek(found[part].offset + found[part].nbytes - len(data))
            assert file.read(len(data)) == data, part
    packed.discard()
    # Who copies it fills the disk.
    (tmp_path / WEIGHTS).unlink()


@pytest.mark.fault(47)
def test_weights_of_any_strides_and_owners() -> None:
    plain = torch.randn(40, 64)
    expected = quantize_tensor(plain, "int4").words
    strided = torch.randn(64, 80).T[::2].copy_(plain)
    parameter = torch.nn.Parameter(plain.clone())
    assert_equal(quantize_tensor(strided, "int4").words, expected)
    assert_equal(quantize_tensor(parameter, "int4").words, expected)
    assert parameter.requires_grad
    assert_equal(parameter.data, plain)
    expanded = plain[:1].expand(40, 64)
    assert_equal(quantize_tensor(expanded, "int4").words, quantize_tensor(expanded.clone(), "int4").words)


@pytest.mark.fault(47)
@pytest.mark.parametrize(
    ("weight", "found"),
    [
        (torch.empty(4, 4, device="meta"), "torch.float32 (4, 4) on meta"),
        (torch.ones(4, 4, dtype=torch.int32), "torch.int32 (4, 4) on cpu"),
        (torch.ones(4), "torch.float32 (4,) on cpu"),
        (torch.empty(0, 4), "torch.float32 (0, 4) on cpu"),
    ],
    ids=["meta", "integers", "a vector", "empty"],
)
def test_what_is_no_weight(weight: torch.Tensor, found: str) -> None:
    with pytest.raises(FormatError) as caught:
        quantize_tensor(weight)
    assert str(caught.value) == (
        f"the weight is {found}; expected a non-empty floating-point matrix [N, K] with data."
    )


@pytest.mark.fault(48)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sources_of_other_dtypes_are_cast_to_float32(
    run: Run, source: Path, out: Path, dtype: torch.dtype
) -> None:
    edit_tensors(
        source / WEIGHTS, lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items()})
    )
    weight = load_file(source / WEIGHTS)[UP]
    assert run("quantize", source, out, *QUICK).code == 0
    found = load_file(out / WEIGHTS)
    assert found["model.norm.weight"].dtype == dtype
    # The scale dtype follows the weights: float16 for float16, and bfloat16 for all others.
    scale = torch.float16 if dtype == torch.float16 else torch.bfloat16
    expected = quantize_tensor(weight.float(), "int4", method="rtn", scale_dtype=scale)
    parts = dict(expected.parts())
    assert found[f"{UP}_scale"].dtype == scale
    assert_equal(found[f"{UP}_scale"], parts["scale"])
    assert_equal(found[UP], parts["packed"])


@pytest.mark.fault(48)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_sources_that_are_codes_already(run: Run, source: Path, out: Path, dtype: torch.dtype) -> None:
    change_up(source, load_file(source / WEIGHTS)[UP].to(dtype))
    name = "F8_E4M3 and has no scales" if dtype == torch.float8_e4m3fn else "I8 [172, 64] alone"
    message = Message(f"'{UP}'", f"is {name}", "expected plain weights, or", "Start from the original")
    refused(run, ("quantize", source, out), CheckpointError, message, source.parent)
