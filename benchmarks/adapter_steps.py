"""Time steps of LoRA on a packed model and on the dense one, and their GPU memory, at Llama-3.1 8B's shapes.

    python benchmarks/adapter_steps.py [--layers 32] [--batch 1,4] [--length 512] [--steps 8] [--json FILE]

Weights and tokens are random. PEFT puts rank 8 on all linears, and transformers' Trainer trains in bfloat16
with gradient checkpointing. The packed model has an int8 head. The time is the median of all steps but the
first two. Memory is what torch's allocator holds on a GPU at most, with the weights; 0 on a CPU.
docs/guide/adapters.md shows the stored run.
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
    """Train a LoRA for some steps on random tokens; return the time of a step and the memory."""
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
    each = [later - earlier for earlier, later in pairwise(clock.ended)][WARM - 1 :]
    found = {
        "seconds_per_step": median(each),
        "seconds": each,
        "peak_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "weight_bytes": weights,
    }
    adapted.unload()
    print(json.dumps(found), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both, print the figures, and store them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=numbers, default=[1, 4], help="sequences of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8)
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
    # In memory the weights are written to a temporary directory, packed and loaded.
    found = {"dense": {batch: steps(model, batch, asked) for batch in asked.batch}}
    packed = quantkit.quantize_model(
        model, format=asked.format, method="rtn", lm_head="int8", check=False, progress=True
    )
    del model
    found["packed"] = {batch: steps(packed, batch, asked) for batch in asked.batch}
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
