"""Compiled blocks: the same numbers and gradients, the models as before at the end, a warning on failure."""

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from quantkit.checkpoint.manifest import read_manifest
from quantkit.quantization.distill import compiled_blocks, distill, training
from quantkit.quantization.distill.compiled_blocks import WORTH_STEPS, compiled, is_worth_compiling
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantizing import quantize

from ...tiny.calibrated import data, files_of, interrupted_at, write
from .test_distill import TINY

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.runs += 1
        return x + torch.relu(self.linear(x))


@pytest.fixture(autouse=True)
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as torch.compile does, but make no kernels."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled_blocks, "OPTIONS", None)


def gradients(blocks: list[Block], x: torch.Tensor) -> list[torch.Tensor]:
    out = x
    for block in blocks:
        out = block(out)
    return [out, *torch.autograd.grad(out.square().sum(), [one.linear.weight for one in blocks])]


@pytest.mark.parametrize("again", [False, True])
def test_compiled_blocks_give_the_same_and_are_as_before_at_the_end(again: bool) -> None:
    blocks, x = [Block() for _ in range(3)], torch.randn(5, 8)
    if again:
        for block in blocks:
            block.forward = partial(  # type: ignore[method-assign]
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
    expected, before = gradients(blocks, x), [vars(block).get("forward") for block in blocks]
    runs = [block.runs for block in blocks]
    with compiled(blocks, lambda: gradients(blocks, x)):
        found = gradients(blocks, x)
        assert [block.runs for block in blocks] == runs
    assert [vars(block).get("forward") for block in blocks] == before
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    gradients(blocks, x)
    assert all(block.runs > run for block, run in zip(blocks, runs, strict=True))


def test_where_compiling_fails_blocks_run_as_they_are_and_the_user_sees_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    block, x = Block(), torch.randn(5, 8)
    expected = gradients([block], x)

    def attempt() -> None:
        raise RuntimeError("no C compiler\nand a long trace")

    with caplog.at_level(logging.WARNING, "quantkit.model"), compiled([block], attempt):
        assert "forward" not in vars(block)
        assert all(map(torch.equal, gradients([block], x), expected))
    assert caplog.messages == [
        "steps run without torch.compile, and take up to twice as long: it failed on this model "
        "(RuntimeError: no C compiler). If a package or a C compiler is missing, install it."
    ]


def failing(message: str, kind: type[Exception]) -> Any:
    """Backend of torch.compile that compiles no backward pass."""

    def compiler(module: Any, inputs: Any) -> Any:
        raise kind(message)

    return aot_autograd(fw_compiler=lambda module, inputs: module.forward, bw_compiler=compiler)


def test_the_reason_is_that_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_blocks, "BACKEND", failing("no gcc", ValueError))
    block, x = Block(), torch.randn(5, 8)
    with caplog.at_level(logging.WARNING), compiled([block], lambda: gradients([block], x)) as is_compiled:
        assert not is_compiled
    assert "it failed on this model (ValueError: no gcc)" in caplog.text


def test_torch_without_compile_is_a_failure_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch.compile is not supported on this Python")

    monkeypatch.setattr(torch, "compile", refuse)
    with compiled([Block()], lambda: None) as is_compiled:
        assert not is_compiled
    assert "not supported on this Python" in caplog.text


@pytest.mark.parametrize("by_compiler", [False, True])
def test_lack_of_memory_is_not_taken_for_a_failure_to_compile(
    by_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, x = Block(), torch.randn(5, 8)
    if by_compiler:
        monkeypatch.setattr(compiled_blocks, "BACKEND", failing("full", torch.OutOfMemoryError))

    def attempt() -> None:
        if not by_compiler:
            raise torch.OutOfMemoryError("full")
        gradients([block], x)

    with pytest.raises(torch.OutOfMemoryError), compiled([block], attempt):
        pass
    assert "forward" not in vars(block)


def test_blocks_with_experts_or_convolutions_run_as_they_are() -> None:
    blocks = [Block(), Block(), Block()]
    blocks[0].experts = nn.Parameter(torch.zeros(2, 8, 8))
    blocks[1].convolution = nn.Conv1d(8, 8, 4, groups=8)
    with compiled(blocks, lambda: None):
        assert ["forward" in vars(block) for block in blocks] == [False, False, True]


def test_without_a_block_to_compile_nothing_is_tried() -> None:
    block = Block()
    block.experts = nn.Parameter(torch.zeros(2, 8, 8))
    with compiled([block], lambda: pytest.fail("tried")) as is_compiled:
        assert is_compiled is False


def test_each_block_may_have_variants_of_its_own() -> None:
    class Scaled(Block):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.factor * super().forward(x)

    x = torch.randn(5, 8)
    # What one training compiles does not count against those after it.
    for training_number in range(2):
        blocks = [Scaled(1 + training_number + number / 7) for number in range(9)]
        with compiled(blocks, lambda blocks=blocks: gradients(blocks, x)):
            runs = [block.runs for block in blocks]
            gradients(blocks, x)
            assert [block.runs for block in blocks] == runs
    alone = Scaled(100.0)
    torch.compile(alone.forward, backend="aot_eager")(x)
    assert alone.runs == 0


def test_shapes_that_come_later_run_as_they_are() -> None:
    block = Block()
    with compiled([block], lambda: gradients([block], torch.randn(5, 8))):
        runs = block.runs
        gradients([block], torch.randn(5, 8))
        assert block.runs == runs
        gradients([block], torch.randn(6, 8))
        assert block.runs == runs + 1


def test_compiling_pays_on_gpus_for_many_steps() -> None:
    assert is_worth_compiling(GPU, None) and is_worth_compiling(GPU, WORTH_STEPS)
    assert not is_worth_compiling(GPU, WORTH_STEPS - 1) and not is_worth_compiling(CPU, None)


def test_a_compiled_training_lowers_the_loss_and_resumes_to_the_same_bits(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training, "is_worth_compiling", lambda device, steps: True)
    monkeypatch.setattr(distill, "STATE_SECONDS", 0.0)
    source = write(tmp_path, "llama", num_hidden_layers=2)
    options = {**TINY, "calibration": data(text), "distillation": DistillOptions(8, batch=4, code_rate=2e-2)}
    calls: list[str] = []
    quantize(source, tmp_path / "whole", progress=lambda done, total, text: calls.append(text), **options)
    facts = read_manifest(tmp_path / "whole")["distillation"]
    assert facts["kl_after"] < 0.97 * facts["kl_before"]
    stop = next(i for i, text in enumerate(calls) if text.startswith("step 4 of 8"))
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out", progress=interrupted_at(stop + 1), **options)
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    quantize(source, tmp_path / "out", resume=True, **options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert facts["settings"]["compiled"] is True and "torch.compile" not in caplog.text
    # A compiler that is gone since.
    monkeypatch.setattr(training, "is_worth_compiling", lambda device, steps: False)
    quantize(source, tmp_path / "other", resume=True, **options)
    assert "before the interruption ran with torch.compile, those to come run without" in caplog.text
    assert read_manifest(tmp_path / "other")["distillation"]["settings"]["compiled"] is False


def test_a_failed_attempt_leaves_no_gradients(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, "llama", num_hidden_layers=2)
    # The first step of Adam does not depend on the size of a gradient.
    options = {**TINY, "calibration": data(text), "distillation": DistillOptions(3, batch=4)}
    quantize(source, tmp_path / "plain", **options)
    monkeypatch.setattr(training, "is_worth_compiling", lambda device, steps: True)
    monkeypatch.setattr(compiled_blocks, "BACKEND", failing("no gcc", ValueError))
    quantize(source, tmp_path / "failed", **options)
    assert files_of(tmp_path / "failed") == files_of(tmp_path / "plain")
