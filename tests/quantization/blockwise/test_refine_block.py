"""Learned rounding: what a plain autograd loop learns, never worse than its start, whatever else happens."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quantkit.calibrate.learned.signround import Offsets
from quantkit.calibrate.methods import METHODS, quantize_tensor
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.errors import CheckpointError, FormatError
from quantkit.model.blocks import Block
from quantkit.model.distributed import Ranks
from quantkit.model.forward.model_pass import Call
from quantkit.packing.tensor import PackedTensor
from quantkit.quantization.blockwise import calibration, pipeline, refine_block
from quantkit.quantization.blockwise.layer_quantizer import Solver
from quantkit.quantization.blockwise.refine_block import Learned, learn_rounding
from quantkit.quantizing import quantize
from quantkit.verification.verify import verify

from ...support.compare import assert_equal
from ...support.processes import ended
from ...tiny.calibrated import data, files_of, interrupted_at, write

#: Ends of codes and zero-points of all kinds, a ragged last group, a step of two, and a factor of all scales.
SCHEMES: list[dict[str, Any]] = [
    {"format": "int4", "group_size": 16},
    {"format": "int3", "group_size": 16, "zero_point": "integer"},
    {"format": "int2", "group_size": 8, "zero_point": "float"},
    {"format": "int2", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
    {"format": "ternary", "packing": "radix"},
    {"format": "binary", "group_size": 16},
]


class Gated(torch.nn.Module):
    """Two linears of one input that are multiplied, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(20, 24, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(24, 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def problem(options: dict[str, Any]) -> tuple[Gated, dict[str, tuple[torch.Tensor, PackedTensor]], Any, Any]:
    """A block, its linears as they are and rounded, and its inputs and targets."""
    module = Gated()
    linears = {}
    for name in ("gate", "up", "down"):
        weight = module.get_submodule(name).weight.detach().clone()
        packed = quantize_tensor(weight, method="mse", **options)
        # As after rounding with compensation, some codes are not the nearest ones.
        moved = quantize_tensor(packed.dequantize() + 0.3 * weight.roll(1, 0), packed.scheme, method="mse")
        parts = {**dict(packed.parts()), "packed": moved.words}
        linears[name] = weight, PackedTensor.from_parts(parts, packed.scheme, packed.shape)
    inputs = [torch.randn(2, 7, 20) for _ in range(5)]
    with torch.no_grad():
        targets = [module(x) for x in inputs]
    return module, linears, inputs, targets


class Waiting:
    """A pass that waits before the block with these hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    @contextmanager
    def loaded(self) -> Iterator[Call]:
        yield Call((self.hidden,), {})


def learned(module: Gated, linears: Any, inputs: Any, targets: Any, workers: int = 2) -> Learned:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    with ThreadPoolExecutor(workers) as pool:
        solver = Solver(lambda name: torch.empty(0), torch.device("cpu"), pool, workers, Ranks())
        offsets = {name: Offsets(weight, packed) for name, (weight, packed) in linears.items()}
        passes: Any = [Waiting(one) for one in inputs]
        return learn_rounding(
            Block("block", module), offsets, passes, targets, solver, "seed", lambda _: None
        )


class Through(torch.autograd.Function):
    """Rounding to the nearest of some values, whose gradient is passed through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        at = (x[..., None] - values).abs().argmin(-1, keepdim=True)
        return values.expand(*x.shape, -1).gather(-1, at)[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


@pytest.mark.parametrize("options", SCHEMES, ids=str)
def test_codes_are_those_of_a_plain_autograd_loop(monkeypatch, options):
    monkeypatch.setattr(refine_block, "STEPS", 12)
    monkeypatch.setattr(refine_block, "CHECK_EVERY", 1)
    module, linears, inputs, targets = problem(options)
    found = learned(module, linears, inputs, targets)
    parameters, state = [], {}
    for name, (weight, packed) in linears.items():
        format_, columns = packed.scheme.format, packed.shape[1]
        size = packed.scheme.group_columns(columns)
        scale = packed.group_scale().repeat_interleave(size, 1)[:, :columns].double()
        values = torch.tensor(format_.numbers).double().expand(*packed.shape, -1)
        zero = packed.zero_points()
        if zero is not None:
            lowest = -zero.double().repeat_interleave(size, 1)[:, :columns]
            values = lowest[..., None] + torch.arange(2**format_.bits)
        value = packed.dequantize() / scale
        step = format_.numbers[1] - format_.numbers[0]
        anchor = value + ((weight / scale - value) / 2).clamp(-0.4995 * step, 0.4995 * step)
        offset = torch.zeros_like(anchor, requires_grad=True)
        parameters.append(offset)
        state[name] = (anchor, offset, step, values, scale)

    def weights() -> dict[str, torch.Tensor]:
        return {
            f"{name}.weight": (Through.apply(anchor + step * offset, values) * scale).float()
            for name, (anchor, offset, step, values, scale) in state.items()
        }

    def error(lanes: Any) -> torch.Tensor:
        outputs = {at: torch.func.functional_call(module, weights(), (inputs[at],)) for at in lanes}
        return sum((outputs[at] - targets[at]).square().sum() for at in lanes)

    energy = sum(target.square().sum() for target in targets)
    errors = [float((error(range(5)) / energy).detach())]
    kept = [weights()]
    for at, drawn in enumerate(refine_block._draws("seed", 5)):
        assert len(drawn) == 2 and drawn == sorted(set(drawn))
        gradients = torch.autograd.grad(error(drawn), parameters)
        with torch.no_grad():
            for offset, gradient in zip(parameters, gradients, strict=True):
                offset.sub_(gradient.sign() * (12 - at) / 144).clamp_(-0.5, 0.5)
        errors.append(float((error(range(5)) / energy).detach()))
        kept.append(weights())
    assert found.error_before == pytest.approx(errors[0], rel=1e-4)
    assert found.error == pytest.approx(min(errors), rel=2e-3) and found.error < 0.95 * found.error_before
    best = kept[errors.index(min(errors))]
    same = [
        torch.isclose(best[f"{name}.weight"].detach(), packed.dequantize(), atol=1e-6).double().mean()
        for name, packed in found.packed.items()
    ]
    assert min(same) > 0.99


def test_every_micro_batch_is_seen_as_often():
    drawn = list(itertools.chain.from_iterable(refine_block._draws("any", 10)))
    assert {drawn.count(at) for at in range(10)} == {len(drawn) // 10}
    assert list(refine_block._draws("any", 1)) == [[0]] * refine_block.STEPS
    assert list(refine_block._draws("any", 10)) != list(refine_block._draws("other", 10))


@pytest.mark.parametrize("options", SCHEMES, ids=str)
def test_without_a_step_codes_are_those_there_were(options):
    _, linears, _, _ = problem(options)
    for weight, packed in linears.values():
        offsets = Offsets(weight, packed)
        assert_equal(offsets.packed().words, packed.words)
        assert_equal(offsets.values(), packed.dequantize())


def test_what_only_gets_worse_is_not_kept(monkeypatch):
    module, linears, inputs, targets = problem({"format": "int4", "group_size": 16})
    descend = Offsets.descend
    monkeypatch.setattr(Offsets, "descend", lambda self, gradient, rate: descend(self, -gradient, 10 * rate))
    found = learned(module, linears, inputs, targets)
    assert found.error == found.error_before
    for name, (_, packed) in linears.items():
        assert found.packed[name] is packed
        assert_equal(module.get_submodule(name).weight, packed.dequantize())


OPTIONS: dict[str, Any] = {
    "format": "int2",
    "group_size": 32,
    "method": "signround",
    "rules": ("*.layers.0.mlp.up_proj=int8::mse", "*.layers.1.self_attn.*=book4::best"),
}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine_block, "STEPS", 6)
    monkeypatch.setattr(refine_block, "CHECK_EVERY", 3)


def test_blocks_come_closer_to_the_original_and_the_manifest_says_so(tmp_path, text):
    source = write(tmp_path, num_hidden_layers=2)
    result = quantize(source, tmp_path / "out", calibration=data(text), **OPTIONS)
    assert not any(check.problems for check in verify(tmp_path / "out", reload=False))
    layers = read_manifest(tmp_path / "out")["layers"]
    methods = {name: layer["method"] for name, layer in layers.items() if layer["method"]}
    for name, method in methods.items():
        measured = result.measured[name]
        assert measured.note is None
        assert (measured.block_error is not None) == (method == "signround")
        assert (measured.output_error is not None) == (method != "mse")
        if measured.block_error is not None:
            before, after = measured.block_error
            assert layers[name]["block_error"] == [before, after] and measured.damping == 0.01
            assert 0 < after <= before
    manifest = read_manifest(tmp_path / "out")
    for wrong in ([0.1], [0.1, -1.0], ["a", 0.1]):
        manifest["layers"]["model.layers.0.mlp.down_proj"]["block_error"] = wrong
        with pytest.raises(CheckpointError, match=r"block_error of 'model\.layers\.0\..* not two errors"):
            ModelRecord.from_manifest(manifest)
    # What the inputs of the first block have in common is all that its tiny linears need to be right for.
    before, after = result.measured["model.layers.1.mlp.up_proj"].block_error or (0, 0)
    assert after < 0.95 * before


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, backward passes start threads that no fork survives"
)
def test_ranks_write_the_bytes_of_one_process(tmp_path, text, few_steps):
    source = write(tmp_path, num_hidden_layers=2)
    options = {"calibration": data(text, samples=5), **OPTIONS}
    one = quantize(source, tmp_path / "one", **options)

    def run(rank: int) -> None:
        assert quantize(source, tmp_path / "two", **options).measured == one.measured

    found = ended(run, tmp_path)
    assert [code for code, _, _ in found] == [0, 0], found
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


def test_nothing_depends_on_workers_or_memory(tmp_path, text, monkeypatch, few_steps):
    source = write(tmp_path, num_hidden_layers=2)
    options = {"calibration": data(text, samples=5), **OPTIONS}
    quantize(source, tmp_path / "one", **options)
    monkeypatch.setattr(calibration, "cpu_workers", lambda: 5)
    monkeypatch.setitem(pipeline.SUSPENDED_MEMORY, "cpu", 0.0)
    quantize(source, tmp_path / "two", **options)
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["stored", "replayed"])
@pytest.mark.sampled(3)
def test_interrupted_anywhere_and_resumed_it_is_the_same_directory(
    tmp_path, text, monkeypatch, few_steps, seconds
):
    monkeypatch.setattr(pipeline, "HIDDEN_SECONDS", seconds)
    source = write(tmp_path, num_hidden_layers=2)
    options = {"calibration": data(text), **OPTIONS}
    names: list[str] = []
    quantize(source, tmp_path / "whole", progress=lambda done, total, name: names.append(name), **options)
    expected = files_of(tmp_path / "whole")
    steps = [at for at, name in enumerate(names, 1) if "of learned rounding" in name]
    assert names[steps[0] - 1] == "model.layers.0, step 1 of 6 of learned rounding" and len(steps) == 12
    for stop in (steps[2], steps[8]):
        out = tmp_path / f"out{stop}"
        with pytest.raises(KeyboardInterrupt):
            quantize(source, out, progress=interrupted_at(stop), **options)
        quantize(source, out, resume=True, **options)
        assert files_of(out) == expected


def test_experts_and_a_head_are_not_learned_and_that_is_said(tmp_path, text, few_steps):
    source = write(tmp_path, "mixtral", num_hidden_layers=1)
    result = quantize(source, tmp_path / "out", method="signround", calibration=data(text), lm_head="int4:32")
    noted = {name.rpartition(".")[2]: one.note or "" for name, one in result.measured.items()}
    assert {name for name, note in noted.items() if "rounding is not learned" in note} == {
        *("gate_up_proj", "down_proj", "lm_head")
    }
    learned = {name.rpartition(".")[2] for name, one in result.measured.items() if one.block_error}
    assert learned == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("format", ["nf4", "fp6", "mxfp4", "book4"])
def test_formats_of_uneven_steps_are_refused(tmp_path, text, format):
    able = ", ".join(name for name in METHODS if name != "signround")
    with pytest.raises(FormatError, match=rf"'signround'.* steps of unequal size.* take one of {able}"):
        quantize(write(tmp_path), tmp_path / "out", method="signround", format=format, calibration=data(text))
    assert not (tmp_path / "out").exists()
