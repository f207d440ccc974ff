"""Divergence of a distilled model whose loss counts hidden states too.

    python benchmarks/intermediate_loss.py MODEL --calibration mixed.jsonl --text books.txt [--json FILE]

int2 in groups of 64 with e4m3 scales, steps of 8 x 128 tokens on a CPU. Each `--weight` w gets a row:
the loss is KL + w x the mean over blocks of mean((student - original)^2) / var(original) of their outputs.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import command, cpu_machine

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.checkpoint.manifest import read_manifest
from quantkit.eval.evaluate import evaluate
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.loss import divergence
from quantkit.quantization.distill.training import Training
from quantkit.quantizing import quantize

BATCH, LENGTH = 8, 128


def gradients(weight: float) -> Callable[[Training, torch.Tensor], torch.Tensor]:
    """Return `Training._gradients` with a loss on hidden states beside KL; the result is the KL alone."""

    def of(training: Training, tokens: torch.Tensor) -> torch.Tensor:
        student, total = training.student, torch.zeros(1)
        student.weights.collect()
        found: list[torch.Tensor] = []

        def keep(_: Any, __: Any, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)

        hooks = [block.register_forward_hook(keep) for block in student.blocks]
        for part in training._parts(tokens):
            found.clear()
            target = student.target(part)
            originals = list(found)
            found.clear()
            with torch.enable_grad():
                loss = divergence(student.logits(part), target) / tokens.numel()
                pairs = zip(found, originals, strict=True)
                hidden = torch.stack([(mine - one).square().mean() / one.var() for mine, one in pairs]).mean()
                (loss + weight * hidden * part.numel() / tokens.numel()).backward()
            total += loss.detach()
        for hook in hooks:
            hook.remove()
        return total

    return of


def main() -> None:
    """Train and evaluate once per weight, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--weight", type=float, action="append", help="default: 0, 0.1 and 1")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    run: dict[str, Any] = {"command": command(), "machine": cpu_machine(), "steps": asked.steps, "rows": []}
    plain = Training._gradients
    for weight in asked.weight or (0.0, 0.1, 1.0):
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "model"
            Training._gradients = gradients(weight) if weight else plain  # type: ignore[method-assign]
            quantize(
                asked.model, out, format="int2", group_size=64, scale_dtype="e4m3", method="distill",
                calibration=CalibrationOptions(asked.calibration, length=LENGTH), device="cpu", check=False,
                distillation=DistillOptions(steps=asked.steps, batch=BATCH),
            )  # fmt: skip
            facts = read_manifest(out)["distillation"]
            report = evaluate(
                out, against=asked.model, texts=asked.text, window=1024, max_windows=8, device="cpu"
            )
        texts = {name: text.kl_mean for name, text in report.texts.items()}
        run["rows"].append({"weight": weight, "held_out": facts["kl_after"], "texts": texts})
        run["before"] = facts["kl_before"]
        print(run["rows"][-1], flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
