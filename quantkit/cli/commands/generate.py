"""`quantkit generate`: text from a packed or dense checkpoint."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from quantkit.cli import options
from quantkit.cli.console import err, note, print_json, stream
from quantkit.cli.records import with_fields


@dataclass(frozen=True)
class TextOptions:
    """Options of `generate` that are arguments of `runtime.generate.stream`.

    chat             PROMPT is what a user says to a chat model; print its answer
    max_new_tokens   the most tokens to generate
    temperature      0 takes the likeliest token, more samples more freely
    seed             of the sampling
    """

    chat: Annotated[bool, typer.Option("--chat")] = False
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128
    temperature: Annotated[float, typer.Option(min=0)] = 0.0
    seed: Annotated[int, typer.Option()] = 0
    kv_cache: options.KvCache = None


@with_fields
def generate(
    directory: options.Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    given: TextOptions,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    verbose: options.Verbose = False,
    json: options.Json = False,
) -> None:
    """Continue a text with a model.

    The text goes to stdout as it comes, the speed to stderr.
    """
    from quantkit.cli.models import log_kernels, open_model
    from quantkit.memory import enough_memory
    from quantkit.model.hf_files import explained
    from quantkit.runtime.generate import collect
    from quantkit.runtime.generate import stream as model_text

    if verbose:
        log_kernels()
    model, tokenizer = open_model(directory, device, dtype)
    # What is logged of the kernels would be in the middle of the text.
    streaming = not json and not verbose
    with enough_memory(directory, "Use --device cpu, or a shorter prompt."), explained(directory):
        chunks = model_text(model, tokenizer, prompt, **vars(given))
        if streaming and not given.chat:
            stream(prompt)
        result = collect(chunks, stream if streaming else None)
    notes = _notes(directory, model, tokenizer, result, given)
    if json:
        print_json(
            {
                "text": result.text,
                "tokens": list(result.tokens),
                "prompt_tokens": result.prompt_tokens,
                "prefill_seconds": result.prefill_seconds,
                "decode_seconds": result.decode_seconds,
                "tokens_per_second": result.tokens_per_second,
                "end": result.end,
                "notes": notes,
            }
        )
        return
    stream("\n" if streaming else f"{'' if given.chat else prompt}{result.text}\n")
    for text in notes:
        note(text)
    count, speed = len(result.tokens), result.tokens_per_second
    length = "1 token" if count == 1 else f"{count} tokens"
    err.print(length if speed is None else f"{length}, {speed:.1f} tokens/s", style="dim")


def _notes(directory: str, model: Any, tokenizer: Any, result: Any, given: TextOptions) -> list[str]:
    """What a user should know of a `Generation` and of how the model runs."""
    from quantkit.model.tokenizer import has_chat_template
    from quantkit.runtime.cache.kv_cache import PackedCache
    from quantkit.runtime.generate import END_OF_TEXT, POSITIONS
    from quantkit.runtime.unpacked import unpacked

    count = len(result.tokens)
    found = list(unpacked(model, 1))
    if given.kv_cache is not None and (dense := PackedCache(model.config, given.kv_cache).note) is not None:
        found.append(dense)
    if result.end == END_OF_TEXT and count == 1 and not given.chat and has_chat_template(tokenizer):
        found.append(f"{directory} ended the text at once. It has a chat template; add --chat to ask it.")
    if result.end == POSITIONS:
        found.append(f"stopped at {count} of {given.max_new_tokens} tokens: the model has no more positions")
    return found
