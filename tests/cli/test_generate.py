"""`quantkit generate`: what it says, where it stops, and what it refuses."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import quantkit
from quantkit.runtime.chat import chat_tokens
from quantkit.runtime.unpacked import unpacked

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


CHAT = (
    "{% for one in messages %}<{{ one['role'] }}>{{ one['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(packed: Path, directory: Path, template: str) -> Path:
    """A copy of `packed` whose tokenizer has this chat template."""
    shutil.copytree(packed, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def ending_at_once(directory: Path, prompt: list[int]) -> None:
    """Have the first token that the model takes after the tokens `prompt` end its texts."""
    model = quantkit.load(directory, device="cpu")
    first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))


def test_a_chat_is_the_answer_to_the_prompt_in_the_template(run: Run, packed: Path, tmp_path: Path) -> None:
    chat = with_template(packed, tmp_path / "chat", CHAT)
    done = run("generate", chat, " Tell a story. ", "--chat", "-n", 8, "--json")
    result = json.loads(done.out)
    words = AutoTokenizer.from_pretrained(chat)
    ids = words("<user>Tell a story.</s><assistant>", add_special_tokens=False)["input_ids"]
    expected = quantkit.load(chat, device="cpu").generate(torch.tensor([ids]), max_new_tokens=8)[0].tolist()
    assert (result["prompt_tokens"], ids + result["tokens"]) == (len(ids), expected)
    assert result["text"] == words.decode(expected)[len(words.decode(ids)) :]
    # The prompt is no part of the answer, at once or at the end.
    for more in ((), ("--verbose",)):
        done = run("generate", chat, "Tell a story.", "--chat", "-n", 8, *more)
        assert (done.code, done.out) == (0, result["text"] + "\n")
    assert run("generate", chat, "Tell a story.", "-n", 8).out.startswith("Tell a story.")


@pytest.mark.parametrize(
    ("template", "code", "message"),
    [
        (None, 2, " has no chat template (chat_template.jinja or tokenizer_config.json), so it continues"),
        (
            "{{ raise_exception('a system message first') }}",
            3,
            "fails (TemplateError: a system message first)",
        ),
        ("{{ messages[7].content.x }}", 3, "chat_template.jinja: the chat template fails (UndefinedError: "),
        ("{{ messages[0].__class__.__mro__ }}", 3, "chat_template.jinja: the chat template fails (Security"),
        ("{{ 'hello' }}", 3, "chat_template.jinja: the chat template does not write what a user says"),
    ],
)
def test_a_model_that_cannot_chat_says_why(
    run: Run, packed: Path, tmp_path: Path, template: str | None, code: int, message: str
) -> None:
    chat = packed if template is None else with_template(packed, tmp_path / "chat", template)
    done = run("generate", chat, "Hello", "--chat")
    assert (done.code, done.out) == (code, "")
    assert f"error: {chat}" in done.err and message in done.err and "eave out --chat." in done.err
    assert run("generate", chat, "Hello", "-n", 2).code == 0


def test_a_blank_question_is_refused(run: Run, packed: Path, tmp_path: Path) -> None:
    chat = with_template(packed, tmp_path / "chat", CHAT)
    done = run("generate", chat, " \n", "--chat")
    assert (done.code, done.out) == (2, "") and "the prompt is blank; write what the user says." in done.err


def test_a_chat_model_that_ends_at_once_is_noted(run: Run, packed: Path, tmp_path: Path) -> None:
    chat = with_template(packed, tmp_path / "chat", CHAT)
    words = AutoTokenizer.from_pretrained(chat)
    ending_at_once(chat, words("Hello")["input_ids"])
    said = f"{chat} ended the text at once. It has a chat template; add --chat to ask it."
    done = run("generate", chat, "Hello")
    assert done.code == 0 and done.out.startswith("Hello")
    assert f"note: {said}\n1 token\n" in done.err and "tokens/s" not in done.err
    page = Path(__file__).parents[2] / "docs" / "guide" / "troubleshooting.md"
    assert f"\nnote: {said}\n".replace(str(chat), "DIR") in page.read_text()
    done = run("generate", chat, "Hello", "--json")
    assert said in json.loads(done.out)["notes"] and done.err == ""
    # Not of a text of more tokens, of one that --max-new-tokens ends, or of a model without a template.
    more = run("generate", chat, "Once upon", "-n", 4)
    assert "4 tokens, " in more.err and " tokens/s" in more.err and "at once" not in more.err
    assert "at once" not in run("generate", chat, "Once upon", "-n", 1).err
    (chat / "chat_template.jinja").unlink()
    assert "at once" not in run("generate", chat, "Hello").err


def test_a_chat_that_ends_at_once_is_not_told_to_chat(run: Run, packed: Path, tmp_path: Path) -> None:
    chat = with_template(packed, tmp_path / "chat", CHAT)
    ending_at_once(chat, chat_tokens(AutoTokenizer.from_pretrained(chat), "Hello")[0].tolist())
    done = run("generate", chat, "Hello", "--chat")
    assert done.code == 0 and "1 token\n" in done.err and "at once" not in done.err


def test_weights_that_no_kernel_takes_are_noted_as_by_bench(
    run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = unpacked(quantkit.load(packed, device="cpu"), 1)
    assert json.loads(run("generate", packed, "One", "-n", 2, "--json").out)["notes"] == list(lines)
    monkeypatch.setattr("quantkit.runtime.unpacked.unpacked", lambda model, rows: (f"slow at M={rows}",))
    assert run("generate", packed, "One", "-n", 2).err.count("note: slow at M=1\n") == 1


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
