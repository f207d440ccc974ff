"""`quantization_config`: it survives JSON, foreign readers accept it, and nonsense is refused."""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig as PeerConfig

from quantkit.checkpoint.compressed_tensors import (
    _match,
    compressed_tensors_format,
    why_not_compressed_tensors,
)
from quantkit.checkpoint.quantization_config import Assignment, QuantizationConfig, changed_config
from quantkit.errors import CheckpointError
from quantkit.packing.formats import CodebookFormat
from quantkit.packing.schemes import Scheme, scheme

INT4, INT8, FP6 = scheme("int4"), scheme("int8"), scheme("fp6")
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
CUSTOM = Scheme(CodebookFormat("thirds", 2, book=(-1.0, -0.25, 0.5)), 32)


def linear(name: str, scheme: Scheme | None, columns: int = 256) -> Assignment:
    return Assignment(name, (name,), (64, columns), scheme)


EXPRESSIBLE = [linear("a.q", INT4), linear("a.k", INT4), linear("b", INT8), linear("lm_head", None)]
KINDS = [
    linear("a", scheme("nvfp4")),
    linear("b", scheme("int4", zero_point="float")),
    linear("c", scheme("int3", scale_dtype=E8M0)),
    linear("d", CUSTOM),
]
INEXPRESSIBLE = [linear("a.q", FP6), linear("a.k", FP6), linear("b", INT4), linear("lm_head", None)]


def written(assignments: Sequence[Assignment]) -> dict[str, Any]:
    config = QuantizationConfig.from_assignments(assignments)
    return json.loads(json.dumps(config.to_dict(assignments)))


def peer_groups(assignments: Sequence[Assignment]) -> dict[tuple[str, ...], Any]:
    """What compressed-tensors itself understands, by targets."""
    parsed = PeerConfig.model_validate(written(assignments))
    return {tuple(group.targets): group.weights for group in parsed.config_groups.values()}


@pytest.mark.parametrize(
    "assignments",
    [EXPRESSIBLE, INEXPRESSIBLE, [linear("a", None)], [], [linear("a", FP6)], KINDS],
    ids=["compressed-tensors", "quantkit", "dense", "empty", "uniform", "every kind"],
)
def test_every_scheme_survives_json(assignments: list[Assignment]) -> None:
    config = QuantizationConfig.from_assignments(assignments)
    read = QuantizationConfig.from_dict(written(assignments))
    assert read == config
    assert [read.scheme_of(a.module) for a in assignments] == [a.scheme for a in assignments]


def test_the_commonest_scheme_is_the_default_and_is_not_listed() -> None:
    config = QuantizationConfig.from_assignments(EXPRESSIBLE)
    assert config.default == INT4
    assert config.modules == {"b": INT8, "lm_head": None}
    assert written(EXPRESSIBLE)["quantkit"] == {
        "version": 1,
        "schemes": [INT4.to_dict(), INT8.to_dict()],
        "default": 0,
        "modules": {"b": 1, "lm_head": None},
    }


def test_one_inexpressible_layer_makes_the_whole_container_our_own() -> None:
    assert written(EXPRESSIBLE)["quant_method"] == "compressed-tensors"
    assert written([*EXPRESSIBLE, linear("c", FP6)])["quant_method"] == "quantkit"
    assert set(written(INEXPRESSIBLE)) == {"quant_method", "quantkit"}


@pytest.mark.parametrize(
    ("scheme", "columns", "reason"),
    [
        (INT4, 256, None),
        (INT8, 250, None),
        (scheme("int4", zero_point="integer"), 256, None),
        (INT4, 100, None),  # one short group is the whole row
        (
            INT4,
            200,
            "compressed-tensors needs groups that divide 200, not 128; --group-size channel does",
        ),
        (INT4, 576, "compressed-tensors needs groups that divide 576, not 128; --group-size 64 does"),
        (
            scheme("int4", group_size=64),
            1072,
            "compressed-tensors needs groups that divide 1072, not 64; --group-size 16 does",
        ),
        (FP6, 256, "compressed-tensors has no fp6-e2m3"),
        (scheme("binary"), 256, "compressed-tensors has no binary"),
        (
            scheme("int5"),
            256,
            "compressed-tensors has int5 only in the packing 'stream', this is 'bits'",
        ),
        *[(scheme(f"int{bits}", packing="stream"), 256, None) for bits in (3, 5, 6, 7)],
        (scheme("int2"), 256, None),
        (
            scheme("int2", zero_point="integer"),
            256,
            "compressed-tensors has no integer zero-points of int2 that vLLM 0.26.0 reads",
        ),
        (scheme("nvfp4"), 256, None),
        (scheme("nvfp4"), 16, None),  # one group is the row
        (
            scheme("nvfp4"),
            8,
            "compressed-tensors has e4m3 scales for fp4-e2m1 only in groups of 16, this is g8",
        ),
        (scheme("nvfp4"), 40, "compressed-tensors needs groups that divide 40, not 16"),
        (
            scheme("nvfp4", group_size=32),
            256,
            "compressed-tensors has e4m3 scales for fp4-e2m1 only in groups of 16, this is g32",
        ),
        (
            replace(scheme("nvfp4"), global_scale=False),
            256,
            "compressed-tensors has only a global scale for fp4-e2m1",
        ),
        (scheme("mxfp4"), 256, None),
        (scheme("mxfp8"), 256, None),
        (
            scheme("mxfp8", group_size="channel"),
            256,
            "compressed-tensors has e8m0 scales for fp8-e4m3 only in groups of 32, this is channel",
        ),
        (scheme("mxfp6"), 256, "compressed-tensors has no fp6-e2m3"),
        (scheme("fp4"), 256, "compressed-tensors has no bfloat16 scales for fp4-e2m1"),
        (scheme("fp8"), 256, None),
        (scheme("fp8", group_size=64, scale_dtype=torch.float16), 256, None),
        (
            scheme("fp8", group_size=64),
            100,
            "compressed-tensors needs groups that divide 100, not 64; --group-size channel does",
        ),
        (scheme("fp8", group_size="tensor"), 100, None),
        (replace(scheme("fp8"), group_size=64, group_rows=64), 256, None),
        (
            replace(scheme("fp8"), group_size=64, group_rows=64),
            100,
            "compressed-tensors needs groups that divide 100, not 64",
        ),
        (
            replace(scheme("int8"), group_size=64, group_rows=64),
            256,
            "compressed-tensors has no scales of blocks for int8",
        ),
        (scheme("int4", group_size="tensor"), 101, None),
        (scheme("int8", group_size="tensor"), 101, None),
        (
            scheme("fp8", group_size="tensor"),
            102,
            "compressed-tensors stores 102 codes of fp8-e4m3 a row without padding to whole words",
        ),
        (scheme("int5", group_size="tensor", packing="stream"), 256, None),
        (
            scheme("fp8"),
            250,
            "compressed-tensors stores 250 codes of fp8-e4m3 a row without padding to whole words",
        ),
        (scheme("fp8", scale_dtype=E4M3), 256, "compressed-tensors has no e4m3 scales for fp8-e4m3"),
        (scheme("fp8-e5m2"), 256, "compressed-tensors has no fp8-e5m2"),
        (scheme("int4", zero_point="float"), 256, "compressed-tensors has no float zero-points"),
        (scheme("int8", zero_point="float"), 256, "compressed-tensors has no float zero-points"),
        (scheme("int4", scale_dtype=E4M3), 256, "compressed-tensors has no e4m3 scales for int4"),
        (scheme("int8", scale_dtype=E8M0), 256, "compressed-tensors has no e8m0 scales for int8"),
        (scheme("int4", scale_dtype=torch.float32), 256, None),
        (replace(INT4, global_scale=True), 256, "compressed-tensors has no global scale for int4"),
        (replace(INT4, planes=2), 256, "compressed-tensors has no sums of 2 values"),
        (replace(INT4, column_scale=True), 256, "compressed-tensors has no scales per input feature"),
        (scheme("book4"), 256, "compressed-tensors has no codebook4"),
        (scheme("ternary", packing="radix"), 256, "compressed-tensors has no ternary"),
        (replace(scheme("mxfp4"), planes=2), 256, "compressed-tensors has no sums of 2 values"),
        (
            replace(scheme("fp8"), column_scale=True),
            256,
            "compressed-tensors has no scales per input feature",
        ),
        (CUSTOM, 256, "compressed-tensors has no thirds"),
    ],
)
def test_why_not_compressed_tensors(scheme: Scheme, columns: int, reason: str | None) -> None:
    assert why_not_compressed_tensors(scheme, columns) == reason
    expected = "compressed-tensors" if reason is None else "quantkit"
    assert written([linear("a", scheme, columns)])["quant_method"] == expected


def test_compressed_tensors_understands_the_arguments() -> None:
    weights = peer_groups([linear("a", INT4)])[("Linear",)]
    assert (weights.num_bits, weights.symmetric, weights.strategy, weights.group_size) == (
        4,
        True,
        "group",
        128,
    )
    weights = peer_groups([linear("a", scheme("int8", zero_point="integer"))])[("Linear",)]
    assert (weights.num_bits, weights.symmetric, weights.strategy) == (8, False, "channel")
    weights = peer_groups([linear("a", INT4, columns=100)])[("Linear",)]
    assert weights.strategy == "channel"


def test_rows_of_exactly_one_group_share_the_configuration_of_longer_rows() -> None:
    groups = peer_groups([linear("gate", INT4, columns=256), linear("down", INT4, columns=128)])
    assert [(targets, weights.group_size) for targets, weights in groups.items()] == [(("Linear",), 128)]


def test_a_linear_that_sglang_fuses_is_found_by_name_before_its_class() -> None:
    parts = [f"b.0.self_attn.{one}_proj" for one in "qkv"]
    kept = [
        "b.1.mlp.gate_proj",
        "b.1.mlp.up_proj",
        "b.1.mlp.experts.0.gate_proj",
        "b.1.mlp.experts.0.up_proj",
    ]
    others = [linear(f"b.{layer}.o_proj", INT4) for layer in range(9)]
    data = written([*others, *(linear(one, INT8) for one in parts), *(linear(one, None) for one in kept)])
    most, few = (group["targets"] for group in data["config_groups"].values())
    assert most == ["Linear"]
    assert few == [*parts, r"re:b\.0\.self_attn\.q(kv)?_proj$"]
    assert data["ignore"] == [*kept, r"re:b\.1\.mlp\.gate(_up)?_proj$"]
    for pattern, whole in ((few[-1], "b.0.self_attn.qkv_proj"), (data["ignore"][-1], "b.1.mlp.gate_up_proj")):
        assert re.match(pattern.removeprefix("re:"), whole)
    # A model of another class has the patterns of its own names.
    modules = {one: f"m.{one}" for one in parts}
    changed = changed_config(data, dict.fromkeys(modules.values(), INT8), {m: o for o, m in modules.items()})
    assert r"re:m\.b\.0\.self_attn\.q(kv)?_proj$" in changed["config_groups"]["group_1"]["targets"]


@pytest.mark.parametrize(
    ("body", "head", "expected"),
    [
        (INT4, INT4, {("Linear", "lm_head"): 4}),
        (INT4, INT8, {("Linear",): 4, ("lm_head",): 8}),
        (None, INT8, {("Linear", "lm_head"): 8}),
    ],
)
def test_a_packed_head_is_named_as_engines_do_not_take_it_for_a_linear(body, head, expected) -> None:
    assignments = [linear("a.q", body), linear("a.k", body), replace(linear("lm_head", head), head=True)]
    groups = peer_groups(assignments)
    assert {targets: weights.num_bits for targets, weights in groups.items()} == expected
    assert written(assignments)["ignore"] == ([] if body else ["a.q", "a.k"])


def test_only_the_commonest_group_targets_the_class_and_the_others_exact_names() -> None:
    groups = peer_groups(EXPRESSIBLE)
    assert {targets: weights.num_bits for targets, weights in groups.items()} == {("Linear",): 4, ("b",): 8}


def test_groups_are_named_by_what_is_stored() -> None:
    experts = Assignment("m.experts.gate_up", ("m.experts.0.gate", "m.experts.0.up"), (64, 256), INT8)
    groups = peer_groups([linear("a", INT4), linear("b", INT4), linear("c", INT4), experts])
    assert set(groups) == {("Linear",), experts.stored}
    read = QuantizationConfig.from_dict(written([linear("a", INT4), linear("b", INT4), experts]))
    assert read.scheme_of("m.experts.gate_up") == INT8


def test_dense_layers_are_ignored_under_both_names() -> None:
    dense = Assignment("m.experts.down", ("m.experts.0.down", "m.experts.1.down"), (64, 256), None)
    parsed = PeerConfig.model_validate(written([linear("a", INT4), dense, linear("lm_head", None)]))
    assert parsed.ignore == ["m.experts.down", "m.experts.0.down", "m.experts.1.down", "lm_head"]
    assert parsed.format == "pack-quantized"
    assert parsed.quantization_status == "compressed"


def test_a_compressed_tensors_configuration_needs_its_assignments() -> None:
    config = QuantizationConfig.from_assignments(EXPRESSIBLE)
    with pytest.raises(ValueError, match="cannot be written without its assignments"):
        config.to_dict()
    own = QuantizationConfig.from_assignments(INEXPRESSIBLE)
    assert own.to_dict() == own.to_dict(INEXPRESSIBLE)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "version is 2; this quantkit reads version 1. Upgrade quantkit"),
    ({"version": True}, "version is True; this quantkit reads version 1"),
    ({"version": None}, "version is None"),
    ({"schemes": {}}, "'schemes' is dict; expected a JSON array"),
    ({"schemes": ["int4"]}, "quantkit.schemes: a scheme has the fields"),
    ({"schemes": [{**INT4.to_dict(), "format": "int17"}]}, "schemes: unknown number format 'int17'"),
    ({"schemes": [{**INT4.to_dict(), "format": {"kind": "posit"}}]}, "schemes: a number format is a name or"),
    ({"default": 7}, "quantkit.default is 7; expected null or the number of one of the 2 schemes"),
    ({"default": -1}, "quantkit.default is -1"),
    ({"default": False}, "quantkit.default is False"),
    ({"modules": []}, "'modules' is list; expected a JSON object"),
    ({"modules": {"b": "int4"}}, "quantkit.modules['b'] is 'int4'; expected null or the number"),
    ({"surprise": 1}, "quantkit has the keys ['default', 'modules', 'schemes', 'surprise', 'version']"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_wrong_section_is_refused(change: dict[str, Any], message: str) -> None:
    data = copy.deepcopy(written(EXPRESSIBLE))
    data["quantkit"].update(change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        QuantizationConfig.from_dict(data)


@pytest.mark.parametrize("key", ["version", "schemes", "default", "modules"])
def test_a_missing_key_is_refused(key: str) -> None:
    data = written(EXPRESSIBLE)
    del data["quantkit"][key]
    with pytest.raises(CheckpointError, match="version"):
        QuantizationConfig.from_dict(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "no section 'quantkit' (quant_method 'gptq'): the checkpoint was not",
        ),
        ({"quant_method": "quantkit", "quantkit": 4}, "'quantkit' is int; expected a JSON object"),
        (
            {**written(INEXPRESSIBLE), "quant_method": "awq"},
            "quant_method is 'awq'; a quantkit checkpoint has one",
        ),
        ([], "'quantization_config' is list; expected a JSON object"),
    ],
)
def test_a_foreign_configuration_is_refused(data: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        QuantizationConfig.from_dict(data)


def test_rows_are_searched_once_for_each_kind_of_matrix() -> None:
    """A mixture of experts has thousands of matrices of one scheme, and `plan` asks for each."""
    asked = _match.cache_info()
    found = {compressed_tensors_format(scheme("int4"), 7 * 128) for _ in range(1000)}
    assert len(found) == 1
    assert _match.cache_info().misses <= asked.misses + 1
