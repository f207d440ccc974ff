"""Train a LoRA on a packed model and on the dense one, merge the first, and print what each step costs.

    python benchmarks/adapters.py MODEL TEXT --work DIR [--steps 40] [--json FILE]

Both adapters are trained by PEFT and transformers' Trainer on the beginning of a text of another domain, on
the same samples in the same order, and scored on samples after it. The adapter of the packed model is then
merged, from the original weights and from the packed ones, and compared on the text after those samples with
the packed model and the adapter beside it. docs/guide/adapters.md shows the stored run.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from machine import cpu_machine, machine

import quantkit
from quantkit.calibrate.data.documents import read_text
from quantkit.model.tokenizer import tokenize, tokenizer

#: Tokens of a sample, samples of a step, and samples that are scored.
LENGTH, BATCH, HELD_OUT = 128, 4, 16
#: Characters of the text after the samples on which merged models are compared, at most.
COMPARED = 100_000


def divided(text: str, tokens: torch.Tensor, steps: int) -> tuple[torch.Tensor, str]:
    """Samples to train on and, in the last `HELD_OUT` rows, to score; and the text after them.

    Ends the script if the text has too few tokens for that.
    """
    rows = steps * BATCH + HELD_OUT
    needed = rows * LENGTH
    if len(tokens) < 2 * needed:
        raise SystemExit(
            f"the text has {len(tokens)} tokens, and {steps} steps take {2 * needed} with what is compared "
            "after them. Give a longer text or fewer --steps."
        )
    # Where in the text the samples end is told by their share of the tokens; a tenth is left out between.
    begin = int(len(text) * (needed / len(tokens) + 0.1))
    return tokens[:needed].view(rows, LENGTH), text[begin:][:COMPARED]


def train(model: Any, rows: torch.Tensor, steps: int, work: Path) -> tuple[Any, dict[str, Any]]:
    """Train a LoRA on all linears of `model`; return both, and the losses before and after."""
    samples = [{"input_ids": row, "labels": row} for row in rows]
    transformers.set_seed(0)
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    arguments = transformers.TrainingArguments(
        work,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=model.device.type == "cpu",
    )
    trainer = transformers.Trainer(adapted, arguments, train_dataset=samples[:-HELD_OUT])
    losses = [trainer.evaluate(samples[-HELD_OUT:])["eval_loss"]]
    begin = time.perf_counter()
    trainer.train()
    seconds = (time.perf_counter() - begin) / steps
    losses.append(trainer.evaluate(samples[-HELD_OUT:])["eval_loss"])
    return adapted, {"losses": losses, "seconds_per_step": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, merge, print the figures, and store them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="an empty directory")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--method", default="mse")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", default="float32", help="of activations, and of the dense model")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    asked.work.mkdir(parents=True, exist_ok=True)
    packed, adapter = asked.work / "packed", asked.work / "adapter"
    text = read_text(asked.text)
    tokens = tokenize(tokenizer(asked.model), text)
    rows, after = divided(text, tokens, asked.steps)
    compared = asked.work / "compared.txt"
    compared.write_text(after, encoding="utf-8")
    quantkit.quantize(asked.model, packed, format=asked.format, method=asked.method)
    trained: dict[str, Any] = {}
    dense = quantkit.load(asked.model, dtype=asked.dtype)
    _, trained["dense"] = train(dense, rows, asked.steps, asked.work / "run-dense")
    adapted, trained["packed"] = train(
        quantkit.load(packed, dtype=asked.dtype), rows, asked.steps, asked.work / "run-packed"
    )
    adapted.save_pretrained(adapter)
    merged: dict[str, Any] = {}
    for name, from_packed in (("original", False), ("packed", True)):
        found = quantkit.merge(
            packed, adapter, asked.work / f"merged-{name}", text=compared, from_packed=from_packed
        ).text
        assert found is not None
        merged[name] = {
            "kl_mean": found.kl_mean,
            "perplexity": found.perplexity,
            "beside": found.reference_perplexity,
        }
    names = asked.model.name, asked.text.name
    figures = {
        "command": " ".join(("python benchmarks/adapters.py", *names, f"--steps {asked.steps}")),
        "machine": machine() if torch.cuda.is_available() else cpu_machine(),
        "peft": peft.__version__,
        "model": names[0],
        "text": names[1],
        "packed": f"{asked.format}, {asked.method}",
        "steps": asked.steps,
        "tokens_per_step": BATCH * LENGTH,
        "trained": trained,
        "merged_from": merged,
    }
    print(json.dumps(figures, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
