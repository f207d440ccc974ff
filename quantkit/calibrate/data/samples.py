"""Calibration samples: windows of tokens, all of one length, drawn from documents.

A document of at least a window's tokens is cut into windows; shorter ones are joined, one after the other,
until they fill some. Windows are drawn in rounds, one of each document per round, so that a few long
documents do not crowd out the others. No special tokens are added but between joined documents, and those of
the chat template.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import UsageError


@dataclass(frozen=True, eq=False)
class Samples:
    """Tokens int64 [samples, length], where they are from, and what the reader should know of them.

    `beside` has for each sample what the model takes beside its tokens, such as pixels; none for text.
    """

    tokens: torch.Tensor
    origin: str
    notes: tuple[str, ...] = ()
    beside: tuple[Mapping[str, torch.Tensor], ...] = ()

    @property
    def digest(self) -> str:
        """Hex SHA-256 of shape and tokens, and of what is beside them."""
        digest = token_digest(self.tokens)
        if not self.beside:
            return digest
        parts = [
            f"{name} {tuple(one.shape)} {hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest()}"
            for sample in self.beside
            for name, one in sorted(sample.items())
        ]
        return hashlib.sha256("\n".join([digest, *parts]).encode()).hexdigest()


def token_digest(tokens: torch.Tensor) -> str:
    """Hex SHA-256 of the shape and the values of tokens (int64)."""
    digest = hashlib.sha256(str(tuple(tokens.shape)).encode())
    digest.update(tokens.contiguous().numpy().tobytes())
    return digest.hexdigest()


def draw(
    documents: Sequence[torch.Tensor], count: int, length: int, seed: int, separator: int | None, name: str
) -> Samples:
    """Up to `count` windows of `length` tokens from documents (int64 [n] each); fewer with a note if there
    are fewer.

    `separator` is the token put between documents that are joined. `UsageError` if no window is full.
    """
    generator = torch.Generator().manual_seed(seed)
    long = [document for document in documents if len(document) >= length]
    joined = _joined([document for document in documents if len(document) < length], separator)
    windows = [list(_windows(document, length)) for document in long]
    windows += [[window] for window in _windows(joined, length)]
    if not windows:
        tokens = sum(len(document) for document in documents)
        raise UsageError(
            f"{name}: {tokens} tokens are less than one calibration sample of {length}. Give more text, or "
            "shorter samples with --calibration-length."
        )
    windows = [windows[i] for i in _shuffled(len(windows), generator)]
    windows = [[of_one[i] for i in _shuffled(len(of_one), generator)] for of_one in windows]
    rounds = max(map(len, windows))
    drawn = [of_one[r] for r in range(rounds) for of_one in windows if r < len(of_one)][:count]
    notes: tuple[str, ...] = ()
    if len(drawn) < count:
        notes = (
            f"{name}: {len(drawn)} calibration samples of {length} tokens, as there is no text for {count}",
        )
    return Samples(torch.stack(drawn), name, notes)


def merge(parts: Sequence[Samples]) -> Samples:
    """The samples of several sources as one set."""
    return Samples(
        torch.cat([part.tokens for part in parts]),
        ", ".join(f"{part.origin}:{len(part.tokens)}" for part in parts),
        tuple(note for part in parts for note in part.notes),
        tuple(one for part in parts for one in part.beside),
    )


def micro_batch(samples: int, most: int) -> int:
    """Return the samples that go through the model at a time: the largest divisor of their number up to
    `most`.

    A divisor, so that what a model makes of the shape of its inputs is the same for all.
    """
    return next(size for size in range(min(most, samples), 0, -1) if samples % size == 0)


def _joined(documents: Sequence[torch.Tensor], separator: int | None) -> torch.Tensor:
    between = [] if separator is None else [torch.tensor([separator])]
    pieces = [piece for document in documents for piece in (document, *between)]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def _windows(document: torch.Tensor, length: int) -> Sequence[torch.Tensor]:
    whole = len(document) // length
    return document[: whole * length].view(whole, length).unbind(0)


def _shuffled(count: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(count, generator=generator).tolist()
