"""Sensitivities: what a slow twin finds with the whole model in memory, and what models really lose."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.hessian import Hessian
from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import METHODS, quantize_tensor
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import FormatError
from quantkit.model.blocks import Decoder
from quantkit.model.forward.trees import hidden_in
from quantkit.model.hidden_states import Home
from quantkit.model.prefixes import read_names
from quantkit.packing.schemes import Scheme, scheme
from quantkit.quantization.allocate import sensitivity, trials
from quantkit.quantization.allocate.sensitivity import measure
from quantkit.quantization.blockwise.calibration_data import read_samples

from ...support.compare import assert_close
from ...tiny.calibrated import LINEARS, write

STORIES = Path(__file__).parents[3] / "examples" / "stories260K"
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def decoder_of(source: Path) -> Decoder:
    return Decoder(Checkpoint.open(source), CPU, torch.float32)


def model_of(source: Path) -> Any:
    (name,) = json.loads((source / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(source, dtype=torch.float32).eval()


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """An encoder-decoder has the same tokens for both."""
    decoded = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    logits: torch.Tensor = model(input_ids=tokens, **decoded).logits
    return logits


def schemes_of(decoder: Decoder, row: Sequence[Scheme]) -> dict[str, Sequence[Scheme]]:
    return {f"{block}.{name}": row for block in decoder.block_names for name in LINEARS}


@pytest.mark.parametrize("family", ["llama", "tied", "qwen3", "gemma2"])
def test_the_head_is_that_of_the_model(tmp_path: Path, family: str) -> None:
    source = write(tmp_path, family)
    decoder, model = decoder_of(source), model_of(source)
    tokens = torch.randint(0, 96, (2, 9))
    outputs = {}
    with torch.no_grad():
        with decoder.passes() as start:
            one = start(tokens, Home(CPU))
            while one.block != decoder.head_name:
                block = decoder.block(one.block)
                with decoder.loaded(block):
                    outputs[block.name] = block.run(one.call)
                one.advance(outputs[block.name])
        with decoder.head(outputs) as logits:
            found = logits(hidden_in(outputs[block.name]), tokens.shape)
        assert_close(found, model(tokens).logits)
    assert all(parameter.is_meta for parameter in decoder._model.parameters())
    assert list(outputs) == list(decoder.block_names)


def drawn(model: Any, batch: torch.Tensor, at: int) -> torch.Tensor:
    """The sum of the log probabilities of tokens that the model draws after each of a micro-batch."""
    generator = torch.Generator().manual_seed(at)
    found = torch.zeros(())
    for token in logits_of(model, batch).log_softmax(-1).flatten(0, 1):
        bounds = token.detach().exp().cumsum(-1)
        found = found + token[int((bounds < torch.rand(1, generator=generator) * bounds[-1]).sum())]
    return found


def twin_losses(
    weight: torch.Tensor,
    row: Sequence[Scheme],
    method: str,
    stats: LinearStats | None,
    second: torch.Tensor,
    importance: torch.Tensor,
) -> list[float]:
    """The loss of a weight in each scheme, each quantized alone; only the first has evenly spaced values.

    `gptq` rounds that one, and its ratio to rounding to nearest with the same scales counts for all. `second`
    is the Hessian of the gradients' inputs, float64 [K, K], `importance` float64 [N] that of the outputs.
    """

    def lost(stored: torch.Tensor) -> float:
        error = (weight - stored).double()
        return float(sum(0.5 * f * (e @ second @ e) for f, e in zip(importance, error, strict=True)))

    schemes = [one.for_columns(weight.shape[1]) for one in row]
    if stats is None:
        return [
            lost(quantize_tensor(weight, one, method=method).dequantize(torch.float32)) for one in schemes
        ]
    assert method == "gptq"
    nearest = [lost(trials.stored(weight, one, METHODS["imatrix"], stats)) for one in schemes]
    ratio = lost(trials.stored(weight, schemes[0], METHODS[method], stats)) / nearest[0]
    return [ratio * one for one in nearest]


@pytest.mark.parametrize(
    ("family", "method", "rounded"),
    [
        *(("llama", "mse", None), ("tied", "gptq", None), ("gemma2", "rtn", None)),
        # What blocks leave for others, take from others and return beside hidden states has gradients too.
        *((family, "rtn", None) for family in ("gemma4", "falcon_h1", "gpt2", "t5")),
        *(("llama", "mse", rounded) for rounded in ("int4", "fp8-static", "int8-static")),
    ],
)
def test_measured_is_what_a_twin_with_the_whole_model_in_memory_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, method: str, rounded: str | None
) -> None:
    monkeypatch.setattr(sensitivity, "CALIBRATED_ROWS", 256)
    source = write(tmp_path, family)
    decoder, model = decoder_of(source), model_of(source)
    tokens = torch.randint(0, 96, (8, 12))
    row = (
        scheme("int3", group_size=32),
        scheme("fp4"),
        *(scheme(name, activations=rounded) for name in ("int3", "int8") if rounded),
    )
    _, structure = read_names(Checkpoint.open(source))
    names = [name for name, linear in structure.linears.items() if linear.kind == "linear"]
    found = measure(decoder, dict.fromkeys(names, row), METHODS[method], tokens, 2).losses

    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    slopes: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    outputs: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            inputs[name].append(given[0].detach().flatten(0, 1))
            seen[name], outputs[name] = given[0], output

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    for at, batch in enumerate(tokens.split(4)):
        gradients = torch.autograd.grad(drawn(model, batch, at), [outputs[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            slopes[name].append(gradient.flatten(0, 1))
    for hook in hooks:
        hook.remove()
    for name in names:
        x, g = torch.cat(inputs[name]).double(), torch.cat(slopes[name]).double()
        # q, k and v, and gate and up, weigh the tokens of their one input together, in a block.
        (block,) = (one for one in decoder.block_names if f"{name}.".startswith(f"{one}."))
        beside = [other for other in names if seen[other] is seen[name] and other.startswith(block)]
        sizes = sum(torch.cat(slopes[other]).double().square().sum(-1) for other in beside)
        second = sum(w * torch.outer(v, v) for w, v in zip(sizes, x, strict=True)) / sizes.sum()
        importance = g.square().mean(0)
        weight = model.get_submodule(name).weight.detach()
        weight = weight.T.contiguous() if structure.linears[name].transposed else weight
        given = None
        if METHODS[method].needs_data:
            hessian = Hessian((x.T @ x / len(x)).float(), len(x))
            given = LinearStats.prepare(hessian, METHODS[method].needs)
        losses = twin_losses(weight, row, method, given, second, importance)
        for loss, of_weights, one in zip(found[name], losses, row, strict=True):
            of_inputs = 0.0
            if (inputs_as := one.activations) is not None:
                bound = inputs_as.fit(float(x.abs().max())) if inputs_as.static else inputs_as
                off = (x - bound.round(x.float())) @ weight.double().T
                of_inputs = float(0.5 * (g * off).sum(-1).square().mean())
            assert loss == pytest.approx(of_weights + of_inputs, rel=2e-2 if given else 1e-4)


def test_a_sample_of_rows_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(STORIES)
    wanted = schemes_of(decoder, (scheme("int4"),))
    tokens = torch.randint(0, 500, (8, 16))
    every = measure(decoder, wanted, METHODS["mse"], tokens, 2).losses
    monkeypatch.setattr(sensitivity, "ROWS", 20)
    some = measure(decoder, wanted, METHODS["mse"], tokens, 2).losses
    ratios = torch.tensor([some[name][0] / every[name][0] for name in wanted])
    assert float((ratios - 1).abs().median()) < 0.25
    assert float(ratios.mean()) == pytest.approx(1, abs=0.15)


def test_workers_change_nothing() -> None:
    decoder = decoder_of(STORIES)
    wanted = schemes_of(decoder, (scheme("int4"), scheme("nvfp4")))
    tokens = torch.randint(0, 500, (12, 16))
    found = [measure(decoder, wanted, METHODS["imatrix"], tokens, lanes) for lanes in (1, 3)]
    assert found[0] == found[1]


@pytest.mark.parametrize("made", [scheme("int4"), scheme("int8", activations="int4")], ids=str)
def test_it_tells_what_a_model_loses(made: Scheme) -> None:
    """The divergence of a real model with one linear rounded, for linears that differ ten times."""
    decoder, model = decoder_of(STORIES), model_of(STORIES)
    options = CalibrationOptions(str(STORIES.parent / "stories.txt"), samples=16, length=32)
    tokens = read_samples(Checkpoint.open(STORIES), options, 512).tokens
    wanted = schemes_of(decoder, (made,))
    found = measure(decoder, wanted, METHODS["mse"], tokens, 2).losses
    rounds = made.activations
    ratios = []
    with torch.no_grad():
        exact = model(tokens).logits.double().log_softmax(-1)
        for name in wanted:
            module = model.get_submodule(name)
            kept = module.weight.data
            module.weight.data = quantize_tensor(kept, made).dequantize(torch.float32)
            hook = module.register_forward_pre_hook(lambda _, x: x if rounds is None else rounds.round(x[0]))
            moved = model(tokens).logits.double().log_softmax(-1)
            hook.remove()
            module.weight.data = kept
            ratios.append(math.log(found[name][0] / float((exact.exp() * (exact - moved)).sum(-1).mean())))
    assert abs(sum(ratios) / len(ratios)) < 0.2
    assert torch.tensor(ratios).std() < 0.35
    values = [loss for (loss,) in found.values()]
    assert max(values) > 10 * min(values)


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = write(tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = math.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    decoder = decoder_of(source)
    with pytest.raises(
        FormatError, match=r"model\.layers\.2\.self_attn\.q_proj: \d+ NaN and 0 infinite inputs"
    ):
        measure(
            decoder, schemes_of(decoder, (scheme("int4"),)), METHODS["mse"], torch.randint(0, 96, (2, 8)), 1
        )


def test_progress_ends_at_its_total() -> None:
    decoder = decoder_of(STORIES)
    steps: list[tuple[int, int]] = []
    wanted = schemes_of(decoder, (scheme("int4"), scheme("int8")))
    tokens = torch.randint(0, 500, (6, 8))
    measure(decoder, wanted, METHODS["rtn"], tokens, 2, lambda done, total, _: steps.append((done, total)))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert {total for _, total in steps} == {steps[-1][0]}
