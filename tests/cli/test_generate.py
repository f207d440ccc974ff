"""`quantkit generate`: what it says, where it stops, and what it refuses."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import Run


def test_generate_prints_tokens_and_times_as_json(run: Run, packed: Path) -> None:
    done = run("generate", packed, "Once upon a time", "-n", 6, "--json")
    assert done.err == ""
    result = json.loads(done.out)
    assert len(result["tokens"]) == 6
    assert result["prompt_tokens"] == 5
    assert result["decode_seconds"] > 0
    assert result["end"] == "max_new_tokens"

    def sampled(seed: int) -> str:
        return run("generate", packed, "One", "-n", 12, "--temperature", 2, "--seed", seed).out

    assert sampled(1) == sampled(1) != sampled(2)
    done = run("generate", packed, "One", "-n", 2, "--verbose")
    assert done.out.startswith("One")
    assert os.environ["QUANTKIT_VERBOSE"] == "1"


def test_generate_stops_where_positions_end(run: Run, packed: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(packed, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 12}))
    done = run("generate", short, "Once upon a time", "-n", 100)
    assert done.code == 0
    assert "note: stopped at 7 of 100 tokens: the model has no more positions" in done.err


def test_generate_says_what_a_quantized_cache_leaves_as_it_is(run: Run, packed: Path, tmp_path: Path) -> None:
    assert run("generate", packed, "One", "-n", 2, "--kv-cache", "int8", "--json").err == ""
    shutil.copytree(packed, tmp_path / "mistral")
    config = json.loads((packed / "config.json").read_text())
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4}
    (tmp_path / "mistral" / "config.json").write_text(json.dumps(config | mistral))
    done = run("generate", tmp_path / "mistral", "One", "-n", 2, "--kv-cache", "int8")
    assert done.code == 0
    assert "note: 5 of 5 layers have a sliding window" in done.err


def test_what_a_model_refuses_while_it_generates_is_an_error(
    run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise ValueError("a cache of its own")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", refused)
    done = run("generate", packed, "One", "-n", 2, "--json")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: ") and "ValueError: a cache of its own" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0"), "Invalid value for '--max-new-tokens'"),
        (("--temperature", "-1"), "Invalid value for '--temperature'"),
        (("--temperature", "nan"), "Invalid value for '--temperature'"),
        (("--seed", str(1 << 64)), f"seed is {1 << 64}; use 0 to {(1 << 63) - 1}."),
        (("--kv-cache", "int3"), "unknown KV cache format 'int3'"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
        (("--device", "tpu"), "unknown device 'tpu'"),
    ],
)
def test_wrong_options_of_generate(run: Run, packed: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("generate", packed, "hi", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
