"""Draw calibration samples: windows of tokens of one length from documents.

A document of at least a window is cut into windows; shorter documents are joined until they fill some.
Windows are drawn in rounds, one per document and round, so that a few long documents do not dominate. The
only special tokens are separators between joined documents, and those of the chat template.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import UsageError

_DESCRIPTION = re.compile(r"(\d{1,9}) samples of (\d{1,9}) tokens from (.+), sha256 ([0-9a-f]{64})")


@dataclass(frozen=True, eq=False)
class Samples:
    """Tokens int64 [samples, length], their origin, and notes for the user.

    `beside` are further inputs of the model for each sample, such as pixels; empty for text.
    """

    tokens: torch.Tensor
    origin: str
    notes: tuple[str, ...] = ()
    beside: tuple[Mapping[str, torch.Tensor], ...] = ()

    @property
    def digest(self) -> str:
        """Return the hex SHA-256 of shape, tokens and further inputs."""
        digest = token_digest(self.tokens)
        if not self.beside:
            return digest
        parts = [
            f"{name} {tuple(one.shape)} {hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest()}"
            for sample in self.beside
            for name, one in sorted(sample.items())
        ]
        return hashlib.sha256("\n".join([digest, *parts]).encode()).hexdigest()

    @property
    def description(self) -> str:
        """Return a line on the samples, for the manifest; `Described` reads it."""
        count, length = self.tokens.shape
        return f"{count} samples of {length} tokens from {self.origin}, sha256 {self.digest}"


@dataclass(frozen=True)
class Described:
    """Parts of `Samples.description`: number of samples, tokens of each, origin, and hex SHA-256."""

    count: int
    length: int
    origin: str
    digest: str

    @classmethod
    def read(cls, description: object) -> "Described | None":
        """Return what a manifest's value says; None if it is no such description."""
        found = _DESCRIPTION.fullmatch(description) if isinstance(description, str) else None
        return None if found is None else cls(int(found[1]), int(found[2]), found[3], found[4])

    @property
    def sources(self) -> list[tuple[str, int]]:
        """Return name and number of samples of each source of merged samples; none of other text."""
        return [(name, int(count)) for name, count in re.findall(r"(.+?):(\d+)(?:, |$)", self.origin)]


def described_names(description: object) -> list[str]:
    """Return the names of the sources in a `Samples.description`; none of another value."""
    found = Described.read(description)
    return [] if found is None else [name for name, _ in found.sources]


def token_digest(tokens: torch.Tensor) -> str:
    """Return the hex SHA-256 of the shape and values of tokens, int64 [samples, length]."""
    digest = hashlib.sha256(str(tuple(tokens.shape)).encode())
    digest.update(tokens.contiguous().numpy().tobytes())
    return digest.hexdigest()


def draw(
    documents: Sequence[torch.Tensor], count: int, length: int, seed: int, separator: int | None, name: str
) -> Samples:
    """Draw up to `count` windows of `length` tokens from documents (int64 [n] each).

    Adds a note if there are fewer. `separator` is the token between joined documents. Raises `UsageError` if
    no window is full.
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
    """Concatenate the samples of several sources."""
    return Samples(
        torch.cat([part.tokens for part in parts]),
        ", ".join(f"{part.origin}:{len(part.tokens)}" for part in parts),
        tuple(note for part in parts for note in part.notes),
        tuple(one for part in parts for one in part.beside),
    )


def micro_batch(samples: int, most: int) -> int:
    """Return the number of samples per micro-batch: the largest divisor of `samples` up to `most`.

    With a divisor, all micro-batches have the same shape.
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
