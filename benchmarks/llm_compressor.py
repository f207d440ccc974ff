"""Quantize a model by llm-compressor, for `quantkit eval`: the peer of docs/accuracy.md, "Rounded inputs".

    python benchmarks/llm_compressor.py MODEL OUT --calibration mixed.jsonl [--scheme W8A8]

Needs llmcompressor 0.14 in an environment of its own, where `python -m quantkit eval OUT/* --against MODEL`
runs too. Writes OUT/SCHEME for each row of `RECIPES`. Those with data see `--samples` sequences of `--length`
tokens, drawn from the texts of a .jsonl file one after the other.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

LINEARS: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}
#: By scheme, if it takes data, and its recipe: as llm-compressor's own examples have them.
RECIPES: dict[str, tuple[bool, Callable[[], Any]]] = {
    **{
        name: (False, lambda name=name: QuantizationModifier(scheme=name, **LINEARS))
        for name in ("FP8_DYNAMIC", "FP8_BLOCK")
    },
    **{
        name: (True, lambda name=name: QuantizationModifier(scheme=name, **LINEARS))
        for name in ("FP8", "NVFP4")
    },
    "W8A8": (True, lambda: [SmoothQuantModifier(smoothing_strength=0.8), _gptq("W8A8")]),
    **{name: (True, lambda name=name: _gptq(name)) for name in ("W4A8", "W4A16")},
}


def _gptq(scheme: str) -> Any:
    return GPTQModifier(scheme=scheme, **LINEARS)


def sequences(tokenizer: Any, texts: Path, samples: int, length: int) -> Dataset:
    """Return sequences of tokens of the texts, which are joined."""
    ids: list[int] = []
    for line in texts.read_text(encoding="utf-8").splitlines():
        ids += tokenizer(json.loads(line)["text"], add_special_tokens=False).input_ids
    found = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    random.Random(0).shuffle(found)
    found = found[:samples]
    return Dataset.from_dict({"input_ids": found, "attention_mask": [[1] * length for _ in found]})


def main() -> None:
    """Quantize to each scheme."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--scheme", action="append", choices=RECIPES)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dataset = sequences(tokenizer, options.calibration, options.samples, options.length)
    data = {"dataset": dataset, "num_calibration_samples": len(dataset), "max_seq_length": options.length}
    for name in options.scheme or RECIPES:
        takes_data, recipe = RECIPES[name]
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        oneshot(model=model, recipe=recipe(), **(data if takes_data else {}))
        model.save_pretrained(options.out / name, save_compressed=True)
        tokenizer.save_pretrained(options.out / name)


if __name__ == "__main__":
    main()
