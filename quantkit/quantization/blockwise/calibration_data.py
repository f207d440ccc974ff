"""Read calibration data for a checkpoint, tokenized by its own tokenizer and checked before any work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.data.calibration_options import DEFAULT_LENGTH, DEFAULT_SAMPLES, CalibrationOptions
from quantkit.calibrate.data.documents import Document
from quantkit.calibrate.data.pictures import read_pictured
from quantkit.calibrate.data.samples import Samples, draw, merge
from quantkit.calibrate.data.texts import parse_sources, read_source, shares
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.files import shown
from quantkit.model.hf_files import has_processor
from quantkit.model.model_class import model_config
from quantkit.model.tokenizer import has_chat_template, tokenize, tokenizer
from quantkit.quantization.blockwise.pictured_samples import (
    image_processor,
    pictured_samples,
)


def sample_shape(checkpoint: Checkpoint, options: CalibrationOptions) -> tuple[int, int]:
    """Return the requested number of samples, and of tokens per sample.

    Texts are not read; they may yield fewer samples.
    """
    counts = shares(parse_sources(options.sources), options.samples, DEFAULT_SAMPLES)
    length = options.length or DEFAULT_LENGTH
    return sum(counts), min(length, _positions(checkpoint) or length)


def read_samples(checkpoint: Checkpoint, options: CalibrationOptions, vocabulary: int) -> Samples:
    """Read the samples for a model whose embedding has `vocabulary` rows.

    A model with an image processor also gets the images named in rows of `.jsonl` files. Raises `UsageError`
    for unusable sources, `CheckpointError` if the tokenizer belongs to another model.
    """
    sources = parse_sources(options.sources)
    counts = shares(sources, options.samples, DEFAULT_SAMPLES)
    length, notes = options.length or DEFAULT_LENGTH, list[str]()
    limit = _positions(checkpoint)
    if limit is not None and length > limit:
        notes = [
            f"calibration samples were cut from {length} to {limit} tokens, the positions that the model has"
        ]
        length = limit
    words = tokenizer(checkpoint.directory)
    parts = []
    takes_images = has_processor(checkpoint.directory)
    for source, count in zip(sources, counts, strict=True):
        rows = read_pictured(source.where) if takes_images and isinstance(source.where, Path) else []
        processor = image_processor(checkpoint) if rows else None
        if processor is not None:
            name = str(source.where)
            parts.append(pictured_samples(processor, rows, count, length, options.seed, name))
            continue
        texts = read_source(source, count * length)
        documents = [_tokens(words, document, texts.name) for document in texts.documents]
        parts.append(draw(documents, count, length, options.seed, words.eos_token_id, texts.name))
        notes += texts.notes
    if len({bool(part.beside) for part in parts}) > 1:
        plain = next(part.origin for part in parts if not part.beside)
        raise UsageError(
            f"{plain} has no rows with images, and other calibration sources do: the same blocks run for all "
            "samples. Give sources with images only, or without."
        )
    samples = merge(parts)
    largest = int(samples.tokens.max())
    if largest >= vocabulary:
        raise CheckpointError(
            f"{checkpoint.directory}: the tokenizer gives token {largest}, but the embedding has "
            f"{vocabulary} rows. The tokenizer belongs to another model; restore the files of one revision."
        )
    return replace(samples, notes=(*notes, *samples.notes))


def _tokens(words: Any, document: Document, name: str) -> torch.Tensor:
    text = document if isinstance(document, str) else _rendered(words, document, name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start + 20]
        raise UsageError(
            f"{name} has the half character {text[error.start]!r} in {shown(around)}; expected text that "
            "UTF-8 has bytes for. Mend its row or leave it out."
        ) from None
    return tokenize(words, text)


def _rendered(words: Any, document: list[dict[str, Any]], name: str) -> str:
    """Render a chat to text by the chat template of the model."""
    if not has_chat_template(words):
        raise UsageError(
            f"{name} has chat messages, but the tokenizer of this model has no chat template. Give "
            f'{{"text": "..."}}.'
        )
    try:
        text: str = words.apply_chat_template(document, tokenize=False)
    except Exception as error:  # Templates may raise anything.
        raise UsageError(
            f"{name}: the chat template of this model refuses a chat ({type(error).__name__}: {error}). "
            "Check the roles of its messages."
        ) from error
    return text


def _positions(checkpoint: Checkpoint) -> int | None:
    """Return the most positions of the text model, under any of the names that configs use.

    None if the config does not say, or says that there is no limit.
    """
    config = model_config(checkpoint.config, checkpoint.directory)
    found = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    # XLNet has no limit and says -1.
    return found if isinstance(found, int) and found > 0 else None
