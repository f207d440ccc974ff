"""What fused experts store and compute is found by calling them."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from quantkit.model.architectures import why_not_packable
from quantkit.model.experts import GATE_UP, UP, Activation, ExpertsSpec, find_spec, spec_of

from ..support.compare import assert_equal

CLAMPED = "act(min(gate, limit)) * clamp(up, limit)"
SWIGLU = "(clamp(up, limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)"
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 20, "num_hidden_layers": 1},
    **{"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4},
}
#: By experts class: its config class, and the spec.
CLASSES = {
    "mixtral.MixtralExperts": ("MixtralConfig", ExpertsSpec()),
    "qwen3_moe.Qwen3MoeExperts": ("Qwen3MoeConfig", ExpertsSpec()),
    "granitemoe.GraniteMoeExperts": ("GraniteMoeConfig", ExpertsSpec()),
    "lfm2_moe.Lfm2MoeExperts": ("Lfm2MoeConfig", ExpertsSpec(activation=Activation(act="silu"))),
    "aria.AriaExperts": ("AriaTextConfig", ExpertsSpec(transposed=True)),
    "llama4.Llama4TextExperts": ("Llama4TextConfig", ExpertsSpec(transposed=True, routed=False)),
    "nemotron_h.NemotronHExperts": (
        "NemotronHConfig",
        ExpertsSpec(UP, activation=Activation("act(up)")),
    ),
    "deepseek_v4.DeepseekV4Experts": (
        "DeepseekV4Config",
        ExpertsSpec(activation=Activation(CLAMPED, limit=10.0)),
    ),
    "gpt_oss.GptOssExperts": (
        "GptOssConfig",
        ExpertsSpec(
            transposed=True,
            interleaved=True,
            biased=True,
            activation=Activation(SWIGLU, limit=7.0, alpha=1.702),
        ),
    ),
}


def experts_of(name: str, config: str, **changes) -> nn.Module:
    family, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if not hasattr(module, kind):
        pytest.skip("the experts of this transformers are no module")
    with torch.device("meta"):
        return getattr(module, kind)(getattr(transformers, config)(**{**SIZES, **changes}))


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_transformers(name):
    config, spec = CLASSES[name]
    experts = experts_of(name, config)
    if not experts._parameters:
        pytest.skip("the experts of this transformers have a module for each matrix")
    assert spec_of(experts) == spec


def test_numbers_are_those_of_the_module():
    experts = experts_of("gpt_oss.GptOssExperts", "GptOssConfig")
    # Not all versions of transformers take them from the config.
    experts.limit, experts.alpha = 3.5, 2.25
    assert spec_of(experts).activation == Activation(SWIGLU, limit=3.5, alpha=2.25)


class Toy(nn.Module):
    """Experts of the right shape whose parts a subclass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 2
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 16))
        self.down_proj = nn.Parameter(torch.zeros(2, 16, 4))
        self.act_fn = nn.SiLU()

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            y = self.gate(hidden[token] @ self.gate_up_proj[expert].T) @ self.down_proj[expert].T
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


class Clamped(Toy):
    def __init__(self, limit: float = 7.0) -> None:
        super().__init__()
        self.limit = limit

    def gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class ClampedAfter(Clamped):
    def gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class Interleaved(Toy):
    def gate(self, gate_up):
        return F.gelu(gate_up[..., ::2], approximate="tanh") * gate_up[..., 1::2]

    def __init__(self) -> None:
        super().__init__()
        del self.act_fn


@pytest.mark.parametrize(
    ("experts", "spec"),
    [
        (Toy(), ExpertsSpec()),
        (Clamped(), ExpertsSpec(activation=Activation(CLAMPED, limit=7.0))),
        (Clamped(1e4), ExpertsSpec(activation=Activation(CLAMPED, limit=1e4))),
        (Clamped(math.inf), ExpertsSpec()),
        (
            ClampedAfter(),
            ExpertsSpec(activation=Activation("min(act(gate), limit) * clamp(up, limit)", limit=7.0)),
        ),
        (Interleaved(), ExpertsSpec(interleaved=True, activation=Activation(act="gelu_tanh"))),
    ],
    ids=lambda one: type(one).__name__,
)
def test_other_functions_and_layouts(experts, spec):
    assert find_spec(experts) == spec


class Hidden(Toy):
    """A limit that no attribute tells."""

    def gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.clamp(max=7)) * up.clamp(-7, 7)


class Swapped(Toy):
    def gate(self, gate_up):
        up, gate = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up


class Unweighted(Toy):
    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, torch.ones_like(weights))


class Other(Toy):
    def forward(self, hidden):
        return hidden


@pytest.mark.parametrize("kind", [Hidden, Swapped, Unweighted, Other])
def test_experts_that_compute_something_else_are_not_packable(kind):
    assert "computes something else than the experts that quantkit knows" in str(why_not_packable(kind()))


def test_experts_of_other_shapes_or_with_more_parameters_are_not_packable():
    experts = Toy()
    experts.register_buffer("mask", torch.ones(1))
    assert why_not_packable(experts) == "Toy has more than gate_up_proj and down_proj: mask"
    experts = Toy()
    experts.norm = nn.LayerNorm(16)
    assert why_not_packable(experts) == "Toy has more than gate_up_proj and down_proj: norm"
    experts = Toy()
    experts.down_proj = nn.Parameter(torch.zeros(2, 16, 5))
    assert "are not [E, 2I, H] and [E, H, I]" in str(why_not_packable(experts))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_matrices_are_cut_and_joined_again(transposed, interleaved):
    spec = ExpertsSpec(transposed=transposed, interleaved=interleaved)
    gate, up = torch.randn(2, 3, 5)
    rows = [row for pair in zip(gate, up, strict=True) for row in pair] if interleaved else [*gate, *up]
    stored = torch.stack(rows, 1 if transposed else 0)
    assert_equal(spec.joined([gate, up]), stored)
    assert_equal(spec.matrix(stored, GATE_UP, 0), gate)
    assert_equal(spec.matrix(stored, GATE_UP, 1), up)


def test_rows_of_experts_are_routed_by_what_is_not_zero():
    spec = ExpertsSpec(routed=False)
    rows = torch.tensor([[1.0, 0], [0, 0], [0, 0], [0, 2], [3, 3], [0, 0]])
    x, index, weights = spec.as_routed((rows,), 3)
    assert_equal(x, rows)
    assert index.tolist() == [[0], [3], [3], [1], [2], [3]]
    assert_equal(weights, torch.ones(6, 1))
