"""Let the original model write samples: text of the kind that it was trained on, as much as is wanted.

Each sample begins with a few tokens of the calibration text. The next tokens are drawn from the model's
predictions as they are, at temperature 1. (LLM-QAT, arXiv 2305.17888, was the first to distill on such text.)
"""

from collections.abc import Iterator
from typing import Any

import torch

#: Samples that are written at a time, by device.
AT_ONCE = {"cpu": 16, "cuda": 1024}
#: Tokens of calibration text at the start of samples; batches take turns.
PREFIXES = (1, 4, 16, 64)


def own_samples(model: Any, windows: torch.Tensor, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of samples, int64 [n, length] on the CPU, without end.

    `windows` are calibration samples, int64 [C, T]. Batch i depends on `seed`, i and the device alone.
    """
    device = next(model.parameters()).device
    at_once, prefixes = AT_ONCE[device.type], [size for size in PREFIXES if size < length]
    number = 0
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        size = prefixes[number % len(prefixes)]
        rows = torch.randint(len(windows), (at_once,), generator=generator)
        starts = torch.randint(windows.shape[1] - size + 1, (at_once,), generator=generator)
        prompts = windows[rows[:, None], starts[:, None] + torch.arange(size)]
        yield _written(model, prompts.to(device), length, seed * 1_000_003 + number).cpu()
        number += 1


def _written(model: Any, prompts: torch.Tensor, length: int, seed: int) -> torch.Tensor:
    from transformers import GenerationConfig

    # No end of text: a sample goes on after it, as joined documents do.
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_length=length,
        min_length=length,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )
    # Fields that are None here would be taken from the model's own.
    model.generation_config = GenerationConfig()
    devices = [prompts.device] if prompts.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        written: torch.Tensor = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), generation_config=settings
        )
    return written
