"""Compare a merged checkpoint with the original that has the adapter, and with the packed model beside it."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from quantkit.about import pip_install
from quantkit.calibrate.data.documents import read_documents, read_text
from quantkit.calibrate.data.texts import BUNDLED, BUNDLED_NAME
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import BlocksError, EnvironmentProblem
from quantkit.eval.metrics import TextMetrics, TokenScores, merge, score, summarize
from quantkit.eval.models import dtype_for, dtype_named, language_limits, release
from quantkit.eval.runner import predictions
from quantkit.eval.text import TextWindows, check_tokens, cut, usable_window
from quantkit.model.blocks import Block, Decoder
from quantkit.model.forward.model_pass import ModelPass
from quantkit.model.hidden_states import Home
from quantkit.model.tokenizer import tokenize, tokenizer
from quantkit.runtime.load import load_language_model

#: Tokens of a window, and most windows that are scored: of a text that was given, and of the bundled one.
WINDOW, MOST_WINDOWS, FEW_WINDOWS = 512, 32, 8
#: Characters of the bundled text for each token, more than are needed.
_CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True)
class Comparison:
    """Metrics of a merged checkpoint on one text, and of the packed model with the adapter beside it.

    before   packed model and adapter, against the original and adapter; None without the original
    after    the merged checkpoint, against the original and adapter; None without the original
    beside   the merged checkpoint, against packed model and adapter
    why_not  reason that the original was not run; None if it ran, or was not given
    """

    before: TextMetrics | None
    after: TextMetrics | None
    beside: TextMetrics
    why_not: str | None = None


def read_windows(packed: Path, text: Path | None) -> TextWindows:
    """Read `text`, tokenized for the checkpoint `packed`, and return its first windows.

    They are `MOST_WINDOWS`, or `FEW_WINDOWS` of the bundled text if `text` is None. Call it before any long
    work. Raises `EnvironmentProblem` without PEFT, which `compare` takes.
    """
    if find_spec("peft") is None:
        raise EnvironmentProblem(
            f"comparing with the adapter takes PEFT, which is not installed. Install it with "
            f"{pip_install('lora')}, or leave out the text."
        )
    vocabulary, limit = language_limits(packed)
    window, _ = usable_window(WINDOW, limit)
    if text is None:
        documents = (one for one in read_documents(BUNDLED) if isinstance(one, str))
        most = window * FEW_WINDOWS * _CHARACTERS_PER_TOKEN
        name, count, words = BUNDLED_NAME, FEW_WINDOWS, "\n\n".join(documents)[:most]
    else:
        name, count, words = text.name, MOST_WINDOWS, read_text(text)
    windows = cut(name, tokenize(tokenizer(packed), words), window, count)
    check_tokens(windows, vocabulary, packed)
    return windows


def compare(
    packed: Path,
    adapter: Path,
    merged: Path,
    windows: TextWindows,
    device: torch.device,
    original: Checkpoint | None = None,
) -> Comparison:
    """Score `merged`, and `packed` with PEFT's `adapter`, on `windows`.

    `original` has the adapter in its weights. Activations are float32 on a CPU, and on a GPU the model's own
    dtype. Both packed models are in memory, and a block of the original.
    """
    from peft import PeftModel

    dtype = torch.float32 if device.type == "cpu" else None
    decoder, why_not = None, None
    if original is not None:
        computed = dtype or dtype_named(dtype_for("auto", str(device), packed))
        try:
            decoder = Decoder(original, device, computed)
            decoder.check_runs(windows.tokens[:1])
        except BlocksError as error:
            decoder, why_not = None, str(error)
    before, after, beside = list[TokenScores](), list[TokenScores](), list[TokenScores]()
    with closing(_logits(decoder, windows.tokens)) as references:
        # The blocks of the original run now, while no other model is in memory.
        reference = next(references)
        found = load_language_model(merged, device=device, dtype=dtype)
        adapted = PeftModel.from_pretrained(
            load_language_model(packed, device=device, dtype=dtype), str(adapter), torch_device=str(device)
        ).eval()

        def scored(logits: torch.Tensor, expected: torch.Tensor) -> TokenScores:
            rows = [predictions(one, windows.scored, merged) for one in (logits, expected)]
            return score(rows[0], tokens[:, -windows.scored :], rows[1])

        for tokens in torch.split(windows.tokens.to(device), 1):
            with torch.inference_mode():
                logits, next_to = (one(input_ids=tokens).logits for one in (found, adapted))
            beside.append(scored(logits, next_to))
            if reference is not None:
                before.append(scored(next_to, reference))
                after.append(scored(logits, reference))
            reference = next(references, None)
    del found, adapted
    release(str(device))
    first, last, other = (summarize(merge(one)) if one else None for one in (before, after, beside))
    assert other is not None
    return Comparison(first, last, other, why_not)


def _logits(decoder: Decoder | None, tokens: torch.Tensor) -> Generator[torch.Tensor | None, None, None]:
    """Yield the logits [1, T, V] of each row of `tokens` int64 [B, T]; one None without a `decoder`.

    The weights of one block are in memory at a time.
    """
    if decoder is None:
        yield None
        return
    with decoder.passes() as start:
        passes = [start(one, Home(decoder.device)) for one in torch.split(tokens, 1)]
        while (name := passes[0].block) is not None and name != decoder.head_name:
            block = decoder.block(name)
            with decoder.loaded(block):
                for one in passes:
                    _advance(block, one)
        if name is None:
            yield from (one.take_output().logits for one in passes)
            return
        # Logits are large: those of one window at a time.
        head = decoder.block(name)
        with decoder.loaded(head):
            for one in passes:
                _advance(head, one)
                yield one.take_output().logits


def _advance(block: Block, one: ModelPass) -> None:
    with torch.no_grad(), one.loaded() as call:
        output = block.run(call)
    one.advance(output)
