"""Time `generate` of a packed model with and without a LoRA of PEFT beside it, on the shapes of Llama-3.1 8B.

    python benchmarks/adapter_decode.py --json FILE [--layers 32] [--batch 1,16]

The weights are random. The LoRA is on all linears of the blocks. The model is quantized in memory by `rtn`.
Times are of one `generate` of `--new-tokens` with a prompt of 128 tokens: the least of `--repeats`, after one
that is not counted. "switched off" is the model with the adapter disabled.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import peft
import torch
from machine import command, machine
from transformers import LlamaConfig, LlamaForCausalLM
from whole_model import SIZES, parsed

import quantkit

PROMPT, RANK = 128, 16


def seconds(model: Any, batch: int, tokens: int) -> float:
    """Return the time of a `generate` of as many new tokens."""
    given = torch.randint(1000, (batch, PROMPT), device=model.device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    model.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    options = parsed(parser, arguments)
    torch.manual_seed(0)
    with torch.device(options.device):
        dense = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, dtype="bfloat16", **SIZES))
    packed = quantkit.quantize_model(dense.to(torch.bfloat16).eval(), format="int4", method="rtn")
    config = peft.LoraConfig(
        r=RANK, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    rows = []
    alone = {batch: seconds_of(packed, batch, options) for batch in options.batch}
    adapted = peft.get_peft_model(packed, config).eval()
    for batch in options.batch:
        found = {"alone": alone[batch], "adapter": seconds_of(adapted, batch, options)}
        with adapted.disable_adapter():
            found["switched off"] = seconds_of(adapted, batch, options)
        for kind, taken in found.items():
            rows.append(
                {"kind": kind, "batch": batch, "tokens_per_second": batch * options.new_tokens / taken}
            )
            print(json.dumps(rows[-1]), flush=True)
    record = {
        "machine": machine(),
        "command": command(),
        "layers": options.layers,
        "rank": RANK,
        "rows": rows,
    }
    options.json.write_text(json.dumps(record | {"peft": peft.__version__}, indent=1) + "\n")


def seconds_of(model: Any, batch: int, options: argparse.Namespace) -> float:
    """Return the least time of `--repeats` after one that is not counted."""
    seconds(model, batch, options.new_tokens)
    return min(seconds(model, batch, options.new_tokens) for _ in range(options.repeats))


if __name__ == "__main__":
    main()
