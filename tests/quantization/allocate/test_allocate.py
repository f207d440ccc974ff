"""Allocating formats to the linears of a checkpoint: budgets, groups, the cache, runs that are resumed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.methods import METHODS, method_named
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.output.shard_file import ShardFile
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import OutputError, UsageError
from quantkit.model.structure import read_structure
from quantkit.packing.schemes import scheme
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.allocate import allocate as allocating
from quantkit.quantization.allocate.allocate import _notes_on_scaling, groups_of
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget, MillisecondsPerToken
from quantkit.quantization.allocate.sensitivity import Sensitivities
from quantkit.quantization.allocate.sensitivity_cache import MAX_BYTES, SensitivityCache
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize
from quantkit.recipes.candidates import MENU, candidates
from quantkit.recipes.recipe import Choice, Recipe, parse_rule
from quantkit.recipes.recipe_options import RecipeOptions

from ...tiny.calibrated import write

EXAMPLES = Path(__file__).parents[3] / "examples"
STORIES = EXAMPLES / "stories260K"
DATA = CalibrationOptions(str(EXAMPLES / "stories.txt"), samples=4, length=32)
FORMATS = ("int2:16", "int3:32", "mxfp4", "int5:32", "fp6")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantkit" / "sensitivity"


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often it was measured."""
    counts: list[int] = []
    measure = allocating.measure
    monkeypatch.setattr(allocating, "measure", lambda *arguments: (counts.append(1), measure(*arguments))[1])
    return counts


def planned(bits: float, **options: Any) -> Any:
    budget = Budget(BitsPerWeight(bits), FORMATS)
    return plan(STORIES, QuantizeOptions(RecipeOptions(**options), budget, DATA))[1]


def test_budgets_are_kept_reached_and_used(unmeasured: list[int]) -> None:
    losses = []
    for bits in (3.1, 4.0, 5.5, 6.2):
        found = planned(bits)
        assert found.quantized_bytes == found.allocation.nbytes <= found.allocation.allowed
        assert bits - 0.05 < found.bits_per_weight["linears"] <= bits
        losses.append(found.allocation.divergence)
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)
    assert unmeasured == [1]


def test_linears_that_engines_fuse_share_a_format(unmeasured: list[int]) -> None:
    found = planned(4.0)
    chosen = {layer.linear.module: layer.scheme for layer in found.layers}
    for i in range(5):
        block = f"model.layers.{i}."
        for together in (("q", "k", "v"), ("gate", "up")):
            where = "self_attn" if "q" in together else "mlp"
            names = {chosen[f"{block}{where}.{leaf}_proj"].format for leaf in together}
            assert len(names) == 1
    assert len({scheme.format for scheme in chosen.values() if scheme is not None}) > 2
    assert found.notes == ()
    assert chosen["lm_head"] is None
    assert planned(4.0).layers == found.layers


def test_rules_come_first_and_are_not_in_the_budget() -> None:
    found = planned(4.0, rules=("*.layers.0.*=int8", "*.o_proj=keep"))
    first = [layer for layer in found.layers if ".layers.0." in layer.linear.module]
    assert {str(layer.scheme) for layer in first} == {"int8 channel bfloat16"}
    names = {name for share in found.allocation.shares for name in share.linears}
    assert len(names) == 24
    assert not any(".layers.0." in name or name.endswith("o_proj") for name in names)
    assert 8 * found.allocation.nbytes / found.allocation.weights <= 4.0
    with pytest.raises(UsageError, match="--bits-per-weight has nothing to allocate: rules decide on every"):
        planned(4.0, rules=("*=int8",))


def test_the_experts_of_a_layer_share_a_format(tmp_path: Path) -> None:
    source = write(tmp_path, "qwen3_moe")
    structure = read_structure(Checkpoint.open(source))
    names = [[linear.module for linear in group] for group in groups_of(structure, Recipe())]
    attention = [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"]
    experts = [f"model.layers.0.mlp.experts.{leaf}_proj" for leaf in ("down", "gate_up")]
    assert experts in [sorted(group) for group in names]
    assert sorted(attention) in [sorted(group) for group in names]
    assert len(names) == 3 * 3


def test_damaged_caches_are_measured_anew(cache: Path, unmeasured: list[int]) -> None:
    first = planned(4.0)
    (file,) = cache.iterdir()
    good = file.read_text()
    file.write_text(good[:100])
    again = planned(4.0)
    assert re.search(
        r"the sensitivities /.*\.json are damaged and measured anew: it is invalid", again.notes[0]
    )
    assert again.layers == first.layers
    assert file.read_text() == good
    assert unmeasured == [1, 1]


def test_caches_are_distrusted(cache: Path) -> None:
    wanted = {"a": (scheme("int4"), scheme("int8")), "b": (scheme("int4"), scheme("int8"))}
    kept = SensitivityCache.of("0" * 64)
    measured = Sensitivities({"b": (0.5, 0.25), "a": (2.0, 1e-9)}, {"experts": (3, 0)})
    assert kept.read(wanted) == (None, ())
    assert kept.write(measured) == ()
    assert kept.read(wanted) == (measured, ())
    (file,) = cache.iterdir()
    data = json.loads(file.read_text())

    def edited(**changes: Any) -> str:
        return json.dumps({**data, "losses": {**data["losses"], **changes}})

    for text, why in {
        "": "it is empty",
        "[]": "expected a JSON object",
        json.dumps({**data, "key": "0"}): "it does not hold the key",
        edited(other=[1.0, 1.0]): "its linears are not those of the model",
        edited(a=[1.0]): "'a' has not one loss for each scheme",
        edited(a=[-1.0, 0]): "not a finite number",
        edited(a=["1", 0]): "not a finite number",
        edited(a=[True, 0]): "not a finite number",
        json.dumps({**data, "expert_tokens": {"experts": [3, -1]}}): "the tokens of its experts are not",
        json.dumps({**data, "expert_tokens": [3]}): "the tokens of its experts are not",
        edited(a=[2.0, 2e-9]): "its hash is not that of its content",
        json.dumps({**data, "expert_tokens": {"experts": [3, 1]}}): "its hash is not that of its content",
        " " * (MAX_BYTES + 1): "more than the",
    }.items():
        file.write_text(text)
        found, notes = kept.read(wanted)
        assert found is None
        assert why in notes[0]


def test_no_place_for_a_cache_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: list[int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert "are not kept, as there is no home directory" in planned(4.0).notes[0]
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    assert "are not kept in" in planned(4.0).notes[0]
    assert unmeasured == [1, 1]


def test_other_data_methods_and_formats_are_measured(unmeasured: list[int]) -> None:
    planned(4.0)
    planned(4.0, method="gptq")
    plan(STORIES, QuantizeOptions(budget=Budget(BitsPerWeight(4.0), FORMATS[:-1]), calibration=DATA))
    other = CalibrationOptions(DATA.sources, samples=4, length=32, seed=1)
    plan(STORIES, QuantizeOptions(budget=Budget(BitsPerWeight(4.0), FORMATS), calibration=other))
    assert unmeasured == [1] * 4


@pytest.mark.parametrize("method", ["mse", "gptq"])
@pytest.mark.sampled(2)
def test_a_resumed_run_keeps_its_formats_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: list[int], method: str
) -> None:
    options: dict[str, Any] = {
        "method": method,
        "budget": Budget(BitsPerWeight(4.0), FORMATS),
        "calibration": DATA,
        "max_shard_bytes": 60_000,
    }
    whole = quantize(STORIES, tmp_path / "whole", **options)
    commit, commits = ShardFile.commit, []

    def failing(self: ShardFile) -> Any:
        if len(commits) == 1:
            raise OutputError("no more")
        commits.append(1)
        return commit(self)

    with monkeypatch.context() as patch, pytest.raises(OutputError, match="no more"):
        patch.setattr(ShardFile, "commit", failing)
        quantize(STORIES, tmp_path / "out", **options)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert unmeasured == [1]
    with pytest.raises(OutputError, match=r"allocation\.budget\.bits_per_weight: 4\.0 -> 4\.1"):
        quantize(
            STORIES,
            tmp_path / "out",
            **{**options, "budget": Budget(BitsPerWeight(4.1), FORMATS)},
            resume=True,
        )
    again = quantize(STORIES, tmp_path / "out", **options, resume=True)
    assert again.plan.allocation == whole.plan.allocation
    quantize(STORIES, tmp_path / "out", **options, resume=True)
    with pytest.raises(OutputError, match="already holds a finished quantkit checkpoint"):
        quantize(STORIES, tmp_path / "out", **options)
    assert unmeasured == [1]
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    manifest = read_manifest(tmp_path / "out")
    assert Recipe.from_dict(manifest["recipe"]).to_dict() == manifest["recipe"]
    assert manifest["run"]["allocation"]["result"]["bits_per_weight"] <= 4.0


def test_recipes_survive_json() -> None:
    default = Choice("int3", 32, "integer", "e4m3", "gptq")
    rules = (
        parse_rule("*.a=int8", default),
        parse_rule("b=keep", default),
        parse_rule("c=fp8:tensor:mse", default),
    )
    recipe = Recipe(default, rules)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    for damaged in (
        None,
        {},
        {"default": {}, "rules": [1]},
        {"default": {}, "rules": [{"match": "a", "why": 1}]},
    ):
        with pytest.raises(UsageError):
            Recipe.from_dict(damaged)


@pytest.mark.parametrize("method", METHODS)
def test_menus_are_what_methods_can_do(method: str) -> None:
    rows = candidates(method)
    assert {row.method for row in rows} == {method}
    assert all(row.scheme(torch.bfloat16) is not None for row in rows)
    formats = {row.format for row in rows}
    evenly = {"hqq": ("int",), "signround": ("int", "ternary")}.get(method, ("",))
    assert formats == {row.format for row in MENU if row.format.startswith(evenly)}


def test_menus_are_read_from_names() -> None:
    assert candidates("mse", ("int4:64", "nf4")) == (Choice("int4", 64), Choice("nf4"))
    assert [row.group_size for row in candidates("mse", ("int3",))] == [64, 32, 16]
    assert candidates("gptq", ("int8", "int8")) == (Choice("int8", method="gptq"),)
    for formats, why in {
        ("int9",): "--formats int9: unknown format 'int9'",
        ("int4:0",): "group size '0' is not a positive integer",
        ("binary-residual",): r"--formats binary-residual: method 'gptq' has no way to choose several planes",
        (): "--formats is empty",
    }.items():
        with pytest.raises(UsageError, match=why):
            candidates("gptq", formats)


def test_names_of_schemes_round_inputs() -> None:
    found = candidates("mse", ("W8A8", "W4A16_ASYM", "W3A16", "fp8"))
    assert found == (
        Choice("int8", "channel", activations="int8"),
        Choice("int4", 128, "integer"),
        Choice("int3", 128, packing="stream"),
        Choice("fp8"),
    )


def test_rounded_inputs_cost_accuracy(tmp_path: Path) -> None:
    def chosen(bits: float, *formats: str) -> dict[str, str]:
        options = QuantizeOptions(RecipeOptions(), Budget(BitsPerWeight(bits), formats), DATA)
        layers = plan(STORIES, options)[1].layers
        return {one.linear.module: str(one.scheme) for one in layers if one.scheme is not None}

    # Of two schemes with equal weights, that with inputs as they are.
    assert set(chosen(6.5, "W4A4", "W4A16", "W8A8", "W8A16").values()) == {
        *("int4 channel bfloat16", "int4 g128 bfloat16", "int8 channel bfloat16", "int8 g128 bfloat16"),
    }
    # Inputs of 4 bits lose more than weights of 4 bits gain over 2.
    mixed = chosen(3.5, "W4A4", "W2A16")
    assert {text.partition(", ")[2] for text in mixed.values()} == {"x int4 token", ""}
    source, out = STORIES, tmp_path / "out"
    budget = Budget(BitsPerWeight(6.5), ("FP8", "W4A16"))
    result = quantize(source, out, budget=budget, calibration=DATA)
    static = {one.linear.module for one in result.plan.layers if one.scheme and one.scheme.activations}
    stored = {
        name.removesuffix(".input_scale")
        for name in Checkpoint.open(out).tensors
        if name.endswith(".input_scale")
    }
    assert stored == static and 0 < len(static) < len(mixed)


def test_formats_of_one_size_leave_nothing_to_choose() -> None:
    budget = Budget(BitsPerWeight(8.2), ("W8A8", "FP8_DYNAMIC"))
    with pytest.raises(
        UsageError,
        match=r"^8\.2 bits per weight: the linears take 8\.\d+ in each of these formats, so a budget chooses "
        r"nothing\. Name other formats with --formats, or .* by --format or --scheme\.$",
    ):
        plan(STORIES, QuantizeOptions(RecipeOptions(), budget, DATA))


def test_times_of_products_with_inputs_as_they_are_price_no_rounded_ones() -> None:
    budget = Budget(MillisecondsPerToken(2.0, "nvidia_h200"), ("W8A8", "FP8_DYNAMIC"))
    with pytest.raises(
        UsageError, match=r"no format to choose for .*: the milliseconds per token on .* of none"
    ):
        plan(STORIES, QuantizeOptions(RecipeOptions(), budget, DATA))


def test_a_method_that_scales_inputs_brings_a_note_on_rounded_ones() -> None:
    rounded, plain = ({"a": (scheme("int8", activations=inputs),)} for inputs in ("int8", None))
    found = list(_notes_on_scaling(method_named("smoothquant,gptq"), rounded))
    assert found == [
        "the budget counts rounded inputs as they are, and --method smoothquant,gptq scales them first, so "
        "they may cost far less. Compare with the same budget without schemes that round inputs."
    ]
    assert not list(_notes_on_scaling(method_named("smoothquant,gptq"), plain))
    assert not list(_notes_on_scaling(method_named("gptq"), rounded))


def test_groups_of_inputs_that_do_not_divide_a_linear_are_refused() -> None:
    budget = Budget(BitsPerWeight(6.5), ("FP8_BLOCK", "W4A16"))
    with pytest.raises(UsageError) as error:
        plan(STORIES, QuantizeOptions(RecipeOptions(), budget, DATA))
    assert re.fullmatch(
        r"'model\.layers\.0\..*' cannot be packed as fp8-e4m3 128x128 bfloat16, x fp8-e4m3 g128: groups of "
        r"128 inputs do not divide \d+ features\. Leave that scheme out of --formats, or decide on the "
        r"linear with a rule, such as --rule '.*=int8'\.",
        str(error.value),
    )


def test_a_model_without_a_head_has_no_sensitivities(tmp_path: Path) -> None:
    source = write(tmp_path, "embedding")
    with pytest.raises(UsageError, match=r"has no head that predicts tokens.*--format and --rule"):
        plan(source, QuantizeOptions(budget=Budget(BitsPerWeight(5.0)), device="cpu"))
