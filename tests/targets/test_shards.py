"""`export --to gptq`, `awq` and `mlx`: the values of a packed directory in the tensors of other tools."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import CheckpointError
from quantkit.exporting import ExportOptions
from quantkit.targets.mlx_config import TRIED, mlx_config
from quantkit.targets.mlx_types import MODEL_TYPES
from quantkit.verification.against_source import compare_with_source

from ..conftest import Run
from .conftest import Pack

ASYMMETRIC = {"zero_point": "integer", "scale_dtype": "bfloat16"}
#: Target and options of `quantize`, and what the section of config.json has.
HELD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gptq": ({"format": "int4"}, {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}),
    "gptq int8": ({"format": "int8", "group_size": "channel"}, {"bits": 8, "group_size": -1}),
    "gptq int2": ({"format": "int2"}, {"bits": 2, "group_size": 32}),
    "gptq of blocks": ({"format": "int8", "group_size": "16x32"}, {"bits": 8, "group_size": 32}),
    "gptq of int6": ({"format": "int6"}, {"bits": 8, "group_size": 32}),
    "gptq asymmetric": ({"format": "int4", **ASYMMETRIC}, {"sym": False, "checkpoint_format": "gptq"}),
    "awq": ({"format": "int4"}, {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "awq asymmetric": ({"format": "int4", **ASYMMETRIC}, {"bits": 4, "group_size": 32}),
    "awq of int3": ({"format": "int3", "group_size": 64}, {"bits": 4, "group_size": 32}),
    "mlx": ({"format": "int4", "group_size": "channel"}, {"bits": 4, "group_size": 64, "mode": "affine"}),
    **{f"mlx int{bits}": ({"format": f"int{bits}"}, {"bits": bits}) for bits in (2, 3, 5, 6, 8)},
    "mlx asymmetric": ({"format": "int4", **ASYMMETRIC}, {"bits": 4, "group_size": 32}),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"format": "int4", "zero_point": "float"}, "and it has float zero-points; gptq holds integers"),
    "gptq float": ({"format": "nf4"}, "and its values are those of nf4; gptq holds integers"),
    "gptq float32": (
        {"format": "int4", "scale_dtype": "float32"},
        "and not all of its scales are float16 or bfloat16",
    ),
    "gptq head": ({"format": "int4", "lm_head": "int4"}, "it is the head or the token embedding"),
    "gptq mix": (
        {"format": "int4", "rules": ("*.down_proj=int8",)},
        "it is int8 channel bfloat16, most others are 4 bits, and all have one width",
    ),
    "awq": ({"format": "int8"}, "and its values are those of int8; awq holds .* int8 goes to gptq"),
    "awq group": ({"format": "int4", "group_size": 24}, "and its groups of 24 in rows of 96 are of no whole"),
    "mlx": ({"format": "fp8"}, "and its values are those of fp8-e4m3; mlx holds integers"),
    "mlx float32": ({"format": "int4", "scale_dtype": "float32"}, "and not all of its scales are bfloat16"),
}


@pytest.mark.parametrize("name", HELD)
def test_values_are_those_that_low_bit_readers_give(pack: Pack, tmp_path: Path, name: str) -> None:
    target = name.partition(" ")[0]
    options, expected = HELD[name]
    packed = pack(**options)
    result = quantkit.export(packed, tmp_path / "out", target)
    config = json.loads((tmp_path / "out/config.json").read_text())
    section = config["quantization" if target == "mlx" else "quantization_config"]
    assert section.items() >= expected.items()
    compared = compare_with_source(packed, tmp_path / "out")
    assert (compared.packed, compared.problems) == (14, ())
    assert sum(kind.lower().startswith(target) for kind in result.stored.values()) == 14


@pytest.mark.parametrize(("target", "size"), [("awq", 16), ("gptq", 16), ("mlx", 32)])
def test_rows_of_no_whole_groups_are_refused_with_a_rule(
    pack: Pack, tmp_path: Path, target: str, size: int
) -> None:
    """AWQ and GPTQ have whole rows as groups, so only rows of other groups are refused."""
    packed = pack(model={"intermediate_size": 88}, format="int4")
    with pytest.raises(CheckpointError) as e:
        quantkit.export(packed, tmp_path / "out", target)
    assert str(e.value) == (
        f"'model.layers.0.mlp.down_proj' and 1 more cannot be exported to {target} with the same values: "
        f"rows of 88 have no whole groups of {size}, so they cannot be exported as they are. Quantize "
        "with --rule '*.down_proj=keep', which leaves such linears dense, or export to another target."
    )
    dense = pack(model={"intermediate_size": 88}, format="int4", rules=("*.down_proj=keep",))
    assert quantkit.export(dense, tmp_path / "out", target).stored
    if target != "mlx":
        rows = pack(model={"intermediate_size": 88}, format="int4", group_size="channel")
        assert quantkit.export(rows, tmp_path / "rows", target).stored


@pytest.mark.fault(72)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_target_does_not_hold_is_refused_first(pack: Pack, tmp_path: Path, name: str) -> None:
    options, reason = REFUSED[name]
    target = name.partition(" ")[0]
    packed = pack(**options)
    with pytest.raises(CheckpointError, match=rf"^'\S+'.* cannot be exported to {target} .*{reason}"):
        quantkit.export(packed, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, target, readers",
    [
        ({"format": "int4"}, "gptq", ["gptqmodel", "vLLM"]),
        ({"format": "int4", "zero_point": "integer"}, "gptq", ["gptqmodel"]),
        ({"format": "int4", "zero_point": "integer"}, "awq", ["gptqmodel", "vLLM"]),
        ({"format": "int8"}, "gptq", ["gptqmodel"]),
        ({"format": "int2"}, "gptq", []),
        ({"format": "int4"}, "mlx", ["mlx-lm"]),
        ({"arch": "phi3", "format": "int4"}, "mlx", []),
        ({"arch": "qwen2moe", "format": "int4"}, "awq", []),
    ],
)
def test_only_tools_that_were_tried_are_named(
    pack: Pack, tmp_path: Path, run: Run, options: dict[str, Any], target: str, readers: list[str]
) -> None:
    done = run("export", pack(**options), tmp_path / "out", "--to", target)
    assert done.code == 0, done.err
    told = [name for name in ("gptqmodel", "vLLM", "SGLang", "mlx-lm") if name in done.out]
    assert told == readers
    assert ("no other tool was tried" in done.err) == (not readers)
    untried = "mlx-lm 0.32.2 has models of type 'phi3', and none was tried"
    assert (untried in done.err) == (options.get("arch") == "phi3")


def test_zero_points_of_0_take_version_2_of_gptq(sources: Any, tmp_path: Path) -> None:
    """Version 1 stores them less 1, and its readers add 1 to 15 or to -1."""
    source = Path(shutil.copytree(sources("llama"), tmp_path / "source"))
    weights = {name: tensor.abs() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    quantkit.quantize(source, tmp_path / "packed", zero_point="integer", group_size=32, check=False)
    result = quantkit.export(tmp_path / "packed", tmp_path / "out", "gptq")
    assert result.notes == ("a zero-point is 0, which GPTQ of version 1 has not: the format is gptq_v2",)
    section = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert section["checkpoint_format"] == "gptq_v2"


def test_dense_linears_are_left_out_by_name(pack: Pack, tmp_path: Path) -> None:
    packed = pack(format="int4", rules=("*.0.*.o_proj=keep",))
    quantkit.export(packed, tmp_path / "gptq", "gptq")
    quantkit.export(packed, tmp_path / "awq", "awq")
    sections = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        for name in ("gptq", "awq")
    ]
    assert sections[0]["dynamic"] == {r"-:^model\.layers\.0\.self_attn\.o_proj$": {}}
    assert sections[1]["modules_to_not_convert"] == ["model.layers.0.self_attn.o_proj"]


def test_mlx_has_widths_of_its_own_for_layers_and_tables(pack: Pack, tmp_path: Path) -> None:
    packed = pack(
        model={"tie_word_embeddings": True},
        format="int4",
        rules=("*.down_proj=int8",),
        embeddings="int6",
    )
    quantkit.export(packed, tmp_path / "out", "mlx")
    section = json.loads((tmp_path / "out/config.json").read_text())["quantization"]
    assert section["model.layers.1.mlp.down_proj"]["bits"] == 8
    assert section["model.embed_tokens"] == {"bits": 6, "group_size": 64}
    assert compare_with_source(packed, tmp_path / "out").problems == ()


def test_mlx_says_which_models_it_has() -> None:
    def of(kind: str) -> Any:
        return SimpleNamespace(directory=Path("packed"), config={"model_type": kind})

    with pytest.raises(
        CheckpointError, match=r"^packed: model_type is 'falcon', and mlx-lm 0\.32\.2 has no such"
    ):
        mlx_config(of("falcon"))
    assert mlx_config(of("qwen3_moe"))[1] is False and mlx_config(of("llama"))[1] is True
    assert set(TRIED) <= MODEL_TYPES


def test_mlx_finds_rotary_positions_where_its_classes_look(pack: Pack, tmp_path: Path) -> None:
    """mlx-lm took its own base for a Qwen2 saved by transformers 5, and logits were 76 % off."""
    packed = pack("qwen2", format="int4")
    scaled = {"rope_type": "yarn", "rope_theta": 123.0, "factor": 4.0, "partial_rotary_factor": 0.5}
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "rope_parameters": scaled}))
    quantkit.export(packed, tmp_path / "out", "mlx")
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert (found["rope_theta"], found["partial_rotary_factor"]) == (123.0, 0.5)
    assert found["rope_scaling"] == found["rope_parameters"] == scaled


def test_files_are_as_large_as_was_asked(pack: Pack, tmp_path: Path) -> None:
    packed = pack(format="int4")
    result = quantkit.export(packed, tmp_path / "out", "awq", ExportOptions(max_shard_bytes=30_000))
    assert len(result.files) > 2
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    for file in result.files:
        for name in load_file(tmp_path / "out" / file):
            assert index["weight_map"].pop(name) == file
    assert not index["weight_map"]


@pytest.mark.parametrize("bits, target", [(2, "awq"), (3, "gptq"), (5, "gptq"), (7, "mlx")])
def test_zero_points_of_narrow_integers_are_codes_of_wide_ones(
    pack: Pack, tmp_path: Path, bits: int, target: str
) -> None:
    packed = pack(format=f"int{bits}", **ASYMMETRIC)
    quantkit.export(packed, tmp_path / "out", target)
    assert compare_with_source(packed, tmp_path / "out").problems == ()


def test_mlx_has_every_field_and_older_names_of_rotary_embeddings(pack: Pack, tmp_path: Path) -> None:
    """mlx-lm ties embeddings, and takes 10000 for the base of rotary ones, if a file does not say."""
    packed = pack(format="int4")
    config = json.loads((packed / "config.json").read_text())
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    del config["tie_word_embeddings"]
    (packed / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    quantkit.export(packed, tmp_path / "out", "mlx")
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found["tie_word_embeddings"] is False and found["rope_theta"] == 500.0
    assert found["rope_scaling"] == rope
    (packed / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(CheckpointError, match="hidden_act is 'gelu'; mlx-lm computes llama with 'silu'"):
        quantkit.export(packed, tmp_path / "other", "mlx")
    assert not (tmp_path / "other").exists()
