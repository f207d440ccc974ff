"""What an allocation may choose from for an engine is what the table says that it reads."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.engines import SGLANG, VLLM, Engine
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.model.structure import read_structure
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.allocate.allocate import groups_of
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget, MillisecondsPerToken
from quantkit.quantization.allocate.readable import readable
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize_checkpoint
from quantkit.recipes.candidates import MENU, MENU_OF_ENGINES, MENUS, NAMED_OF_ENGINES, candidates
from quantkit.recipes.recipe import Choice, Recipe
from quantkit.recipes.recipe_options import RecipeOptions
from quantkit.verification.engine import engine_report

from ...tiny.calibrated import write
from .test_allocate import DATA, STORIES, cache

__all__ = ["cache"]


def chosen_from(source: Path, engine: Engine, choices: tuple[Choice, ...]) -> dict[str, set[str]]:
    """For the experts of layer 0 and its gate or o_proj, the formats left."""
    structure = read_structure(Checkpoint.open(source))
    groups = groups_of(structure, Recipe())
    schemes: dict[str, Any] = {}
    for linear in (linear for group in groups for linear in group):
        made = [choice.scheme(torch.bfloat16) for choice in choices]
        schemes[linear.module] = [one.for_columns(linear.shape[1]) for one in made if one is not None]
    return {
        group[0].module: {f"{choices[i].format}:{choices[i].group_size}" for i in numbers}
        for group, numbers in zip(groups, readable(engine, groups, schemes), strict=True)
    }


def test_a_group_gets_what_the_engine_reads_for_all_of_it(tmp_path: Path) -> None:
    source = write(tmp_path, "qwen3_moe", hidden_size=64, moe_intermediate_size=96)
    experts, output = "model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.o_proj"
    found = chosen_from(source, VLLM, MENU_OF_ENGINES)
    # Rows of 64 and 96 have one group of 128. 64 does not divide 96, and fp8 of experts has no class.
    ints = {"int4:channel", "int4:128", "int4:32", "int8:None"}
    assert found[experts] == {*ints, "mxfp4:None", "nvfp4:None", "mxfp8:None"}
    assert found[output] == {*found[experts], "int4:64", "fp8:None"}
    # SGLang reads integer experts only beside integers.
    found = chosen_from(source, SGLANG, MENU_OF_ENGINES)
    assert found[experts] == ints and found[output] == {*ints, "int4:64"}


def test_formats_of_quantkit_alone_are_no_choice(tmp_path: Path) -> None:
    source = write(tmp_path, "llama")
    for rows in chosen_from(source, VLLM, MENU).values():
        assert rows and not any(row.startswith(("int2", "int3", "int5", "fp6", "book4")) for row in rows)
    with pytest.raises(
        UsageError, match=r"SGLang reads none of the formats to choose from for model.layers.0"
    ):
        chosen_from(source, SGLANG, (Choice("int5"), Choice("mxfp8")))


def test_names_of_formats_are_rows_of_the_menu_of_engines() -> None:
    assert len(candidates("rtn", ("int4",), MENU_OF_ENGINES)) == 4
    # Losses are those of the method itself, not of the one that `distill` takes instead.
    with pytest.raises(UsageError, match=r"binary-residual: method 'distill' has no way .* mse,distill\.$"):
        candidates("distill", ("binary-residual",))
    assert candidates("rtn", ("int5",), MENU_OF_ENGINES) == (Choice("int5", method="rtn"),)


def test_named_widths_are_stored_as_the_engine_reads_them(tmp_path: Path) -> None:
    menus = MENU_OF_ENGINES, NAMED_OF_ENGINES
    unnamed = candidates("rtn", None, *menus)
    assert not {row.format for row in unnamed} & {"int2", "int3", "int5", "int6", "int7"}
    assert candidates("rtn", ("int6:32",), *menus) == (Choice("int6", 32, method="rtn", packing="stream"),)
    named = candidates("rtn", ("int2", "int3", "int5", "int6", "int7"), *menus)
    source = write(tmp_path, "llama", hidden_size=64, intermediate_size=128)
    for rows in chosen_from(source, VLLM, named).values():
        assert {row.partition(":")[0] for row in rows} == {"int2", "int3", "int5", "int6", "int7"}
    options = QuantizeOptions(
        RecipeOptions(method="rtn"),
        Budget(BitsPerWeight(4.6), formats=("int3", "int4", "int5")),
        DATA,
        device="cpu",
        engine="vllm",
    )
    planned = plan(STORIES, options)[1]
    assert {str(a.scheme.packing) for a in planned.assignments if a.scheme is not None} == {"bits", "stream"}
    assert any("by Humming alone, on NVIDIA GPUs" in note for note in planned.notes)


def test_what_a_budget_chooses_for_an_engine_is_loaded_by_it(tmp_path: Path) -> None:
    options = QuantizeOptions(
        RecipeOptions(method="rtn"), Budget(BitsPerWeight(5.0)), DATA, device="cpu", engine="vllm"
    )
    result = quantize_checkpoint(STORIES, tmp_path / "out", options)
    report = engine_report(tmp_path / "out", VLLM, "0.33.0")
    assert report.refusals == ()
    assert len({layer.reads for layer in report.layers.values() if layer.scheme}) > 1
    assert "vLLM 0.33.0 has a class for each linear of the result." in result.plan.notes


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "int4"}, "cannot express this: model.layers.0.mlp.down_proj: compressed-tensors needs"),
        ({"format": "int8", "rules": ("*.q_proj=fp8",)}, "they fuse these linears"),
        ({"format": "int8", "embeddings": "int8"}, "model.embed_tokens"),
    ],
    ids=["groups", "fused", "embedding"],
)
def test_a_plan_that_the_engine_would_not_load_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=r"^--engine vllm==0.32.0: ") as raised:
        plan(STORIES, QuantizeOptions(RecipeOptions(**options), engine="vllm==0.32.0"))
    assert says in str(raised.value)
    assert plan(STORIES, QuantizeOptions(RecipeOptions(format="int8"), engine="vllm"))[1].readers


def test_words_name_menus_beside_formats() -> None:
    menus = {word: {row.format for row in candidates("rtn", (word,))} for word in MENUS}
    assert menus["engine"] == {"int4", "int8", "fp8", "mxfp8", "mxfp4", "nvfp4"}
    assert menus["all"] - menus["fast"] == {"book4"} and {"int3", "fp6"} < menus["fast"]
    both = candidates("rtn", ("engine", "int3:64"))
    assert both[-1] == Choice("int3", 64, method="rtn") and len(both) == len(MENU_OF_ENGINES) + 1
    assert {row.format for row in candidates("hqq", ("engine",))} == {"int4", "int8"}
    assert Budget(BitsPerWeight(4.5)).asked == (("engine",), ("fast",))
    assert Budget(MillisecondsPerToken(4.5, "nvidia_h200")).asked == (("all",),)
    assert Budget(BitsPerWeight(4.5), ("int4", "int8")).asked == (("int4", "int8"),)


def test_a_budget_of_bits_makes_a_checkpoint_that_engines_read() -> None:
    """Rows of 172 have no whole groups of 128 and 64: such groups are no choice for them."""
    budget, options = BitsPerWeight(4.6), RecipeOptions(method="rtn")
    planned = plan(STORIES, QuantizeOptions(options, Budget(budget), DATA, device="cpu"))[1]
    assert planned.config.container == "compressed-tensors" and planned.not_portable == ()
    assert set(planned.readers) >= {"vLLM", "SGLang"}
    assert not any("out of reach" in note for note in planned.notes)


def test_a_budget_below_what_engines_read_is_reached_by_formats_that_decode_fast() -> None:
    budget, options = BitsPerWeight(2.5), RecipeOptions(method="rtn")
    planned = plan(STORIES, QuantizeOptions(options, Budget(budget), DATA, device="cpu"))[1]
    assert 2.45 < planned.bits_per_weight["linears"] <= 2.5
    named = QuantizeOptions(options, Budget(budget, ("fast",)), DATA, device="cpu")
    assert plan(STORIES, named)[1].allocation == planned.allocation
    (note,) = (note for note in planned.notes if "out of reach" in note)
    assert re.fullmatch(
        r"2\.5 bits per weight are out of reach of --formats engine, 4\.\d+ to 8\.\d+; --formats fast "
        r"reaches them\.",
        note,
    )
    for bits in (1.5, 9.0):
        out_of_reach = QuantizeOptions(options, Budget(BitsPerWeight(bits)), DATA, device="cpu")
        with pytest.raises(UsageError, match=rf"{bits:g} bits per weight are out of reach: .* 2\.\d+ to 8\."):
            plan(STORIES, out_of_reach)


@pytest.mark.parametrize(
    ("bits", "formats", "engine", "remedy"),
    [
        (
            1.5,
            None,
            None,
            r"name smaller formats too: those of --formats fast,binary take 1\.\d+ to 8\.\d+\.",
        ),
        (1.5, ("all",), None, r"smaller formats too: those of --formats all,binary take 1\.\d+ to 8\.\d+\."),
        (3.5, ("int6", "int8"), None, r"those of --formats int6,int8,int4,int3 take 3\.\d+ to 8\.\d+\."),
        (1.5, None, "vllm", r"those of --formats engine,int3,int2 take 2\.\d+ to 8\.\d+\."),
        (1.0, ("binary", "int2"), None, r"no smaller format is there for this method, nor for an engine .*"),
        (
            5.0,
            ("int2", "int4"),
            None,
            r"larger formats too: those of --formats int2,int4,int8 take 2\.\d+ to 8.*",
        ),
        (
            9.0,
            ("all",),
            None,
            r"the budget does not count, keep some dense, such as --rule '\*\.down_proj=keep'\.",
        ),
        (
            9.0,
            None,
            "vllm",
            r"the budget does not count, keep some dense, such as --rule '\*\.down_proj=keep'\.",
        ),
    ],
)
def test_a_budget_out_of_reach_is_told_what_reaches_it(
    bits: float, formats: tuple[str, ...] | None, engine: str | None, remedy: str
) -> None:
    """By side, and never what was tried."""
    budget = Budget(BitsPerWeight(bits), formats)
    options = QuantizeOptions(RecipeOptions(method="rtn"), budget, DATA, device="cpu", engine=engine)
    with pytest.raises(UsageError, match=rf"{bits:g} bits per weight are out of reach: .* {remedy}$") as e:
        plan(STORIES, options)
    assert "--formats all." not in str(e.value)


def test_what_an_error_suggests_reaches_the_budget() -> None:
    budget = Budget(BitsPerWeight(1.5), ("fast", "binary"))
    options = QuantizeOptions(RecipeOptions(method="rtn"), budget, DATA, device="cpu")
    assert plan(STORIES, options)[1].bits_per_weight["linears"] <= 1.5
