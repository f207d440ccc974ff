"""What engines make of a packed directory: classes, sizes of tensor parallelism, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint import engines
from quantkit.checkpoint.engine_support import support
from quantkit.checkpoint.engines import (
    SGLANG,
    VLLM,
    Engine,
    Reordered,
    Stored,
    asked_engine,
    installed_beside,
)
from quantkit.checkpoint.safetensors_header import read_json
from quantkit.errors import CheckpointError, UsageError
from quantkit.quantization.plan_warnings import reader_notes
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize_checkpoint
from quantkit.recipes.recipe_options import RecipeOptions
from quantkit.runtime.saved_model import read_record
from quantkit.verification.engine import RANKS, EngineReport, engine_report
from quantkit.verification.readers import stored_assignments

from ..quantization.test_plan import write
from ..tiny.sizes import SIZES, made_once


def packed(directory: Path, family: str = "llama", *, tied: bool = False, **options: Any) -> Path:
    """A tiny model, quantized without a search."""
    out = directory / "packed"
    recipe = RecipeOptions(method="rtn", **options)

    def make() -> None:
        quantize_checkpoint(write(directory, family), out, QuantizeOptions(recipe, check=False))

    made_once(out, ("engine", family, recipe), make)
    return out


def report_of(directory: Path, engine: Engine = VLLM, version: str = "") -> EngineReport:
    return engine_report(directory, engine, version or engine.tried[-1])


def test_each_linear_has_the_class_of_the_table(tmp_path):
    rules = ("*.o_proj=mxfp8", "*.self_attn.*=fp8")
    found = report_of(packed(tmp_path, format="int4", group_size="channel", rules=rules, lm_head="int8"))
    assert found.refusals == () and found.to_dict()["ok"] is True
    by_name = {name: (layer.kind, layer.scheme, layer.reads) for name, layer in found.layers.items()}
    wna16, fp8 = "CompressedTensorsWNA16", "CompressedTensorsW8A16Fp8"
    assert by_name["model.layers.0.self_attn.q_proj"] == ("linear", "fp8-e4m3 channel bfloat16", fp8)
    assert by_name["model.layers.0.mlp.up_proj"] == ("linear", "int4 channel bfloat16", wna16)
    assert by_name["model.layers.1.self_attn.o_proj"][2] == "CompressedTensorsW8A8Mxfp8"
    assert by_name["lm_head"] == ("lm_head", "int8 channel bfloat16", wna16)
    (note,) = found.notes
    assert note == (
        "CompressedTensorsW8A8Mxfp8 of vLLM on Blackwell GPUs quantizes x too, so accuracy is not what "
        "quantkit measures: model.layers.0.self_attn.o_proj and 1 more."
    )
    assert len(by_name) == 2 * 7 + 1
    assert json.loads(json.dumps(found.to_dict()))["tensor_parallel"]["1"] is None


def test_rows_that_an_engine_reorders_without_their_zero_points(tmp_path):
    def refusals_of(directory: Path, kind: str, engine: Engine) -> tuple[str, ...]:
        section = read_json(directory / "config.json")["quantization_config"]
        notes = reader_notes({"model_type": kind}, stored_assignments(section, read_record(directory).layers))
        return tuple(note.text for note in notes if engine.name in note.cannot)

    options = {"format": "int4", "group_size": "channel"}
    plain = packed(tmp_path / "plain", **options)
    zeros = packed(tmp_path / "zeros", **options, zero_point="integer")
    assert refusals_of(zeros, "llama", VLLM) == refusals_of(plain, "llama4", VLLM) == ()
    assert refusals_of(zeros, "llama4_text", VLLM) == (
        "vLLM 0.26.0 to 0.33.0 would compute wrong numbers, without an error, of model.layers.0.self_attn."
        "k_proj and 3 more: it reorders their rows as it loads, and weight_zero_point stays as it is. Keep "
        "these, and what is fused with them: --rule '*.q_proj=keep' --rule '*.k_proj=keep' "
        "--rule '*.v_proj=keep'.",
    )
    (of_sglang,) = refusals_of(plain, "llama4", SGLANG)
    assert "SGLang 0.5.23 would compute wrong numbers" in of_sglang and "weight_packed stays" in of_sglang
    linears = Reordered(VLLM, ("bloom",), ("query_key_value",), stops=True)
    qkv, int4 = "h.0.query_key_value", {"weight_packed", "weight_scale", "weight_zero_point"}
    assert linears.unfit(qkv, int4, per_tensor=False) is None
    assert linears.unfit("h.0.dense", {*int4, "weight_shape"}, per_tensor=False) is None
    assert linears.unfit(qkv, {*int4, "weight_shape"}, per_tensor=False) == "weight_shape"
    assert linears.unfit(qkv, {"weight", "weight_scale"}, per_tensor=True) == "weight_scale"


def test_widths_that_one_kernel_of_the_engine_reads(tmp_path):
    rules = ("*.self_attn.*=int2:32", "*.down_proj=int8")
    found = report_of(packed(tmp_path, format="int3", group_size=32, packing="stream", rules=rules))
    assert found.refusals == ()
    by_name = {name: (layer.scheme, layer.reads) for name, layer in found.layers.items()}
    assert by_name["model.layers.0.mlp.up_proj"] == ("int3 g32 stream bfloat16", "CompressedTensorsWNA16")
    assert by_name["model.layers.0.self_attn.q_proj"] == ("int2 g32 bfloat16", "CompressedTensorsWNA16")
    (note,) = found.notes
    assert note == (
        "CompressedTensorsWNA16 of vLLM runs 2, 3, 5, 6 and 7 bits by Humming alone, on NVIDIA GPUs from "
        "Turing on, and was not run there: model.layers.0.mlp.gate_proj and 11 more."
    )
    (refusal,) = report_of(tmp_path / "packed", SGLANG).refusals
    assert "cannot load integers of 2, 3, 5, 6 or 7 bits" in refusal


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=str)
@pytest.mark.parametrize("format", ["int8", "fp8", "nvfp4", "mxfp4", "mxfp8"])
def test_what_is_said_of_experts_is_the_table(tmp_path, engine, format):
    found = report_of(packed(tmp_path, "qwen3_moe", format=format), engine)
    experts = found.layers["model.layers.0.mlp.experts.gate_up_proj"]
    assert (experts.kind, experts.shape, experts.matrices) == ("experts", (32, 64), 8)
    stored = {
        "int8": ("pack-quantized", "channel", 8),
        "fp8": ("float-quantized", "channel", 8),
        "nvfp4": ("nvfp4-pack-quantized", "tensor_group", 4),
        "mxfp4": ("mxfp4-pack-quantized", "group", 4),
        "mxfp8": ("mxfp8-quantized", "group", 8),
    }
    row = support(engine, Stored("e", "experts", *stored[format]))
    assert experts.reads == next(iter(row.classes), None)
    assert bool(found.refusals) == (experts.reads is None)


def test_experts_by_other_names_stop_only_versions_that_do_not_find_them(tmp_path):
    directory = packed(tmp_path, "mixtral", format="int4", group_size=4, rules=("*.0.*.experts.*=int8",))
    assert report_of(directory).refusals == ()
    for engine, version in ((VLLM, "0.26.0"), (SGLANG, "")):
        (refusal,) = report_of(directory, engine, version).refusals
        assert "look for experts by the names" in refusal and "such as w" in refusal


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "int8", "rules": ("*.q_proj=fp8",)},
         ["they fuse these linears, which then need one scheme: model.layers.0.self_attn.q_proj fp8",
          "Match each such set with rules of one format."]),
        ({"format": "int4", "group_size": "tensor"}, ["integers with one scale per tensor", "-g channel"]),
        ({"format": "int5", "group_size": 32},
         ["vLLM alone has no quant_method 'quantkit', and compressed-tensors cannot express this: model.",
          "has int5 only in the packing 'stream', this is 'bits' (one of 14 linears). Choose formats",
          "With quantkit beside vLLM, its plug-in runs this: tried with vLLM 0.26.0 on an "
          "H100 and 0.32.0 on a CPU."]),
    ],
    ids=["fused", "tensor", "own"],
)  # fmt: skip
def test_refusals_say_why_and_what_to_do(tmp_path, options, says):
    found = report_of(packed(tmp_path, **options))
    (refusal,) = found.refusals
    assert all(text in refusal for text in says), refusal


def change(directory: Path, what: Callable[[dict[str, Any]], object]) -> Path:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    what(config["quantization_config"])
    path.write_text(json.dumps(config))
    return directory


@pytest.mark.fault(36)
def test_what_the_engine_would_take_for_something_else_is_refused(tmp_path):
    directory = packed(tmp_path, format="int8", lm_head="int8", rules=("*.0.mlp.down_proj=keep",))
    assert report_of(directory).refusals == ()
    for edit, text in (
        (lambda c: c["config_groups"]["group_0"]["targets"].remove("lm_head"), "take lm_head to be dense"),
        (lambda c: c["ignore"].clear(), "take model.layers.0.mlp.down_proj to be pack-quantized"),
        (
            lambda c: c["ignore"].append("re:.*up_proj"),
            "take model.layers.0.mlp.up_proj and 1 more to be dense",
        ),
        (lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=4), "and 13 more to be pack-"),
        (lambda c: c.update(config_groups=[]), "has no config_groups and ignore as in compressed"),
    ):
        text_before = (directory / "config.json").read_text()
        assert any(text in one for one in report_of(change(directory, edit)).refusals)
        (directory / "config.json").write_text(text_before)


def test_damaged_headers_are_no_answer(tmp_path):
    directory = packed(tmp_path, format="int8")
    change(directory, lambda section: section["quantkit"]["schemes"][0].update(group_size=4))
    with pytest.raises(CheckpointError, match="weight_scale"):
        report_of(directory)


def works(directory: Path) -> dict[int, str | None]:
    return dict(report_of(directory).tensor_parallel)


def test_sizes_of_tensor_parallelism_follow_heads_groups_and_words(tmp_path):
    # 4 heads of 16, 2 of keys, which an engine repeats for 4 ranks; 172 columns of down_proj.
    assert (SIZES["num_attention_heads"], SIZES["num_key_value_heads"]) == (4, 2)
    found = works(packed(tmp_path / "heads", format="int8", rules=("*.down_proj=fp8",)))
    assert tuple(found) == RANKS and [found[ranks] for ranks in (1, 2, 4)] == [None] * 3
    assert found[8].startswith("with 8 ranks each has 8 of the 64 rows of 'model.layers.0.self_attn.q_proj'")
    assert found[8].endswith("which are no whole heads of 16")
    found = works(packed(tmp_path / "words", format="int8"))
    assert found[2].endswith(
        "86 of the 172 columns of 'model.layers.0.mlp.down_proj', which are no whole words of 4 codes"
    )
    options = {"format": "int6", "group_size": 8, "packing": "stream"}
    found = works(packed(tmp_path / "stream", rules=("*.down_proj=fp8",), **options))
    assert found[4] is None  # 64 columns of o_proj are four words of 16 codes.
    found = works(packed(tmp_path / "odd", rules=("*.down_proj=fp8",), **{**options, "format": "int5"}))
    assert found[2] is None and found[4].endswith(
        "16 of the 64 columns of 'model.layers.0.self_attn.o_proj', which are no whole words of 32 codes"
    )
    found = works(packed(tmp_path / "groups", format="int4", group_size=4))
    assert found[1] is None and found[2].endswith("which are no whole groups of 4")


def test_a_row_of_one_group_is_not_cut(tmp_path):
    """The file names its group size, so an engine has a scale for every so many columns of a share."""
    found = works(packed(tmp_path, format="int8", group_size=64, rules=("*.down_proj=fp8",)))
    assert found[2].startswith(
        "with 2 ranks each has 32 of the 64 columns of 'model.layers.0.self_attn.o_proj'"
    )


def test_groups_that_marlin_does_not_take_are_noted(tmp_path):
    (note,) = report_of(packed(tmp_path, format="int4", group_size=4)).notes
    assert note.startswith("Marlin takes groups of 32, 64, 128 or whole rows, not of 4: whether vLLM has")


def test_an_engine_is_asked_for_by_name_and_version():
    assert asked_engine("vllm") == (VLLM, "0.33.0")
    assert asked_engine("vllm==0.26.0") == (VLLM, "0.26.0")
    assert asked_engine("sglang") == (SGLANG, "0.5.23")
    with pytest.raises(UsageError, match="unknown engine 'tgi'; known are vllm, sglang"):
        asked_engine("tgi")
    with pytest.raises(UsageError, match=r"vLLM 0.1 was not tried. Versions that were: 0.26.0, 0.32.0, 0.33"):
        asked_engine("vllm==0.1")


@pytest.mark.parametrize(
    ("installed", "note"),
    [
        (None, None),
        ("0.33.0+cpu", None),
        (
            "0.26.0",
            "vLLM 0.26.0 is installed, and this is about 0.33.0. Ask for it with --engine vllm==0.26.0.",
        ),
        ("0.31.0", "vLLM 0.31.0 is installed, and this is about 0.33.0. It was not tried."),
    ],
)
def test_another_version_that_is_installed_is_said(monkeypatch, installed, note):
    def version(name: str) -> str:
        assert name == "vllm"
        if installed is None:
            raise engines.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(engines, "version", version)
    assert installed_beside(VLLM, "0.33.0") == note
