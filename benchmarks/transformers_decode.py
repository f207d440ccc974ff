"""Tokens a second of a dense model by transformers alone: what quantkit's figures are compared with.

    python benchmarks/transformers_decode.py SRC [--ways eager,compiled] [--prompt 512] [--new-tokens 256] \\
        [--repeats 3] [--json decode.json]

`eager` is `generate` as it is; `compiled` has a static cache, and the forward that torch compiled with CUDA
graphs, in one graph (`mode="reduce-overhead"`, `fullgraph=True`). quantkit is not imported. Tokens a second
are those after the first: what a generation of all takes more than one of a single token.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"cache_implementation": "static"},
}


def main() -> None:
    """Parse the command line, decode each way, print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="SRC")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, CompileConfig

    model = AutoModelForCausalLM.from_pretrained(
        arguments.directory, dtype=torch.bfloat16, device_map=arguments.device
    ).eval()
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(arguments.prompt, device=model.device)[None] * 7919 % rows
    compiling = CompileConfig(mode="reduce-overhead", fullgraph=True)
    found = {}
    for way in arguments.ways.split(","):
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **WAYS[way]}
        options |= {"compile_config": compiling} if way == "compiled" else {"disable_compile": True}

        def seconds(tokens: int, options: dict[str, Any] = options) -> float:
            started = time.perf_counter()
            made = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
            # On the host, when the device is done.
            assert len(made.tolist()[0]) == arguments.prompt + tokens
            return time.perf_counter() - started

        # The first generations compile, and record.
        for tokens in (arguments.new_tokens, arguments.new_tokens, 1):
            seconds(tokens)
        if way == "compiled" and not hasattr(model, "_compiled_call"):
            raise SystemExit("transformers compiled no forward; it says why above")
        taken = [seconds(arguments.new_tokens) - seconds(1) for _ in range(arguments.repeats)]
        if min(taken) <= 0:
            raise SystemExit(f"{way}: one token took as long as all; give more --new-tokens")
        tokens_a_second = [(arguments.new_tokens - 1) / one for one in taken]
        found[way] = tokens_a_second
        low, high = min(tokens_a_second), max(tokens_a_second)
        print(
            f"{way}: {statistics.median(tokens_a_second):.1f} tokens/s ({low:.1f} to {high:.1f})", flush=True
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
