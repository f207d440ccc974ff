"""`quantkit generate`: text from a packed or dense checkpoint."""

from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import err, print_json


def generate(
    directory: options.Source,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    verbose: options.Verbose = False,
    json: options.Json = False,
) -> None:
    """Continue PROMPT with the model in DIRECTORY."""
    from quantkit.cli.models import open_model
    from quantkit.model.generate import generate as run

    model, tokenizer = open_model(directory, device, dtype, verbose=verbose)
    if not json:
        print(prompt, end="", flush=True)
    result = run(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        on_text=None if json else lambda text: print(text, end="", flush=True),
    )
    if json:
        print_json(
            {
                "text": result.text,
                "tokens": list(result.tokens),
                "prompt_tokens": result.prompt_tokens,
                "prefill_seconds": result.prefill_seconds,
                "decode_seconds": result.decode_seconds,
                "tokens_per_second": result.tokens_per_second,
            }
        )
        return
    print()
    err.print(f"{len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s", style="dim")
