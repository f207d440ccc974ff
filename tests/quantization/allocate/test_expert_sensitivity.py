"""Sensitivities of experts: what a loop over experts in the whole model finds, and what models lose."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quantkit.calibrate.hessian import Hessian
from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import METHODS, quantize_tensor
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.blocks import Decoder
from quantkit.model.structure import read_structure
from quantkit.packing.schemes import Scheme, scheme
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.allocate import sensitivity
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget
from quantkit.quantization.allocate.fisher import ExpertCall
from quantkit.quantization.allocate.sensitivity import Sensitivities, measure
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize
from quantkit.runtime.load import load
from quantkit.verification.verify import verify

from ...tiny.calibrated import data, tokens_of, write
from ..blockwise.test_moe_calibration import MIXTURES, calls_of, without_expert_3
from .test_sensitivity import drawn, twin_losses

LEAVES = ("gate_up_proj", "down_proj")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One thread, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def measured(source: Path, row: tuple[Scheme, ...], tokens: torch.Tensor, **options: Any) -> Sensitivities:
    """Of the experts of all layers."""
    checkpoint = Checkpoint.open(source)
    linears = read_structure(checkpoint).linears
    schemes = {name: row for name, linear in linears.items() if linear.kind == "experts"}
    method, lanes = METHODS[options.get("method", "mse")], options.get("lanes", 2)
    return measure(Decoder(checkpoint, torch.device("cpu"), torch.float32), schemes, method, tokens, lanes)


def model_of(source: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def looped(model: Any) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The model's experts run one after the other; the inputs and outputs of each matrix [E] by name."""
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def replace(name: str, experts: Any) -> None:
        def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            y = torch.zeros_like(x)
            for leaf in LEAVES:
                found[f"{name}.{leaf}"] = []
            for expert in range(len(experts.down_proj)):
                tokens = (chosen == expert).any(1)
                halves = x[tokens] @ experts.gate_up_proj[expert].T
                gate, up = halves.chunk(2, -1)
                middle = experts.act_fn(gate) * up
                out = middle @ experts.down_proj[expert].T
                found[f"{name}.gate_up_proj"].append((x[tokens], halves))
                found[f"{name}.down_proj"].append((middle, out))
                mine = torch.where(chosen == expert, weights, 0).sum(1)[tokens]
                y = y.index_add(0, tokens.nonzero()[:, 0], out * mine[:, None])
            return y

        experts.forward = forward

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            replace(name, module)
    return found


@pytest.mark.parametrize(
    ("family", "method", "rounded"),
    [
        ("mixtral", "mse", None),
        ("qwen2_moe", "gptq", None),
        ("qwen3_moe", "rtn", None),
        ("mixtral", "rtn", "int4"),
        ("qwen3_moe", "rtn", "int8-static"),
    ],
)
def test_measured_is_what_a_loop_over_the_experts_of_the_whole_model_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, method: str, rounded: str | None
) -> None:
    monkeypatch.setattr(sensitivity, "EXPERT_ROWS", 256)
    source = write(tmp_path, family, num_hidden_layers=2)
    tokens = torch.randint(0, 96, (8, 12))
    row = (scheme("int3", group_size=32, activations=rounded), scheme("fp4"))
    found = measured(source, row, tokens, method=method)
    model = model_of(source)
    seen = looped(model)
    inputs: dict[str, list[list[torch.Tensor]]] = {}
    slopes: dict[str, list[list[torch.Tensor]]] = {}
    for at, batch in enumerate(tokens.split(4)):
        score = drawn(model, batch, at)
        for name, pairs in seen.items():
            gradients = torch.autograd.grad(score, [out for _, out in pairs], retain_graph=True)
            inputs.setdefault(name, []).append([x.detach() for x, _ in pairs])
            slopes.setdefault(name, []).append(list(gradients))
    assert set(found.losses) == set(seen)
    for name in seen:
        owner, _, leaf = name.rpartition(".")
        experts = model.get_submodule(owner)
        expected = [0.0, 0.0]
        every = torch.cat([one for batch in inputs[f"{owner}.gate_up_proj"] for one in batch]).unique(dim=0)
        for expert, weight in enumerate(getattr(experts, leaf).detach()):
            x = torch.cat([batch[expert] for batch in inputs[name]]).double()
            g = torch.cat([batch[expert] for batch in slopes[name]]).double()
            assert len(x) == found.expert_tokens[owner][expert]
            sizes = g.square().sum(-1)
            second = (sizes[:, None] * x).T @ x / sizes.sum()
            importance = g.square().sum(0) / tokens.numel()
            given = None
            if METHODS[method].needs_data:
                gate, up = (every @ experts.gate_up_proj[expert].detach().T).chunk(2, -1)
                seen_by_all = (every if leaf == "gate_up_proj" else experts.act_fn(gate) * up).double()
                own, prior = len(x), 2 * x.shape[1]
                mixed = x.T @ x + prior * seen_by_all.T @ seen_by_all / len(seen_by_all)
                given = LinearStats.prepare(
                    Hessian((mixed / (own + prior)).float().detach(), own), METHODS[method].needs
                )
            losses = twin_losses(weight, row, method, given, second, importance)
            for at, one in enumerate(row):
                expected[at] += losses[at]
                if (inputs_as := one.activations) is not None:
                    # A static scale is that of gate and up of all experts of the layer, or of down.
                    layer = [one for batch in inputs[name] for one in batch if len(one)]
                    largest = float((every if leaf == "gate_up_proj" else torch.cat(layer)).abs().max())
                    bound = inputs_as.fit(largest) if inputs_as.static else inputs_as
                    off = (x - bound.round(x.float())) @ weight.double().T
                    expected[at] += float(0.5 * (g * off).sum(-1).square().sum() / tokens.numel())
        assert found.losses[name] == pytest.approx(expected, rel=3e-2 if METHODS[method].needs_data else 1e-4)


@pytest.mark.parametrize("family", MIXTURES)
def test_it_tells_what_a_model_loses(tmp_path: Path, family: str) -> None:
    """The divergence of a model with the experts of a layer rounded alone, gate and up or down, where they
    make no later router choose otherwise.
    """
    source = write(tmp_path, family, num_hidden_layers=2)
    tokens = torch.randint(0, 96, (96, 16), generator=torch.Generator().manual_seed(0))
    four = scheme("int4", group_size=32)
    found, model = measured(source, (four,), tokens), model_of(source)
    choices = [chosen.sort(-1).values for _, chosen in calls_of(model, tokens)]
    with torch.no_grad():
        exact = model(tokens).logits.double().log_softmax(-1).flatten(0, 1)
        for name, (loss,) in found.losses.items():
            fused = model.get_parameter(name)
            kept = fused.data.clone()
            for matrix in fused.data:
                matrix.copy_(quantize_tensor(matrix, four).dequantize(torch.float32))
            moved = model(tokens).logits.double().log_softmax(-1).flatten(0, 1)
            last = calls_of(model, tokens)[-1][1].sort(-1).values
            fused.data = kept
            same = (last == choices[-1]).all(-1)
            assert same.double().mean() > 0.98
            lost = (exact.exp() * (exact - moved)).sum(-1)[same].mean()
            assert abs(math.log(loss / float(lost))) < math.log(1.3), name


def test_workers_change_nothing(tmp_path: Path) -> None:
    source = write(tmp_path, "qwen3_moe")
    tokens = torch.randint(0, 96, (12, 16))
    found = [measured(source, (scheme("nvfp4"),), tokens, method="imatrix", lanes=n) for n in (1, 3)]
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["mse", "gptq"])
def test_an_expert_without_tokens_counts_as_one_token_and_is_said(
    tmp_path: Path, text: Path, method: str
) -> None:
    source = without_expert_3(write(tmp_path, "qwen3_moe", num_hidden_layers=2))
    tokens = torch.randint(0, 96, (8, 12))
    found = measured(source, (scheme("int4"),), tokens, method=method)
    for owner, counts in found.expert_tokens.items():
        assert counts[3] == 0 and sum(counts) == tokens.numel(), owner
    assert all(loss > 0 for (loss,) in found.losses.values())
    for _ in range(2):  # Measured, and from the cache.
        planned = plan(
            source,
            QuantizeOptions(budget=Budget(BitsPerWeight(4.5), ("int4", "int5")), calibration=data(text)),
        )[1]
        assert (
            "no token of the texts that sensitivity is measured on chose 2 of 8 experts (1 of 4 of "
            "model.layers.0.mlp.experts); each counts as if one token, the mean of all, had chosen it."
        ) in "\n".join(planned.notes)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_a_mixture_in_a_budget(tmp_path: Path, text: Path, family: str) -> None:
    source, out = write(tmp_path, family, num_hidden_layers=2), tmp_path / "out"
    budget = Budget(BitsPerWeight(4.6), ("int3:32", "int4:32", "int5:32", "int8"))
    result = quantize(source, out, budget=budget, calibration=data(text))
    allocation = result.plan.allocation
    assert allocation is not None
    assert result.plan.quantized_bytes == allocation.nbytes <= allocation.allowed
    assert 4.5 < result.plan.bits_per_weight["linears"] <= 4.6
    assert not any(check.problems for check in verify(out, reload=False))
    tokens = tokens_of(source, text)
    with torch.no_grad():
        exact, moved = (
            model(tokens).logits.double().log_softmax(-1)
            for model in (model_of(source), load(out, dtype=torch.float32, device="cpu"))
        )
    lost = float((exact.exp() * (exact - moved)).sum(-1).mean())
    # In a model this small a few choices of experts that become others are most of it.
    assert 0.5 * allocation.divergence < lost < 10 * allocation.divergence
    named = {name for share in allocation.shares for name in share.linears}
    assert {f"model.layers.{i}.mlp.experts.{leaf}" for i in range(2) for leaf in LEAVES} <= named
    assert any("shared_expert." in name for name in named) == (family == "qwen2_moe")


def test_experts_that_are_called_in_another_way_are_refused() -> None:
    x, chosen, weights = torch.zeros(5, 8), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
    ExpertCall.of((x, chosen, weights), x, "experts")
    for call in ((x,), (x, chosen), (x, weights, chosen), (x, chosen, weights[:4]), (x[:4], chosen, weights)):
        with pytest.raises(CheckpointError, match=r"experts is called with .* such as --rule 'experts\.\*=i"):
            ExpertCall.of(call, x, "experts")
