"""Make calibration samples with images, by the model's own processor."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quantkit.calibrate.data.documents import read_documents
from quantkit.calibrate.data.pictures import Pictured, pixels_of
from quantkit.calibrate.data.samples import Samples
from quantkit.calibrate.data.texts import BUNDLED
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.model.hf_files import explained
from quantkit.model.tokenizer import has_chat_template, tokenize

#: Outputs of processors that samples do not use: tokens are kept separately, and none is padding.
_LEFT_OUT = ("input_ids", "attention_mask")


def image_processor(checkpoint: Checkpoint) -> Any:
    """Return the processor of a model that takes images; None for other models.

    Code in the checkpoint is never run. Raises `CheckpointError` for a processor that does not load.
    """
    from transformers import AutoProcessor

    with explained(checkpoint.directory):
        found = AutoProcessor.from_pretrained(checkpoint.directory, trust_remote_code=False)
    return found if hasattr(found, "image_processor") and hasattr(found, "tokenizer") else None


def pictured_samples(
    processor: Any, rows: Sequence[Pictured], count: int, length: int, seed: int, path: str
) -> Samples:
    """Make up to `count` samples of `length` tokens, each of one row: its images and text, then filler text.

    The filler text comes with quantkit. Raises `UsageError` if no row fits into a sample, or if the processor
    accepts none.
    """
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    filler = _filler(processor.tokenizer, length)
    tokens, beside, longest, at = list[torch.Tensor](), list[Mapping[str, torch.Tensor]](), 0, 0
    for row in (rows[i] for i in order):
        if len(tokens) == count:
            break
        inputs = _inputs(processor, row, path)
        own = inputs["input_ids"][0]
        longest = max(longest, len(own))
        if len(own) > length:
            continue
        filler_length = length - len(own)
        at = 0 if at + filler_length > len(filler) else at
        tokens.append(torch.cat([own, filler[at : at + filler_length]]))
        at += filler_length
        beside.append(
            {name: _padded(one, len(own), length) for name, one in inputs.items() if name not in _LEFT_OUT}
        )
    if not tokens:
        raise UsageError(
            f"{path}: no row fits into a sample of {length} tokens; the longest has {longest} with its "
            "images. Use longer samples with --calibration-length, or smaller images."
        )
    notes: tuple[str, ...] = ()
    if len(tokens) < count:
        notes = (
            f"{path}: {len(tokens)} calibration samples with images, as no more rows fit into {length} "
            "tokens",
        )
    return Samples(torch.stack(tokens), str(path), notes, tuple(beside))


def _inputs(processor: Any, row: Pictured, path: str) -> dict[str, torch.Tensor]:
    images = [pixels_of(image) for image in row.images]
    try:
        text = _text(processor, row)
        processed = processor(text=[text], images=images, return_tensors="pt")
        found = {name: one for name, one in processed.items() if isinstance(one, torch.Tensor)}
        if found["input_ids"].shape[0] != 1:
            raise ValueError("it makes several rows of one")
    except Exception as error:  # Processors and templates may raise anything.
        raise UsageError(
            f"{path}: the processor of this model cannot take the row with {row.images[0].name} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}). Check its messages."
        ) from error
    return found


def _text(processor: Any, row: Pictured) -> str:
    """Render a row by the model's chat template; without one, put its image tokens before its text."""
    if has_chat_template(processor):
        rendered: str = processor.apply_chat_template(row.messages, tokenize=False)
        return rendered
    token = getattr(processor, "image_token", None) or ""
    parts = [part for message in row.messages for part in message["content"]]
    return "".join(token if part["type"] == "image" else part["text"] for part in parts)


def _padded(tensor: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    """Append zeros for the filler text to a [1, T, ...] tensor with one entry per token.

    Other tensors are returned as they are.
    """
    if tensor.shape[:2] != (1, tokens):
        return tensor
    return torch.cat([tensor, tensor.new_zeros(1, length - tokens, *tensor.shape[2:])], 1)


def _filler(tokenizer: Any, length: int) -> torch.Tensor:
    """Return the tokens of the built-in text, repeated to `length` tokens."""
    documents = [document for document in read_documents(BUNDLED) if isinstance(document, str)]
    found = tokenize(tokenizer, "\n".join(documents))
    if len(found) < 2:
        raise CheckpointError(
            "the tokenizer makes no tokens of a text. Restore the files of the original model."
        )
    return found.repeat(-(-length // len(found)))
