"""`quantkit generate`: text from a packed or dense checkpoint."""

from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import err, note, print_json, stream


def generate(
    directory: options.Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="The most tokens to generate.", min=1)
    ] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token, more samples more freely.", min=0)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    kv_cache: options.KvCache = None,
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
    from quantkit.runtime.generate import POSITIONS, collect
    from quantkit.runtime.generate import stream as model_text

    if verbose:
        log_kernels()
    model, tokenizer = open_model(directory, device, dtype)
    # What is logged of the kernels would be in the middle of the text.
    streaming = not json and not verbose
    with enough_memory(directory, "Use --device cpu, or a shorter prompt."), explained(directory):
        chunks = model_text(
            model,
            tokenizer,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            kv_cache=kv_cache,
        )
        if streaming:
            stream(prompt)
        result = collect(chunks, stream if streaming else None)
    if kv_cache is not None:
        from quantkit.runtime.cache.kv_cache import PackedCache

        dense = PackedCache(model.config, kv_cache).note
        if dense is not None:
            note(dense)
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
            }
        )
        return
    stream("\n" if streaming else f"{prompt}{result.text}\n")
    if result.end == POSITIONS:
        note(f"stopped at {len(result.tokens)} of {max_new_tokens} tokens: the model has no more positions")
    err.print(f"{len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s", style="dim")
