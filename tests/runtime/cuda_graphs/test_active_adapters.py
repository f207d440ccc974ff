"""Steps with adapters compute what the modules do, and never what was active before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import quantkit
from quantkit.runtime import fitness
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.cuda_graphs import active_adapters, refusals
from quantkit.runtime.cuda_graphs.active_adapters import ActiveAdapters
from quantkit.runtime.decoding import graphs_of

from ...support.compare import assert_equal
from ...tiny.packed import Tiny
from ..graphed import DEVICE, SEVEN, close, count_recordings, decode

peft = pytest.importorskip("peft")

PROMPT = torch.arange(3, 12, device=DEVICE)[None]


@pytest.fixture
def checkpoint(tiny: Any) -> Tiny:
    found: Tiny = tiny("llama", "int4")
    return found


@pytest.fixture
def model(checkpoint: Tiny) -> Any:
    return quantkit.load(checkpoint.packed, device=DEVICE, dtype=torch.float32)


@pytest.fixture(params=["graphs", "flat"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each step that is recorded; flat steps, which run on a CPU alone, are not counted."""
    if request.param == "flat":
        if DEVICE == "cuda":
            pytest.skip("flat steps run on a CPU")
        return []
    return count_recordings(monkeypatch)[0]


def lora(targets: Any = "all-linear", **options: Any) -> Any:
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **options}
    return peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **options)


def adapted(model: Any, targets: Any = "all-linear", **options: Any) -> Any:
    """A model with the adapters "default" and "other"; the first is active."""
    torch.manual_seed(0)
    found = peft.get_peft_model(model, lora(targets, **options))
    found.add_adapter("other", lora(targets, **options))
    return found.eval()


class Kept(transformers.LogitsProcessor):  # type: ignore[misc]
    """Keeps the logits of each step, and calls `change` with the number of tokens."""

    def __init__(self, change: Callable[[int], Any]) -> None:
        self.logits: list[torch.Tensor] = []
        self._change = change

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores.clone())
        self._change(tokens.shape[1])
        return scores


def logits(model: Any, change: Callable[[int], Any] = lambda tokens: None, **options: Any) -> torch.Tensor:
    """The logits of a generation of seven tokens."""
    kept = Kept(change)
    model.generate(PROMPT, **SEVEN, **options, logits_processor=transformers.LogitsProcessorList([kept]))
    return torch.stack(kept.logits)


def check(model: Any) -> torch.Tensor:
    """The logits of a generation, once they are those of the modules and nothing was refused."""
    fast = logits(model)
    close(fast, logits(model, disable_compile=True))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert not graphs_of(base).refused and graphs_of(base)._graphs
    return fast


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]], ids=str)
def test_steps_with_an_adapter_are_recorded_and_right(model: Any, targets: Any, steps: list[int]) -> None:
    without = check(model)
    model = adapted(model, targets)
    recorded = len(steps)
    found = check(model)
    assert not torch.equal(found, without)
    close(check(model), found)
    assert len(steps) - recorded == bool(steps)


def test_flat_steps_are_those_of_the_modules_to_the_bit(model: Any) -> None:
    if DEVICE == "cuda":
        pytest.skip("flat steps run on a CPU")
    model = adapted(model).get_base_model()
    caches = [static_cache(model, 20) for _ in range(2)]
    graphed = graphs_of(model).renew()
    expected = decode(model, graphed.plain, caches[0], PROMPT)
    assert_equal(decode(model, graphed, caches[1], PROMPT), expected)
    assert not graphed.refused


def _double(model: Any) -> None:
    for layer in fitness.modules_of(model):
        if "lora_variant" in vars(layer):
            layer.scale_layer(2.0)


@torch.no_grad()
def _in_place(model: Any) -> None:
    for name, weight in model.named_parameters():
        if "lora_B.default" in name:
            weight.neg_()


def _delete(model: Any) -> None:
    model.delete_adapter("default")
    model.set_adapter("other")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.set_adapter("other"),
        lambda model: model.base_model.set_adapter(["default", "other"]),
        _double,
        _in_place,
        _delete,
        lambda model: model.unload(),
    ],
    ids=["disable", "set", "both", "scale", "in place", "delete", "unload"],
)
def test_a_change_of_adapters_is_seen(model: Any, change: Callable[[Any], Any], steps: list[int]) -> None:
    inner = model
    model = adapted(model)
    before = check(model)
    change(model)
    after = check(inner)
    assert not torch.equal(after, before)


def test_adapters_may_be_loaded_after_the_first_text(model: Any, steps: list[int], tmp_path: Path) -> None:
    without = check(model)
    model = adapted(model)
    expected = check(model)
    model.save_pretrained(tmp_path)
    inner = model.unload()
    close(check(inner), without)
    again = peft.PeftModel.from_pretrained(inner, tmp_path)
    close(check(again), expected)
    again.load_adapter(tmp_path / "other", "second")
    again.set_adapter("second")
    with again.disable_adapter():
        close(check(again), without)


def test_an_adapter_of_the_same_name_is_seen_at_the_next_step(model: Any, steps: list[int]) -> None:
    model = adapted(model)

    def renew(seed: int) -> None:
        torch.manual_seed(seed)
        model.delete_adapter("default")
        model.add_adapter("default", lora())
        model.set_adapter("default")
        model.eval()

    found = []
    for more in ({}, {"disable_compile": True}):
        renew(1)
        found.append(logits(model, lambda tokens: renew(2) if tokens == 12 else None, **more))
    close(*found)
    assert not graphs_of(model.get_base_model()).refused


def test_three_adapters_by_turns_are_recorded_once_each(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = count_recordings(monkeypatch)[0]
    model = adapted(model)
    model.add_adapter("third", lora())
    model.eval()
    recorded = []
    for _ in range(3):
        for name in ("default", "other", "third"):
            model.set_adapter(name)
            logits(model)
        recorded.append(len(steps))
    assert recorded == [3, 3, 3]


def test_graphs_of_two_sets_are_kept(model: Any, steps: list[int]) -> None:
    model = adapted(model)
    for _ in range(3):
        check(model)
        with model.disable_adapter():
            check(model)
    assert len(steps) in (0, 2) and len(graphs_of(model.get_base_model())._graphs) == 2


def test_adapters_may_be_switched_between_steps(model: Any, steps: list[int]) -> None:
    model = adapted(model)

    def switch(tokens: int) -> None:
        model.set_adapter(["default", "other"][tokens % 2])

    found = []
    for more in ({}, {"disable_compile": True}):
        model.set_adapter("default")
        found.append(logits(model, switch, **more))
    close(*found)
    assert len(graphs_of(model.get_base_model())._graphs) == 2


def test_too_many_sets_of_adapters_are_not_recorded(
    model: Any, steps: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_adapters, "MOST_SETS", 2)
    model = adapted(model, ["q_proj"])
    for number in range(3):
        for layer in fitness.modules_of(model):
            if "lora_variant" in vars(layer):
                layer.set_scale("default", 1.0 + number)
        close(logits(model), logits(model, disable_compile=True))
    reason = refusals.SWITCHED.because(most=2)
    assert [*graphs_of(model.get_base_model()).refused] == [reason] and caplog.text.count(reason) == 1


def test_sets_are_numbered_by_their_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes: dict[str, Any] = {
        "lora_variant": {},
        "_disable_adapters": False,
        "_active_adapter": ["a"],
        "merged_adapters": [],
        "scaling": {"a": 1.0},
    }
    layer = torch.nn.Module()
    vars(layer).update(attributes)
    layer.lora_A, layer.lora_B = (torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)}) for _ in "AB")
    adapters = ActiveAdapters([layer, torch.nn.Module()])
    found = []
    for active in (["a"], ["a", "b"], ["a"], ["b"]):
        layer._active_adapter = active
        found.append(adapters.number())
    assert found == [0, 1, 0, 2] and ActiveAdapters([]).number() == 0
    layer.lora_A["a"] = torch.nn.Linear(2, 2)
    assert adapters.number() == 3 and adapters.count == 4
    monkeypatch.setattr(active_adapters, "MOST_SETS", 8)
    assert adapters.why_not(0) is None
    layer.merged_adapters, layer._disable_adapters = ["b"], True
    assert adapters.why_not(adapters.number()) == refusals.UNMERGES.because()


def why_unfit(model: Any) -> str | None:
    return fitness.why_unfit(model, fitness.modules_of(model))


def test_other_adapters_are_refused_with_their_place(model: Any, checkpoint: Tiny) -> None:
    kept = peft.get_peft_model(model, lora(["q_proj"], modules_to_save=["lm_head"])).eval().get_base_model()
    kind = refusals.ADAPTERS.because(module="lm_head", kind="ModulesToSaveWrapper")
    assert why_unfit(kept) == kind
    source = checkpoint.dense_model()
    dense = peft.get_peft_model(source, lora(["q_proj"], use_dora=True)).eval().get_base_model()
    assert "DoraLinearVariant of PEFT" in str(why_unfit(dense))
    source = checkpoint.dense_model()
    assert why_unfit(adapted(source, ["q_proj"]).get_base_model()) is None


def test_dropout_that_is_trained_is_refused(model: Any) -> None:
    inner = model.eval()
    model = adapted(inner, ["q_proj"], lora_dropout=0.5)
    assert why_unfit(inner) is None
    model.train()
    inner.training = False
    assert why_unfit(inner) == refusals.TRAINING.because()


def test_an_adapter_per_row_runs_module_by_module(model: Any, steps: list[int]) -> None:
    model = adapted(model)
    expected = check(model)
    row = model.generate(PROMPT, **SEVEN, adapter_names=["default"])
    assert_equal(row, model.generate(PROMPT, **SEVEN, disable_compile=True))
    assert any("hook" in one for one in graphs_of(model.get_base_model()).refused)
    graphs_of(model.get_base_model()).refused.clear()
    close(check(model), expected)


def test_a_deleted_adapter_is_told_from_one_in_its_place(model: Any) -> None:
    """Another module may have the address of a deleted one."""
    model = adapted(model, ["q_proj"])
    modules = fitness.modules_of(model)
    before = fitness.fingerprint(model, modules)
    assert fitness.fingerprint(model, modules) == before
    layer = next(one for one in modules if "lora_variant" in vars(one))
    other = torch.nn.Linear(1, 1, bias=False)
    other.weight = layer.lora_A["default"].weight
    layer.lora_A["default"] = other
    assert fitness.fingerprint(model, modules) != before
