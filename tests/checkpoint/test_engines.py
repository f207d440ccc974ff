"""The table of engines says of each scheme what the engines' own code answered."""

import json
from pathlib import Path

import pytest

from quantkit.checkpoint.compressed_tensors import compressed_tensors_format
from quantkit.checkpoint.engine_support import SUPPORT, refusals, support
from quantkit.checkpoint.engines import (
    BLOCK,
    ENGINES,
    OTHER_BLOCKS,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    Engine,
    Stored,
)

from ..compat.engines import KINDS, SCHEMES, VERSIONS, key_of, scheme_of

ANSWERS = json.loads((Path(__file__).parents[1] / "compat" / "engine_answers.json").read_text())
BY_NAME = {"vllm": VLLM, "sglang": SGLANG}


#: SGLang has no parameter for `weight_packed` of mxfp4 experts; the loader of vLLM's heads asserts as many
#: scales as tokens; its kernels for fp8 are those of blocks of 128x128; and the
#: classes of vLLM 0.26.0 for experts stop at other than 4 and 8 bits when they are made or filled. In 0.32.0
#: `select_wna16_moe_backend` has none for 8 bits with zero-points, Humming for 2, 3, 5, 6 and 7 in groups,
#: and stops at channels of these. It was asked with every backend for NVIDIA GPUs there.
TAKEN_BUT_NOT_LOADED = {
    (SGLANG, "experts", "mxfp4-pack-quantized", "group", 4),
    (VLLM, "lm_head", "float-quantized", BLOCK, 8),
    (VLLM, "lm_head", "float-quantized", OTHER_BLOCKS, 8),
    (VLLM, "linear", "float-quantized", OTHER_BLOCKS, 8),
    *(
        (VLLM, "experts", "pack-quantized", how, bits)
        for how in ("group", "channel")
        for bits in (2, 3, 5, 6, 7)
    ),
}


#: Engines that take these round inputs in another way, or were not tried: format, strategy, activations.
ROUNDED_OTHERWISE = {
    *((VLLM, "pack-quantized", how, "int8 token") for how in ("group", "channel")),
    (VLLM, "pack-quantized", "channel", "fp8-e4m3 token"),
    *(
        (SGLANG, "pack-quantized", how, x)
        for how in ("group", "channel")
        for x in ("int8 token", "fp8-e4m3 token")
    ),
    *((engine, "float-quantized", BLOCK, "fp8-e4m3 token") for engine in (VLLM, SGLANG)),
    *((engine, "float-quantized", OTHER_BLOCKS, "fp8-e4m3 g128") for engine in (VLLM, SGLANG)),
    *(
        (engine, "float-quantized", how, "fp8-e4m3 g128")
        for engine in (VLLM, SGLANG)
        for how in ("channel", "tensor")
    ),
    (SGLANG, "mxfp4-pack-quantized", "group", "fp4-e2m1 g32 e8m0"),
    *(
        (engine, "float-quantized", how, "fp8-e4m3 tensor")
        for engine in (VLLM, SGLANG)
        for how in (BLOCK, OTHER_BLOCKS)
    ),
}


def stored(case: tuple[str, object, str], kind: str) -> Stored:
    made = scheme_of(case)
    return compressed_tensors_format(made, 256).stored_as("a", kind, made, (256, 256))


def test_every_version_that_the_table_names_was_asked():
    named = [f"{name}=={version}" for name, engine in BY_NAME.items() for version in engine.tried]
    assert named == list(VERSIONS) == list(ANSWERS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", SCHEMES, ids=key_of)
def test_the_table_says_what_the_engine_answered(version, case):
    engine = BY_NAME[version.partition("==")[0]]
    answers = ANSWERS[version][key_of(case)]
    for kind in KINDS:
        one = stored(case, kind)
        row = support(engine, one)
        unread = (engine, kind, one.format, one.strategy, one.bits) in TAKEN_BUT_NOT_LOADED
        unread |= (engine, one.format, one.strategy, one.activations) in ROUNDED_OTHERWISE
        # The kernel of vLLM for these asks for groups of 128.
        unread |= (one.format, one.activations) == ("pack-quantized", "fp8-e4m3 token") and (
            one.group_size != 128
        )
        unread |= (engine, kind, one.bits, one.symmetric) == (VLLM, "experts", 8, False)
        assert row.classes == (() if answers[kind][0] == "!" or unread else (answers[kind],))
        if kind == "linear":
            # A linear fused of parts that are listed by name is not taken for one by its class.
            assert answers["mixed linear"] == answers[kind]
        if kind == "experts":
            assert (row.classes != () and not row.alone) == (
                answers["mixed experts"][0] != "!" and not unread
            )


def test_every_row_is_met_by_a_scheme_and_each_refusal_has_a_remedy():
    met = set()
    for case in SCHEMES:
        for kind in KINDS:
            one = stored(case, kind)
            met |= {support(engine, one) for engine in ENGINES}
    assert met == set(SUPPORT)
    for row in SUPPORT:
        assert row.classes or row.instead.endswith("."), row


#: Rows of README.md: formats, strategies and widths.
README = {
    "int4, int8 per group or channel": ("pack-quantized", ("group", "channel"), (4, 8)),
    "int2, and int3, int5, int6, int7 with `--packing stream`": (
        "pack-quantized",
        ("group", "channel"),
        (2, 3, 5, 6, 7),
    ),
    "integers per tensor": ("pack-quantized", ("tensor",), (2, 3, 4, 5, 6, 7, 8)),
    "fp8 per channel or tensor": ("float-quantized", ("channel", "tensor"), (8,)),
    "fp8 per group": ("float-quantized", ("group",), (8,)),
    "fp8 per block of 128x128": ("float-quantized", ("block",), (8,)),
    "mxfp8": ("mxfp8-quantized", ("group",), (8,)),
    "mxfp4": ("mxfp4-pack-quantized", ("group",), (4,)),
    "nvfp4": ("nvfp4-pack-quantized", ("tensor_group",), (4,)),
}


def cell(engine: Engine, format: str, strategies: tuple[str, ...], widths: tuple[int, ...]) -> str:
    rows = {
        kind: {support(engine, Stored("a", kind, format, one, bits)) for one in strategies for bits in widths}
        for kind in KINDS
    }
    read = tuple(all(row.classes for row in rows[kind]) for kind in KINDS)
    if any(row.alone for row in rows["experts"]):
        return "experts only beside int4 and int8"
    names = {(True, True, True): "yes", (True, False, True): "not experts", (False, False, False): "no"}
    return {**names, (True, False, False): "not experts, not lm_head"}[read]


def test_the_guide_shows_the_table():
    text = (Path(__file__).parents[2] / "docs" / "guide" / "transformers.md").read_text()
    for label, how in README.items():
        assert f"| {' | '.join([label, *(cell(engine, *how) for engine in ENGINES)])} |\n" in text
    assert f"{VLLM}, {SGLANG} and {TRANSFORMERS}" in text


def test_an_engine_is_called_by_the_versions_that_were_tried():
    assert str(Engine("vLLM", ("0.26.0", "0.32.0", "0.33.0"))) == "vLLM 0.26.0 to 0.33.0"
    assert str(Engine("SGLang", ("0.5.23",))) == "SGLang 0.5.23"


def text_of(*layers: Stored) -> list[str]:
    return [str(refusal) for refusal in refusals(layers)]


FP8_GROUPS = (
    f"{VLLM} and {SGLANG} cannot load fp8 with scales per group: a and 1 more. "
    "Choose scales per channel: -g channel."
)
FP8_EXPERTS = (
    f"{VLLM} cannot load fp8 experts with 16-bit inputs: e. Give the experts int8, mxfp8 or nvfp4, such as "
    "--rule '*.experts.*=int8'.",
    f"{SGLANG} cannot load fp8 experts with 16-bit inputs: e. Give all linears int8 or nvfp4.",
)


@pytest.mark.parametrize(
    ("layers", "texts"),
    [
        ([("linear", "float-quantized", "channel"), ("experts", "pack-quantized", "group")],
         [f"{SGLANG} cannot load integer experts beside linears of another format: e. "
          "Give all linears int4 or int8."]),
        ([("linear", "float-quantized", "group"), ("lm_head", "float-quantized", "group")], [FP8_GROUPS]),
        ([("experts", "float-quantized", "channel")], [*FP8_EXPERTS]),
        ([("linear", "float-quantized", "block"), ("lm_head", "float-quantized", "block")],
         [f"{VLLM} cannot load an lm_head of fp8 in blocks, because it wants a scale for every token: a. "
          "Give it scales per channel, such as --lm-head fp8.",
          f"{SGLANG} cannot load fp8 in blocks: a and 1 more. Choose scales per channel: -g channel."]),
        ([("linear", "float-quantized", "other blocks")],
         [f"{VLLM} cannot load fp8 in other than whole blocks of 128x128: a. "
          "Choose scales per channel: -g channel.",
          f"{SGLANG} cannot load fp8 in blocks: a. Choose scales per channel: -g channel."]),
        ([("linear", "mxfp8-quantized", "group")], [f"{SGLANG} cannot load mxfp8: a. Choose int8 or nvfp4."]),
        ([("linear", "mxfp4-pack-quantized", "group"), ("experts", "mxfp4-pack-quantized", "group")],
         [f"{SGLANG} cannot load mxfp4: a. Choose int4 or nvfp4.",
          f"{SGLANG} cannot load mxfp4 experts, because its class for them has other names for the codes: e. "
          "Choose int4 or nvfp4."]),
        ([("linear", "pack-quantized", "tensor")],
         [f"{VLLM} and {SGLANG} cannot load integers with one scale per tensor: a. "
          "Choose scales per channel or group: -g channel or -g 128."]),
        ([("linear", "pack-quantized", "group", 3), ("experts", "pack-quantized", "group", 2)],
         [f"{VLLM} cannot load experts of 2, 3, 5, 6 or 7 bits, because 0.26.0 has experts of 4 and 8 bits "
          "only, and 0.32.0 takes Humming for them, which was not run: e. Give the experts int4 or int8, "
          "such as --rule '*.experts.*=int8'.",
          f"{SGLANG} cannot load integers of 2, 3, 5, 6 or 7 bits: a and 1 more. "
          "Give all linears int4 or int8."]),
        ([("experts", "nvfp4-pack-quantized", "tensor_group")],
         [f"{TRANSFORMERS} cannot load nvfp4 experts without quantkit, because it drops their global scales, "
          "and says nothing: e. There give the experts int4 or mxfp4."]),
        ([("experts", "mxfp8-quantized", "group")],
         [f"{SGLANG} cannot load mxfp8: e. Choose int8 or nvfp4.",
          f"{TRANSFORMERS} cannot load mxfp8 experts without quantkit: e. "
          "There give the experts int8 or mxfp4."]),
        ([("linear", "pack-quantized", "group"), ("experts", "pack-quantized", "channel")], []),
        ([("linear", "new", "row")],
         [f"{VLLM} and {SGLANG} and {TRANSFORMERS} cannot load linear in new with scales per row, because "
          "it was not tried: a. Choose another format or group size."]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_said_of_each_refusal(layers, texts):
    assert (
        text_of(*(Stored("e" if kind == "experts" else "a", kind, *(*rest, 4)[:3]) for kind, *rest in layers))
        == texts
    )
