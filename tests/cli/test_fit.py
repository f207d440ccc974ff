"""`quantkit plan --fit`: sizes are those that are written and cached, and what fits is said to."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from quantkit.cli import console
from quantkit.errors import UsageError
from quantkit.fitting import Need
from quantkit.model.forward.kv_size import cached_tokens, kv_bytes, kv_heads
from quantkit.runtime.load import load

from .conftest import SOURCE, Run

CPU = ("--device", "cpu")
SLIDING = ["sliding_attention"] * 2


def test_sizes_are_those_of_the_plan_and_of_a_real_cache(run: Run) -> None:
    done = run("plan", SOURCE, "--fit", "500KB", "--context", 100, "--batch", 3, *CPU, "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["memory"], found["context"], found["batch"]) == (500_000, 100, 3)
    dense, *rows = found["formats"]
    assert dense["format"] is None and dense["weights"] == 2 * 260032
    (int4,) = [row for row in rows if row["options"] == "--format int4 -g 128"]
    plain = json.loads(run("plan", SOURCE, "--format", "int4", "--json").out)
    assert int4["weights"] == plain["output_bytes"]
    assert int4["bits_per_weight"] == plain["bits_per_weight"]["model"]
    model = load(SOURCE, device="cpu", dtype=torch.bfloat16)
    cache = model(torch.zeros(3, 100, dtype=torch.long), use_cache=True).past_key_values
    held = sum(one.nbytes for layer in cache.layers for one in (layer.keys, layer.values))
    assert {row["kv_cache"] for row in found["formats"]} == {held}
    assert all(row["total"] == row["weights"] + held and row["beside"] == 0 for row in rows)
    assert [row["fits"] for row in rows] == [row["total"] <= 500_000 for row in rows]
    assert len({row["fits"] for row in rows}) == 2


def test_the_most_bits_that_fit_are_proposed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("plan", SOURCE, "--fit", "600KB", "--context", 512, *CPU, "-m", "rtn")
    assert done.code == 0
    line = done.out.splitlines()[-1]
    command = f"quantkit quantize {SOURCE} OUT --format int4 -g 32 --method rtn"
    assert line == f"most bits that fit 600KB: `{command}`"
    assert run(*command.replace("OUT", str(tmp_path / "out")).split()[1:], "--no-check").code == 0
    monkeypatch.setattr(console.out, "width", 80)
    table = run("plan", SOURCE, "--fit", "600KB", *CPU).out
    assert max(map(len, table.splitlines())) <= 80 and "\n--format int4 -g 128 " in table
    assert "nothing fits 100KB: try a shorter --context" in run("plan", SOURCE, "--fit", "100KB", *CPU).out
    assert "most bits that fit 1GB: 16 bits, not packed" in run("plan", SOURCE, "--fit", "1GB", *CPU).out
    gpu = run("plan", SOURCE, "--fit", "1GB", "--device", "cuda").out
    assert "total has 1.21 GB of CUDA's context and workspaces" in gpu and "nothing fits 1GB" in gpu


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fit", "much"), "size 'much' is not a positive number with a unit"),
        (("--fit", "1GB", "--format", "int4"), "--fit chooses the formats, so it does not go with --format"),
        (
            ("--fit", "1GB", "--bits-per-weight", 4),
            "so it does not go with --bits-per-weight.",
        ),
        (("--fit", "1GB", "--formats", "in4"), "--formats in4: unknown format 'in4'"),
        (("--fit", "1GB", "--kv-cache", "int3"), "unknown KV cache format 'int3'"),
        (("--context", 100), "--context is for --fit, the memory that the model must fit. Give that too."),
    ],
)
def test_what_does_not_go_with_fit(run: Run, options: tuple[object, ...], message: str) -> None:
    done = run("plan", SOURCE, *options)
    assert done.code == 2 and done.out == "" and message in done.err


def test_formats_may_be_named(run: Run) -> None:
    out = run("plan", SOURCE, "--fit", "1MB", *CPU, "--formats", "nf4,int8", "--json").out
    assert [row["format"] for row in json.loads(out)["formats"]] == [None, "int8", "nf4"]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("llama", {"num_hidden_layers": 3}, [1000] * 3),
        (
            "gemma3_text",
            {
                "num_hidden_layers": 3,
                "sliding_window": 64,
                "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            },
            [64, 64, 1000],
        ),
        ("qwen3_next", {"num_hidden_layers": 4}, [1000]),
        ("gemma3n_text", {"num_hidden_layers": 4, "num_kv_shared_layers": 2}, None),
    ],
)
def test_layers_cache_what_they_attend_to(
    kind: str, options: dict[str, Any], expected: list[int] | None
) -> None:
    config = AutoConfig.for_model(kind, **options)
    found = cached_tokens(config, 1000)
    assert found == expected if expected is not None else len(found) == 2


def test_a_quantized_cache_takes_its_codes_and_scales() -> None:
    assert Need(10**9, 100).row_bytes(64) == 128
    assert 64 < Need(10**9, 100, kv_cache="int8").row_bytes(64) < 72
    assert 32 < Need(10**9, 100, kv_cache="int4").row_bytes(64) < 48


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_attention_heads": 8, "hidden_size": 64}, (8, 8)),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}, (2, 16)),
        ({"num_key_value_heads": 2, "hidden_size": 64}, None),
        ({"num_attention_heads": [8, 4], "hidden_size": 64}, None),
        ({"num_attention_heads": 8, "num_key_value_heads": [2, 1], "hidden_size": 64}, None),
        ({"num_attention_heads": 8, "head_dim": 0}, None),
        ({}, None),
    ],
    ids=str,
)
def test_heads_of_configs_that_tell_some_of_them(
    config: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    assert kv_heads(SimpleNamespace(**config)) == expected


def test_a_cache_of_unknown_size_is_an_error(tmp_path: Path) -> None:
    config = AutoConfig.for_model("deepseek_v3").to_dict()
    with pytest.raises(UsageError, match=r"it is not known how much a 'deepseek_v3' caches for a token"):
        kv_bytes(config, tmp_path, 100, 1, lambda size: 2 * size)
