"""Names that there are not: every option whose value is a name says which one was likely meant."""

import re
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit import meant
from quantkit.calibrate.data.texts import parse_sources
from quantkit.calibrate.summaries import SUMMARIES
from quantkit.cli import app
from quantkit.errors import SYNONYMS, FormatError, UsageError, closest_name, unknown_name
from quantkit.packing.presets import DEFAULT_FORMAT, PRESETS, SCHEMES, ZERO_POINT_NAMES
from quantkit.quantization.keywords import QuantizeKeywords
from quantkit.runtime.cache.kv_formats import KV_FORMATS

from .conftest import SOURCE, Run

PLAN = ("plan", SOURCE, "--threads", 1)
EXPORT = ("export", SOURCE, "missing", "--to")
GGUF = "quantize, then `quantkit export OUT DIR --to gguf`"


@pytest.mark.parametrize(
    ("arguments", "code", "end"),
    [
        ((*PLAN, "--format", "in4"), 4, "unknown format 'in4'; known are {formats}. Did you mean int4?"),
        ((*PLAN, "--format", "INT4"), 4, "Did you mean int4?"),
        *(
            ((*PLAN, "--format", name), 4, f"{name} is a method: --method {name} --format int4.")
            for name in ("awq", "gptq", "hqq")
        ),
        ((*PLAN, "--format", "q4_k_m"), 4, f"of GGUF files: {GGUF}, which chooses the type by the format."),
        ((*PLAN, "--format", "gguf"), 4, f"gguf is a layout: {GGUF}."),
        ((*PLAN, "--format", "w4a16"), 4, "W4A16 is a scheme: --scheme W4A16."),
        ((*PLAN, "--format", "3bit"), 4, "For integers of 3 bits: --format int3."),
        ((*PLAN, "--format", "2.5"), 4, "For 2.5 bits per weight on average: --bits-per-weight 2.5."),
        ((*PLAN, "--format", "fp16"), 4, "--rule PATTERN=keep leaves those it matches as they are."),
        ((*PLAN, "--format", "bitsandbytes"), 4, "--format nf4."),
        ((*PLAN, "--rule", "*=in4"), 4, "Did you mean int4?"),
        ((*PLAN, "--lm-head", "awq"), 4, "awq is a method: --method awq --format int4."),
        ((*PLAN, "--scheme", "w4a16"), 2, "unknown scheme 'w4a16'; known are {schemes}. Did you mean W4A16?"),
        ((*PLAN, "--scheme", "int4"), 2, "int4 is a format: --format int4."),
        ((*PLAN, "--method", "gtpq"), 2, "unknown method 'gtpq'; known are {methods}. Did you mean gptq?"),
        ((*PLAN, "--method", "int4"), 2, "int4 is a format: --format int4."),
        ((*PLAN, "--method", "quarot"), 2, "To rotate the weights first: --rotate."),
        ((*PLAN, "--method", "autoround"), 2, "Did you mean signround?"),
        ((*PLAN, "--zero-point", "asym"), 2, "Did you mean integer?"),
        ((*PLAN, "--packing", "strem"), 2, "Did you mean stream?"),
        ((*PLAN, "--scale-dtype", "fp16"), 2, "Did you mean float16?"),
        ((*PLAN, "--activations", "fp-8"), 2, "Did you mean fp8?"),
        ((*PLAN, "--activations", "bf16"), 2, "That is the default: leave the option out."),
        ((*PLAN, "--engine", "vlm"), 2, "unknown engine 'vlm'; known are vllm, sglang. Did you mean vllm?"),
        (
            (*PLAN, "--device", "gpu"),
            2,
            "unknown device 'gpu'; known are auto, cpu, cuda. Did you mean cuda?",
        ),
        *(
            ((*PLAN, "--fit", "1GB", "--formats", given), 2, f"Did you mean {name}?")
            for given, name in {
                "engin": "engine",
                "int4,fats": "fast",
                "al": "all",
                "ENGINE": "engine",
                "in4:64": "int4",
                "w8a8": "W8A8",
            }.items()
        ),
        ((*PLAN, "--fit", "1GB", "--formats", "awq"), 2, "awq is a method: --method awq --format int4."),
        (("generate", SOURCE, "hi", "--dtype", "bf16"), 2, "Did you mean bfloat16?"),
        (("generate", SOURCE, "hi", "--kv-cache", "int44"), 2, "Did you mean int4?"),
        (("generate", SOURCE, "hi", "--kv-cache", "fp16"), 2, "That is the default: leave the option out."),
        (("bench", SOURCE, "--mode", "eagre"), 2, "Did you mean eager?"),
        ((*EXPORT, "gguff"), 2, "unknown target 'gguff'; known are gptq, awq, gguf, mlx. Did you mean gguf?"),
        ((*EXPORT, "llama.cpp"), 2, "Did you mean gguf?"),
        ((*EXPORT, "int4"), 2, "int4 is a format: `quantkit quantize SOURCE OUT --format int4`."),
        (("formats", "nf3"), 4, "Did you mean nf4?"),
    ],
)
def test_a_value_that_there_is_not_names_the_one_that_was_meant(
    run: Run, arguments: tuple[object, ...], code: int, end: str
) -> None:
    done = run(*arguments)
    names = {"formats": ", ".join(PRESETS), "schemes": ", ".join(SCHEMES), "methods": ", ".join(SUMMARIES)}
    assert (done.code, done.out) == (code, "")
    assert done.err.endswith(end.format(**names) + "\n")
    assert done.err.count("Did you mean") <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", SOURCE, "--bits", 4), "No such option: --bits. For integers of 4 bits: --format int4."),
        (("plan", SOURCE, "--bits=2.5"), "For 2.5 bits per weight on average: --bits-per-weight 2.5."),
        (("plan", SOURCE, "--wbits", 3), "For integers of 3 bits: --format int3."),
        (("plan", SOURCE, "--w_bit", 3, "--gptq"), "For integers of 3 bits: --format int3."),
        (("plan", SOURCE, "--bits", 1), "For 1 bit: --format binary."),
        (("plan", SOURCE, "--bits"), "Use --format int4."),
        (("plan", SOURCE, "--bits", "int7"), "Use --format int7."),
        (("plan", SOURCE, "--load-in-8bit", "--rotate"), "Use --format int8."),
        (("plan", SOURCE, "--quantization", "awq"), "awq is a method: --method awq --format int4."),
        (("plan", SOURCE, "--algo", "awq"), "Use --method awq."),
        (("plan", SOURCE, "--groupsize", 64), "Use --group-size 64."),
        (("plan", SOURCE, "--groupsize", -1), "For a scale per row: --group-size channel."),
        (("plan", SOURCE, "--sym", "--rotate"), "Use --zero-point none."),
        (("plan", SOURCE, "--gptq"), "No such option: --gptq. Use --method gptq."),
        (("quantize", "--model", SOURCE), "No such option: --model. SOURCE is the first argument."),
        (("quantize", SOURCE, "--output", "x"), "--output. OUT is an argument, not an option."),
        (
            ("eval", SOURCE, "--kv_cache_dtype", "fp8"),
            "No such option: --kv_cache_dtype. Use --kv-cache fp8.",
        ),
        (("plan", SOURCE, "--dataset", "{a}.txt"), "Use --calibration {a}.txt."),
        (("plan", SOURCE, "--output", "x"), "No such option: --output"),
        (("formats", "--bits", 4), "No such option: --bits"),
        (("plan", SOURCE, "--grop-size", 4), "--group-size"),
        (("chat", SOURCE), "No such command 'chat'. Did you mean 'generate --chat'?"),
        (("quantise", SOURCE), "No such command 'quantise'. Did you mean 'quantize'?"),
    ],
)
def test_options_and_commands_of_other_tools_are_known(
    run: Run, arguments: tuple[object, ...], message: str
) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert ("Use" in done.err.partition("No such")[2]) == ("Use" in message)


@pytest.mark.parametrize(
    ("given", "error", "end"),
    [
        ({"bits": 4}, TypeError, 'For integers of 4 bits: format="int4".'),
        ({"wbits": 3}, TypeError, 'For integers of 3 bits: format="int3".'),
        ({"bits": 2.5}, TypeError, "For 2.5 bits per weight on average: bits_per_weight=2.5."),
        ({"q_group_size": 64}, TypeError, "Use group_size=64."),
        ({"sym": False}, TypeError, 'With a zero-point per group: zero_point="integer".'),
        ({"dataset": "/data/{a}.txt"}, TypeError, 'Use calibration="/data/{a}.txt".'),
        ({"dataset": "hf:allenai/c4"}, TypeError, 'Use calibration="hf:allenai/c4".'),
        ({"dataset": "my data.jsonl"}, TypeError, 'Use calibration="my data.jsonl".'),
        ({"asym": False}, TypeError, "unexpected keyword argument 'asym'."),
        ({"format": ".5"}, FormatError, "For .5 bits per weight on average: bits_per_weight=.5."),
        ({"ignore": ["lm_head"]}, TypeError, 'Use rules=["PATTERN=keep"].'),
        ({"fromat": "int4"}, TypeError, "Did you mean 'format'?"),
        ({"nonsense": 4}, TypeError, "unexpected keyword argument 'nonsense'."),
        ({"format": "awq"}, FormatError, 'awq is a method: method="awq", format="int4".'),
        ({"format": "in4"}, FormatError, "Did you mean int4?"),
        ({"format": 4}, FormatError, 'For integers of 4 bits: format="int4".'),
        ({"method": "int4"}, UsageError, 'int4 is a format: format="int4".'),
        ({"method": "quarot"}, UsageError, "To rotate the weights first: rotate=True."),
        ({"scheme": "gguf"}, UsageError, f"gguf is a layout: {GGUF}."),
    ],
)
def test_python_gives_the_same_advice_as_keyword_arguments(
    given: dict[str, Any], error: type[Exception], end: str, tmp_path: Path
) -> None:
    for call in (
        lambda: quantkit.quantize(SOURCE, tmp_path / "out", **given),
        lambda: quantkit.plan(SOURCE, **given),
    ):
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).endswith(end)
    assert not (tmp_path / "out").exists()


def test_what_is_advised_is_there(run: Run) -> None:
    helps = {name: run(name, "--help").out for name in ("quantize", "plan", "export", "generate", "eval")}
    every = " ".join(helps.values())
    for advice in (*(row.option for row in meant.OPTIONS), *(row.advice for row in meant.MEANT)):
        for option in re.findall(r"--[\w-]+", advice):
            assert f"{option} " in every, advice
    keywords = QuantizeKeywords.__annotations__
    for row in meant.MEANT:
        assert {*re.findall(r"(\w+)=(?!keep)", meant.in_python(row.advice))} <= {*keywords}, row
    assert app.app.registered_commands
    commands = {one.name or getattr(one.callback, "__name__", "") for one in app.app.registered_commands}
    assert {name.split()[0] for name in meant.COMMANDS.values()} <= commands
    assert not set(meant.COMMANDS) & commands


def test_names_of_tables_are_those_that_commands_take() -> None:
    assert [*meant.FORMATS] == [*PRESETS] and [*meant.SCHEMES] == [*SCHEMES]
    assert [*meant.METHODS] == [*SUMMARIES] and [*meant.KV_FORMATS] == [*KV_FORMATS]
    assert [*meant.ZERO_POINTS] == [*ZERO_POINT_NAMES]
    assert meant.advice_on("format", "AWQ") == f"awq is a method: --method awq --format {DEFAULT_FORMAT}."
    assert [*meant.Names("of no table")] == []


def test_a_name_is_suggested_only_if_one_is_likeliest() -> None:
    known = ("int8", "int4", "float16")
    assert [closest_name(name, known) for name in ("in4", "INT8", "fp16", "int9", "zstd", "")] == [
        *("int4", "int8", "float16"),
        *(None, None, None),
    ]
    assert closest_name("int4" * 10**6, known) is None
    assert not set(SYNONYMS) & {*SUMMARIES, *SCHEMES}


def test_an_unknown_name_is_an_error_of_the_kind_asked_for() -> None:
    error = unknown_name("format", "x", ("a", "b"), remedy="Check it.", error=FormatError)
    assert type(error) is FormatError and str(error) == "unknown format 'x'; known are a, b. Check it."
    assert error.unknown is not None and error.unknown.suggestion == ""
    assert UsageError("x").unknown is None


def test_calibration_texts_are_suggested_too() -> None:
    with pytest.raises(UsageError, match=r"Give one, or a data set of the hub as hf:allenai/c4/en\.$"):
        parse_sources("C4")
    missing = SOURCE.parent / "storeis.txt"
    with pytest.raises(UsageError, match=rf"is not there\. Did you mean {SOURCE.parent / 'stories.txt'}\?$"):
        parse_sources(str(missing))
    with pytest.raises(UsageError, match=r"is not there\. Check the path\.$"):
        parse_sources("missing/a.txt")
