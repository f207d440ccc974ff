"""Time steps of LoRA on a packed model and on the dense one, and their GPU memory, at Llama-3.1 8B's shapes.

    python benchmarks/adapter_steps.py [--layers 32] [--batch 1,4] [--length 512] [--steps 8] [--turns 3]
        [--json FILE]

Weights and tokens are random. PEFT puts rank 8 on all linears, and transformers' Trainer trains in bfloat16
with gradient checkpointing. The packed model has an int8 head. Each model trains alone first. Memory is what
torch's allocator holds on a GPU at most then, with the weights; 0 on a CPU. Then both train by turns, as the
speed of a shared host drifts by a fifth within a minute. The time is the median of all steps of these turns
but the first two of each. docs/guide/adapters.md shows the stored run.
"""

import argparse
import gc
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import peft
import torch
import transformers
from machine import command, cpu_machine, machine
from whole_model import SIZES, numbers

import quantkit

#: Steps that do not count: the first ones compile kernels and fill caches.
WARM = 2


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ended.append(time.perf_counter())


def steps(model: Any, batch: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Train a LoRA for some steps on random tokens; return the times of steps and the memory."""
    gc.collect()
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_allocated() if on_gpu else 0
    transformers.set_seed(0)
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    rows = torch.randint(1000, (batch * asked.steps, asked.length))
    clock = Clock()
    arguments = transformers.TrainingArguments(
        asked.work,
        max_steps=asked.steps,
        per_device_train_batch_size=batch,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=True,
        use_cpu=not on_gpu,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    samples = [{"input_ids": row, "labels": row} for row in rows]
    transformers.Trainer(adapted, arguments, train_dataset=samples, callbacks=[clock]).train()
    found = {
        "seconds": [later - earlier for earlier, later in pairwise(clock.ended)][WARM - 1 :],
        "peak_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "weight_bytes": weights,
    }
    adapted.unload()
    print(json.dumps(found), flush=True)
    return found


def by_turns(models: dict[str, Any], asked: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Train `models`, which are all on the GPU, by turns; return the seconds of steps by model and batch."""
    found: dict[str, dict[int, list[float]]] = {name: {one: [] for one in asked.batch} for name in models}
    for _ in range(asked.turns):
        for batch in asked.batch:
            for name, model in models.items():
                found[name][batch] += steps(model, batch, asked)["seconds"]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both models, print the figures, and store them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=numbers, default=[1, 4], help="sequences of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--format", default="int4")
    parser.add_argument("--work", type=Path, default=Path("/tmp/adapter-steps"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.manual_seed(0)
    with torch.device(asked.device):
        config = transformers.LlamaConfig(num_hidden_layers=asked.layers, dtype="bfloat16", **SIZES)
        model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16)
    alone = {"dense": {batch: steps(model, batch, asked) for batch in asked.batch}}
    # In memory the weights are written to a temporary directory, packed and loaded.
    packed = quantkit.quantize_model(
        model, format=asked.format, method="rtn", lm_head="int8", check=False, progress=True
    )
    model.to("cpu")
    alone["packed"] = {batch: steps(packed, batch, asked) for batch in asked.batch}
    models = {"dense": model.to(asked.device), "packed": packed}
    found = {
        name: {
            batch: {**alone[name][batch], "seconds": seconds, "seconds_per_step": median(seconds)}
            for batch, seconds in of_model.items()
        }
        for name, of_model in by_turns(models, asked).items()
    }
    figures = {
        "command": command(),
        "machine": machine() if asked.device == "cuda" else cpu_machine(),
        "peft": peft.__version__,
        "layers": asked.layers,
        "length": asked.length,
        "format": asked.format,
        "rows": found,
    }
    print(json.dumps(figures, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
