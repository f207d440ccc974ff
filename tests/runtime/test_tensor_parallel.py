"""Models that ranks share generate what one process does, or are refused before any weight is loaded."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import EnvironmentProblem, QuantkitError, UsageError
from quantkit.packing.schemes import scheme
from quantkit.runtime import tensor_parallel
from quantkit.runtime.cuda_graphs import capture, decode
from quantkit.runtime.decoding import graphs_of
from quantkit.runtime.parallel_plan import Cut, TensorParallelPlan
from quantkit.runtime.replace import packed_modules, swap_modules
from quantkit.runtime.tensor_parallel import plan_of_checkpoint
from quantkit.runtime.transformers.patches.parallel import ShareForward, divide_packed, undo_plan

from ..support.compare import assert_close, assert_equal
from ..support.processes import ended
from ..tiny.packed import SCHEMES, VERSION, VOCAB, Tiny, assert_same_checkpoint, logits_of, write_tiny
from ..tiny.sizes import SIZES
from .graphed import count_recordings

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="transformers would take the GPU, which a forked process cannot"
    ),
    pytest.mark.skipif(VERSION < (5, 17), reason="this transformers divides in another way: it is refused"),
]

Case = tuple[str, str, dict[str, Any], bool]

#: Family, scheme, other fields of the config, and whether lm_head is packed.
FITTING: dict[str, Case] = {
    "llama int4": ("llama", "int4", {}, True),
    "llama int4 asymmetric": ("llama", "int4-asym", {}, True),
    "llama int4 with biases": ("llama", "int4", {"attention_bias": True, "mlp_bias": True}, False),
    "llama int8, one scale a row": ("llama", "int8", {}, False),
    "llama int8, one scale": ("llama", "int8-tensor", {}, True),
    "llama fp8, one scale a row": ("llama", "fp8", {}, False),
    "llama fp6 in groups of 32": ("llama", "fp6", {}, False),
    "llama nvfp4": ("llama", "nvfp4", {}, True),
    # A share of down_proj is one group, as a row of o_proj is.
    "llama binary in groups of 64": ("llama", "binary", {}, False),
    "qwen2 int4": ("qwen2", "int4", {}, False),
    "mixtral int4": ("mixtral", "int4", {}, False),
    "mixtral int4 asymmetric": ("mixtral", "int4-asym", {}, False),
    "mixtral fp8, one scale a row": ("mixtral", "fp8", {}, False),
    "mixtral mxfp4": ("mixtral", "mxfp4", {}, False),
    "mixtral int8, one scale": ("mixtral", "int8-tensor", {}, False),
}

IS_OLD = torch.__version__.startswith("2.11.")

#: gloo gathers no 8-bit floats.
SAVED = [name for name in FITTING if "int" in name or "fp6" in name]

HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 192}

#: The same with what does not fit two ranks, and why it is refused.
REFUSED = {
    "groups": (
        ("llama", "int4", {"intermediate_size": 96}, False),
        r"with 2 ranks each has 48 of the 96 columns of '\S+0\.mlp\.down_proj', which are no whole "
        r"groups of 32\. The tensor parallel sizes of this checkpoint are 1\. ",
    ),
    "experts": (
        ("mixtral", "int4", {"intermediate_size": 96}, False),
        r"48 of the 96 columns of '\S+0\.mlp\.experts\.down_proj', which are no whole groups of 32",
    ),
    "words": (
        ("llama", "ternary-radix", {}, False),
        r"32 of the 64 columns of '\S+0\.self_attn\.o_proj', which are no whole words of 20 codes",
    ),
    "zero-points": (
        ("llama", "int4-asym", {"intermediate_size": 8 * 12 + 4, "hidden_size": 64}, False),
        r"50 of the 100 rows of '\S+0\.mlp\.gate_proj', which are no whole words of 8 zero-points",
    ),
    "heads": (
        ("llama", "int8", HEADS, False),
        r"24 of the 48 rows of '\S+0\.self_attn\.q_proj', which are no whole heads of 16",
    ),
    "head": (
        ("llama", "int8", {"vocab_size": VOCAB + 1}, True),
        r"the 97 rows of 'lm_head' have no equal shares for 2 ranks",
    ),
}


def written(directory: Path, case: Case) -> Tiny:
    family, scheme, options, head = case
    return write_tiny(
        directory,
        family,
        SCHEMES[scheme],
        pack_head=head,
        **{"intermediate_size": 128, "num_hidden_layers": 1, **options},
    )


PROMPT = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
GENERATE = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(PROMPT)}
GENERATE_ONE = {**GENERATE, "attention_mask": torch.ones_like(PROMPT[:1])}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    directory = tmp_path_factory.mktemp("models")
    cases = {**FITTING, **{name: case for name, (case, _) in REFUSED.items()}}
    return {name: written(directory / str(i), case) for i, (name, case) in enumerate(cases.items())}


@pytest.fixture(scope="module")
def found(models: dict[str, Tiny], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each model what two ranks make of it: logits, tokens and a saved copy, or the error."""
    directory = tmp_path_factory.mktemp("found")

    def run(rank: int) -> None:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        before = {name: (style, dict(vars(style))) for name, style in ALL_PARALLEL_STYLES.items()}
        answers: dict[str, Any] = {}
        for i, (name, checkpoint) in enumerate(models.items()):
            try:
                model = AutoModelForCausalLM.from_pretrained(checkpoint.packed, tp_plan="auto")
            except QuantkitError as error:
                answers[name] = str(error)
                continue
            model.eval()
            answers[name] = {
                "logits": logits_of(model, PROMPT),
                # Where gradients are recorded transformers hands the forward other tensors.
                "recording": model(PROMPT).logits.detach(),
                "tokens": model.generate(PROMPT, **GENERATE),
                "local": [
                    sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in m.parameters())
                    for m in (model.model.layers[0].mlp, model.model.layers[0].self_attn)
                ],
            }
            answers[name]["own forwards"] = [
                name.rpartition(".")[2]
                for name, module in model.named_modules()
                if isinstance(vars(module).get("forward"), ShareForward)
            ]
            after = {name: style for name, style in ALL_PARALLEL_STYLES.items() if name in before}
            own = [name for name in ALL_PARALLEL_STYLES if name not in before]
            answers[name]["styles are kept"] = all(name.startswith("quantkit_") for name in own) and all(
                style is after[name] and vars(style) == attributes
                for name, (style, attributes) in before.items()
            )
            if name in SAVED and IS_OLD and "mixtral" in name:
                # torch does not join shares of gate and up, of dense experts neither.
                with pytest.raises(EnvironmentProblem, match=r"Install torch 2\.12 or later"):
                    model.save_pretrained(directory / str(i))
            elif name in SAVED:
                model.save_pretrained(directory / str(i))
                answers[name]["saved"] = str(directory / str(i))
        torch.save(answers, directory / f"{rank}.pt")
        # Who ends first takes the store with it.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

    for code, _, errors in ended(run, directory):
        assert code == 0, errors
    first, second = (torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first.keys() == second.keys() == models.keys()
    for name, answer in first.items():
        if isinstance(answer, dict):
            assert_equal(answer["tokens"], second[name]["tokens"])
    return first


@pytest.mark.parametrize("name", FITTING)
def test_two_ranks_generate_what_one_does(models, found, name):
    model = AutoModelForCausalLM.from_pretrained(models[name].packed).eval()
    answer = found[name]
    assert isinstance(answer, dict), answer
    expected = logits_of(model, PROMPT)
    assert_close(answer["logits"], expected, rtol=1e-4, atol=1e-4)
    assert_close(answer["recording"], expected, rtol=1e-4, atol=1e-4)
    assert answer["tokens"].tolist() == model.generate(PROMPT, **GENERATE).tolist()
    # Each has about half of the words.
    whole = [
        sum(p.numel() for p in m.parameters())
        for m in (model.model.layers[0].mlp, model.model.layers[0].self_attn)
    ]
    assert all(0.4 < mine / all_ < 0.7 for mine, all_ in zip(answer["local"], whole, strict=True))


#: Linears of attention and of an MLP, by what ranks divide.
BY_ROWS, BY_COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}, {"o_proj", "down_proj"}


@pytest.mark.parametrize("name", FITTING)
def test_ranks_call_their_shares_as_they_are(found, name):
    """Without DTensors around them."""
    known = BY_ROWS | BY_COLUMNS if "mixtral" not in name else {"q_proj", "k_proj", "v_proj", "o_proj"}
    # Not all versions of transformers divide the embedding.
    assert set(found[name]["own forwards"]) - {"embed_tokens"} == known | {"lm_head"}
    assert found[name]["styles are kept"]


@pytest.mark.parametrize("name", SAVED)
def test_saving_joins_the_shares(models, found, name):
    if "saved" not in found[name]:
        pytest.skip("this torch cannot: it is refused")
    assert_same_checkpoint(Path(found[name]["saved"]), models[name].packed)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(models, found, name):
    message = REFUSED[name][1]
    with pytest.raises(UsageError, match=message):
        raise UsageError(found[name])
    plan = plan_of_checkpoint(Checkpoint.open(models[name].packed))
    with pytest.raises(UsageError, match=message):
        plan.check(2)


def test_ranks_record_steps_where_all_can(models, tmp_path):
    """As on GPUs, with nccl: a graph is a step that runs again, and sums through gloo."""

    def run(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            steps, prompts = count_recordings(patch)
            told: list[str] = []
            warning = SimpleNamespace(warning=lambda text, *of: told.append(text % of))
            for of in (decode, tensor_parallel):
                patch.setattr(of, "logger", warning)
            patch.setattr(tensor_parallel, "CAPTURED", "cpu:gloo")
            model = AutoModelForCausalLM.from_pretrained(models["llama int4"].packed, tp_plan="auto").eval()
            expected = model.generate(PROMPT, **GENERATE, disable_compile=True)
            for _ in range(2):
                assert_equal(model.generate(PROMPT, **GENERATE), expected)
            graphed = graphs_of(model)
            assert (steps, prompts) == ([1], []) and not graphed.refused
            assert len(told) == (rank == 0) and all("decoding steps are CUDA graphs" in one for one in told)
            # One that only the second rank cannot record.
            real = capture.capture

            def refused(*arguments: Any) -> Any:
                # A capture does not communicate, the step before it does.
                real(*arguments)
                raise capture.NotCaptured("it is late")

            if rank:
                patch.setattr(capture, "capture", refused)
            assert_equal(model.generate(PROMPT[:1], **GENERATE_ONE), expected[:1])
            (reason,) = graphed.refused
            assert reason == ("it is late" if rank else "another rank could not capture its share")
            assert len(graphed._graphs) == 2
            torch.distributed.destroy_process_group()
            assert not graphed._graphs

    first, second = ended(run, tmp_path)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]


def test_the_plan_of_a_checkpoint(models):
    def sizes(name: str) -> tuple[int, ...]:
        return plan_of_checkpoint(Checkpoint.open(models[name].packed)).sizes

    # Two heads of keys in all models.
    assert sizes("llama int4") == sizes("mixtral int4") == (1, 2)
    assert sizes("groups") == (1,)
    assert sizes("heads") == (1, 3)


def test_a_model_without_a_plan():
    plan = TensorParallelPlan("GPT2LMHeadModel", ())
    assert plan.sizes == (1,) and plan.first_refused == 2
    with pytest.raises(UsageError, match="transformers has no tensor-parallel plan"):
        plan.check(2)


def test_a_plan_is_that_of_its_narrowest_matrix():
    wide = Cut("wide", "columns", 4096, {"groups of 128": 128, "words of 8 codes": 8})
    narrow = Cut("narrow", "columns", 1408, {"groups of 128": 128})
    plan = TensorParallelPlan("M", (wide, Cut("rows", "rows", 1024, {"heads of 128": 128})))
    assert plan.sizes == (1, 2, 4, 8) and plan.first_refused == 16
    assert (
        plan.why_not(16)
        == "with 16 ranks each has 64 of the 1024 rows of 'rows', which are no whole heads of 128"
    )
    assert TensorParallelPlan("M", (wide, narrow)).sizes == (1,)
    assert TensorParallelPlan("M", (narrow,)).sizes == (1, 11)
    assert plan.why_not(3) == "the 4096 columns of 'wide' have no equal shares for 3 ranks"


def test_a_transformers_that_divides_in_another_way_is_refused(models, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(models["llama int4"].packed)
    monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)
    with pytest.raises(EnvironmentProblem, match=r"Install transformers 5\.17 or later"):
        divide_packed(model)


def test_each_part_of_a_linear_is_divided_by_quantkit(models):
    """Codes of 8-bit floats have the name of a dense weight, so their style is that of their scale too."""
    model = AutoModelForCausalLM.from_pretrained(models["llama fp8, one scale a row"].packed)
    divide_packed(model)
    divide_packed(model)
    name = "model.layers.*.mlp.down_proj"
    assert {part: style for part, style in model._tp_plan.items() if part.startswith(f"{name}.")} == {
        f"{name}.weight": "quantkit_rowwise",
        f"{name}.weight_scale": "quantkit_rowwise",
    }
    undo_plan(model)
    assert model._tp_plan[name] == "rowwise" and f"{name}.weight_scale" not in model._tp_plan


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_static_scales_of_inputs_are_whole_on_each_rank(family):
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    static = scheme("fp8", activations="fp8-static")
    parsed = getattr(transformers, f"{family}Config")(
        **{**SIZES, "num_hidden_layers": 1, "intermediate_size": 128}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parsed)
    swap_modules(model, QuantizationConfig("quantkit", static, {"lm_head": None}))
    divide_packed(model)
    mesh, seen = SimpleNamespace(size=lambda: 2), 0
    for name, module in packed_modules(model):
        for entry in [one for one in module._parameters if "input_scale" in one]:
            before = module._parameters[entry]
            style = ALL_PARALLEL_STYLES[model._tp_plan[re.sub(r"\.\d+\.", ".*.", f"{name}.{entry}")]]
            style.shard_param(module, entry, mesh)
            assert module._parameters[entry] is before
            seen += 1
    assert seen == (7 if family == "Llama" else 6)


def test_experts_are_not_divided_by_expert(models):
    model = AutoModelForCausalLM.from_pretrained(models["mixtral int4"].packed)
    model.config.distributed_config = SimpleNamespace(ep_size=2)
    with pytest.raises(UsageError, match=r"'model\.layers\.0\.mlp\.experts': packed experts are divided by"):
        divide_packed(model)


def test_experts_of_another_layout_are_not_divided():
    parsed = transformers.Llama4TextConfig(**SIZES, num_local_experts=4, interleave_moe_layer_step=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parsed)
    swap_modules(model, QuantizationConfig("quantkit", SCHEMES["int4"], {"lm_head": None}))
    plan = tensor_parallel.tensor_parallel_plan(model)
    assert plan.sizes == (1,)
    with pytest.raises(
        UsageError, match=r"cannot divide .*experts\.\w+': the model has these experts transp"
    ):
        plan.check(2)
