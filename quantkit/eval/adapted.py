"""Compare a merged checkpoint with the packed model that has the adapter beside it."""

from importlib.util import find_spec
from pathlib import Path

import torch

from quantkit.about import pip_install
from quantkit.calibrate.data.documents import read_text
from quantkit.errors import EnvironmentProblem
from quantkit.eval.metrics import TextMetrics, merge, score, summarize
from quantkit.eval.models import language_limits, release
from quantkit.eval.runner import predictions
from quantkit.eval.text import TextWindows, check_tokens, cut, usable_window
from quantkit.model.tokenizer import tokenize, tokenizer
from quantkit.runtime.load import load_language_model

#: Tokens of a window, and most windows that are scored.
WINDOW, MOST_WINDOWS = 512, 32


def read_windows(packed: Path, text: Path) -> TextWindows:
    """Read `text`, tokenized for the checkpoint `packed`, and return its first `MOST_WINDOWS` windows.

    Call it before any long work. Raises `EnvironmentProblem` without PEFT, which `compare` takes.
    """
    if find_spec("peft") is None:
        raise EnvironmentProblem(
            f"comparing with the adapter takes PEFT, which is not installed. Install it with "
            f"{pip_install('lora')}, or leave out the text."
        )
    vocabulary, limit = language_limits(packed)
    window, _ = usable_window(WINDOW, limit)
    windows = cut(text.name, tokenize(tokenizer(packed), read_text(text)), window, MOST_WINDOWS)
    check_tokens(windows, vocabulary, packed)
    return windows


def compare(
    packed: Path, adapter: Path, merged: Path, windows: TextWindows, device: torch.device
) -> TextMetrics:
    """Score `merged` on `windows`, against `packed` with PEFT's `adapter`.

    Activations are float32 on a CPU, and on a GPU the model's own dtype. Both models are in memory.
    """
    from peft import PeftModel

    dtype = torch.float32 if device.type == "cpu" else None
    found = load_language_model(merged, device=device, dtype=dtype)
    adapted = PeftModel.from_pretrained(
        load_language_model(packed, device=device, dtype=dtype), str(adapter), torch_device=str(device)
    ).eval()
    scores = []
    for tokens in torch.split(windows.tokens.to(device), 1):
        with torch.inference_mode():
            logits, expected = (one(input_ids=tokens).logits for one in (found, adapted))
        scores.append(
            score(
                predictions(logits, windows.scored, merged),
                tokens[:, -windows.scored :],
                predictions(expected, windows.scored, packed),
            )
        )
    del found, adapted
    release(str(device))
    return summarize(merge(scores))
