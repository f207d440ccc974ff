"""Train a LoRA on a packed model, merge it, and print what merging costs.

The adapter is trained by PEFT and transformers' Trainer on the beginning of a text of another domain, and
scored on windows that come after it.

    python benchmarks/adapters.py MODEL TEXT --work DIR
"""

import argparse
import json
import platform
from pathlib import Path

import peft
import torch
import transformers

import quantkit
from quantkit.calibrate.data.documents import read_text
from quantkit.merging import merge
from quantkit.model.tokenizer import tokenize, tokenizer

LENGTH, HELD_OUT = 128, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="an empty directory")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--method", default="mse")
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    packed, adapter = asked.work / "packed", asked.work / "adapter"
    quantkit.quantize(asked.model, packed, format=asked.format, method=asked.method)
    tokens = tokenize(tokenizer(packed), read_text(asked.text))
    rows = tokens[: (asked.steps * 4 + HELD_OUT) * LENGTH].view(-1, LENGTH)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(quantkit.load(packed, dtype="float32"), config)
    arguments = transformers.TrainingArguments(
        asked.work / "run",
        max_steps=asked.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=samples[:-HELD_OUT])
    losses = [trainer.evaluate(samples[-HELD_OUT:])["eval_loss"]]
    trainer.train()
    losses.append(trainer.evaluate(samples[-HELD_OUT:])["eval_loss"])
    model.save_pretrained(adapter)
    held_out = asked.work / "held-out.txt"
    held_out.write_text(read_text(asked.text)[-400_000:], encoding="utf-8")
    figures = {"losses": losses, "torch": torch.__version__, "machine": platform.processor()}
    for name, from_packed in (("original", False), ("packed", True)):
        merged = merge(packed, adapter, asked.work / name, text=held_out, from_packed=from_packed)
        assert merged.text is not None
        one = merged.text
        figures[name] = {"kl": one.kl_mean, "perplexity": one.perplexity, "adapter": one.reference_perplexity}
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
