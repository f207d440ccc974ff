"""LoRA of PEFT on packed experts: the numbers and files of the dense experts of the same values."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from quantkit.errors import UsageError
from quantkit.kernels.gemm import fused_kernels
from quantkit.kernels.moe import experts_lora
from quantkit.kernels.moe.experts_lora import ExpertsLora, lora_of_pairs
from quantkit.model.experts import DOWN, GATE_UP
from quantkit.runtime.decoding import graphs_of
from quantkit.runtime.packed_experts import PackedExperts

from ..support.compare import assert_close, assert_equal
from ..tiny.packed import logits_of
from .graphed import SEVEN, close, count_recordings
from .test_packed_experts import DEVICE, DTYPE, LIMIT, both, inputs, transposed
from .trained_adapters import check_loss_falls

peft = pytest.importorskip("peft")

IDS = torch.arange(3, 40, device=DEVICE)[None]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES = ["qwen3_moe", "mixtral"]
#: A GPU multiplies float32 in parts.
NEAR = 1e-4 if DEVICE == "cpu" else 1e-2


@pytest.fixture
def grouped(interpreter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the kernels run in Triton's interpreter."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(fused_kernels, "why_not_groupable", lambda problem: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=DEVICE)


def adapted(model: Any, parameters: Any = BOTH, targets: Any = (), **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options}
    targets = targets if isinstance(targets, str) else list(targets)
    config = peft.LoraConfig(target_modules=targets, target_parameters=parameters, **given)
    return peft.get_peft_model(model, config).eval()


def whole(*shape: int) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in float32."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).float().to(DEVICE)


@pytest.mark.parametrize("rows", ["tokens", "pairs"])
@pytest.mark.parametrize("most", [1 << 26, 1])
def test_all_pairs_have_the_lora_of_their_expert(
    rows: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_lora, "MOST_NUMBERS", most)
    index = torch.tensor([[1, 0], [0, 3], [2, 2], [3, 1], [4, 0]], device=DEVICE)
    lora = ExpertsLora(whole(4 * 3, 8), whole(6, 3 * 4), 0.5, 4)
    y, x = whole(10, 6), whole(5 if rows == "tokens" else 10, 8)
    found = lora_of_pairs([lora], y, x, index)
    for pair, expert in enumerate(index.flatten().tolist()):
        if expert < 4:
            a, b = lora.a.view(4, 3, 8)[expert], lora.b.view(6, 3, 4)[:, :, expert]
            token = x[pair // 2 if rows == "tokens" else pair]
            assert_equal(found[pair], y[pair] + 0.5 * (b @ (a @ token)))
    assert_equal(lora.by_expert()[2].output(x), 0.5 * (x @ lora.a[6:9].T) @ lora.b[:, 2::4].T)
    assert lora_of_pairs([lora], y[:0], x[:0], index[:0]).shape == (0, 6)
    assert lora_of_pairs([], y, x, index) is y


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_with_a_lora_compute_what_their_sums_do(grouped: None, family: str) -> None:
    packed, dense = both("int4") if family == "mixtral" else transposed(family)
    sizes = {GATE_UP: (32, 2 * packed.intermediate_dim), DOWN: (packed.intermediate_dim, 32)}
    loras = {
        name: [ExpertsLora(*(torch.randn(shape, device=DEVICE, dtype=DTYPE) for shape in shapes), 0.25, 4)]
        for name, (columns, rows) in sizes.items()
        for shapes in [((4 * 3, columns), (rows, 3 * 4))]
    }
    for name, (lora,) in loras.items():
        deltas = torch.stack([0.25 * one.b @ one.a for one in lora.by_expert()])
        getattr(dense, name).data += deltas.mT if packed.spec.transposed else deltas
    operands = inputs([[1, 0], [0, 3], [2, 3]])
    assert packed.is_grouped(DTYPE)
    expected = dense(*operands)
    assert_close(packed(*operands, loras=loras), expected, norm=LIMIT)
    assert_close(packed._one_by_one(*operands, loras), expected, norm=LIMIT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("parameters", "targets"), [(BOTH, ()), (BOTH[1:], ["q_proj"]), (None, "all-linear")], ids=str
)
def test_a_lora_of_experts_is_that_of_the_dense_model(
    tiny: Any, tmp_path: Path, family: str, parameters: Any, targets: Any
) -> None:
    checkpoint = tiny(family, "int4")
    dense = adapted(checkpoint.dense_model().to(DEVICE), parameters, targets)
    ours = adapted(loaded(checkpoint.packed), parameters, targets)
    names = [[name for name, one in model.named_parameters() if one.requires_grad] for model in (ours, dense)]
    assert names[0] == names[1] and any("experts" in name for name in names[0])
    for model in (ours, dense):
        model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [[one.grad for one in model.parameters() if one.requires_grad] for model in (ours, dense)]
    for found, expected in zip(*gradients, strict=True):
        assert_close(found, expected, norm=NEAR)
    logits = logits_of(ours, IDS)
    assert_close(logits, logits_of(dense, IDS), norm=NEAR)
    for model, name in ((ours, "ours"), (dense, "dense")):
        model.save_pretrained(tmp_path / name)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "dense")]
    assert_equal(*files)
    plain = logits_of(loaded(checkpoint.packed), IDS)
    again = peft.PeftModel.from_pretrained(loaded(checkpoint.packed), tmp_path / "dense")
    assert_equal(logits_of(again, IDS), logits)
    with again.disable_adapter():
        assert_equal(logits_of(again, IDS), plain)
    unloaded = again.unload()
    assert type(unloaded.model.layers[0].mlp.experts) is PackedExperts
    assert_equal(logits_of(unloaded, IDS), plain)


def test_two_loras_of_experts_add_up(tiny: Any) -> None:
    checkpoint = tiny("qwen3_moe", "int4")
    found = []
    for source in (loaded(checkpoint.packed), checkpoint.dense_model().to(DEVICE)):
        model = adapted(source)
        model.add_adapter("other", model.peft_config["default"])
        torch.manual_seed(1)
        for name, one in model.named_parameters():
            if "other" in name:
                nn.init.normal_(one, std=0.1)
        model.base_model.set_adapter(["default", "other"])
        found.append(logits_of(model, IDS))
    assert_close(*found, norm=NEAR)


@pytest.mark.usefixtures("one_thread")
def test_a_trainer_lowers_the_loss_by_a_lora_of_experts(tiny: Any, tmp_path: Path) -> None:
    model = adapted(loaded(tiny("qwen3_moe", "int4").packed), init_lora_weights=True)
    rows = [{"input_ids": torch.arange(i, i + 32), "labels": torch.arange(i, i + 32)} for i in range(3, 27)]
    check_loss_falls(model, rows, tmp_path / "run", max_steps=20, use_cpu=DEVICE == "cpu")


@pytest.mark.parametrize("parameters", [BOTH, None], ids=["experts", "all-linear"])
def test_steps_with_a_lora_of_experts_are_recorded(
    tiny: Any, grouped: None, monkeypatch: pytest.MonkeyPatch, parameters: Any
) -> None:
    steps, _ = count_recordings(monkeypatch)
    inner = loaded(tiny("qwen3_moe", "int4", num_hidden_layers=1).packed, DTYPE)
    model = adapted(inner, parameters, () if parameters else "all-linear")
    options = {**SEVEN, "max_new_tokens": 3, "do_sample": False}
    logits = []
    for more in ({}, {"disable_compile": True}):
        kept: list[torch.Tensor] = []

        def keep(tokens: Any, scores: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(scores.clone())
            return scores

        processors = transformers.LogitsProcessorList([keep])
        model.generate(IDS[:, :5], **options, **more, logits_processor=processors)
        logits.append(torch.stack(kept))
    assert steps == [1] and not graphs_of(inner).refused
    if DEVICE == "cpu":
        close(*logits)
    else:
        assert_close(*logits, norm=LIMIT)


def test_merging_into_packed_experts_is_refused(tiny: Any) -> None:
    model = adapted(loaded(tiny("qwen3_moe", "int4").packed))
    expected = logits_of(model, IDS)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(UsageError, match="cannot be merged into packed experts"):
            merge()
    assert_equal(logits_of(model, IDS), expected)


def test_experts_as_a_module_are_refused_with_the_names_of_their_parameters(tiny: Any) -> None:
    model = loaded(tiny("qwen3_moe", "int4").packed)
    remedy = r"target_parameters=\['mlp.experts.gate_up_proj', 'mlp.experts.down_proj'\]"
    with pytest.raises(UsageError, match=rf"layers\.0\.mlp\.experts' is packed, as PackedExperts.*{remedy}"):
        adapted(model, None, ["experts"])


def test_what_takes_the_dense_weight_of_experts_is_refused(tiny: Any) -> None:
    with pytest.raises(UsageError, match="init_lora_weights='pissa' reads or changes the dense weight"):
        adapted(loaded(tiny("qwen3_moe", "int4").packed), init_lora_weights="pissa")


def test_experts_that_are_transposed_without_saying_so_are_refused() -> None:
    packed, _ = transposed("llama4")
    assert packed.spec.transposed and not packed.is_transposed
    holder = nn.ModuleDict({"experts": packed})
    config = peft.LoraConfig(target_modules=[], target_parameters=BOTH)
    with pytest.raises(UsageError, match=r"'experts\.gate_up_proj' is of packed experts that are stored t"):
        peft.LoraModel(holder, config, "default")
