"""Text that a model writes itself: KL on prose does not see how a model goes wrong in its own chains.

The original continues the beginnings of documents, and both models then predict its tokens. The evaluated one
continues the same beginnings too. Lengths of texts and repetitions are compared.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.data.documents import read_documents
from quantkit.calibrate.data.samples import draw
from quantkit.calibrate.data.texts import BUNDLED
from quantkit.errors import UsageError
from quantkit.eval.models import open_tokenizer
from quantkit.eval.text import TextWindows
from quantkit.model.forward.sampling import continued
from quantkit.model.tokenizer import tokenize

#: Tokens of a beginning, and most tokens that follow it.
BEGINNING, MOST = 32, 256
#: Continuations at a time.
AT_ONCE = 32
#: Length of a run of tokens that counts as repeated.
RUN = 4
NAME = "own text"


@dataclass(frozen=True)
class Continuations:
    """Counts in the continuations of a model.

    tokens     mean number of tokens up to the end of a text, at most `MOST`
    ended      fraction of texts that end before that
    repeated   fraction of runs of `RUN` tokens that their text had before
    """

    tokens: float
    ended: float
    repeated: float

    @classmethod
    def of(cls, written: torch.Tensor, ends: Collection[int]) -> "Continuations":
        """Count in continuations int64 [B, n] without their beginnings; `ends` are tokens that end a text."""
        texts = [_until(row, ends) for row in written.tolist()]
        runs = [[tuple(text[i : i + RUN]) for i in range(len(text) - RUN + 1)] for text in texts]
        total = sum(map(len, runs))
        repeated = total - sum(len(set(of_text)) for of_text in runs)
        return cls(
            sum(map(len, texts)) / len(texts),
            sum(len(text) < written.shape[1] for text in texts) / len(texts),
            repeated / total if total else 0.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class OwnText:
    """Text of a model: windows in which all after the beginnings is scored, and counts."""

    windows: TextWindows
    counts: Continuations

    @property
    def starts(self) -> torch.Tensor:
        """Return the beginnings, int64 [B, n]."""
        return self.windows.tokens[:, : -self.windows.scored]


def _until(row: list[int], ends: Collection[int]) -> list[int]:
    return row[: next((i for i, token in enumerate(row) if token in ends), len(row))]


def beginnings(directory: Path, count: int) -> torch.Tensor:
    """Return the first `BEGINNING` tokens of `count` passages of the bundled text, int64 [count, n]."""
    words = open_tokenizer(directory)
    documents = [tokenize(words, one) for one in read_documents(BUNDLED) if isinstance(one, str)]
    return draw(documents, count, BEGINNING, 0, None, NAME).tokens


def write_own_text(model: Any, starts: torch.Tensor, limit: int | None) -> OwnText:
    """Let a loaded model of transformers, which has `limit` positions, go on from `starts`, int64 [B, n].

    Raises `UsageError` for a model that does not generate.
    """
    if not model.can_generate():
        raise UsageError(f"{type(model).__name__} writes no text of its own. Give --text files.")
    ends = model.generation_config.eos_token_id
    length = min(BEGINNING + MOST, limit or BEGINNING + MOST)
    written = torch.cat(
        [
            continued(model, part.to(model.device), length, number).cpu()
            for number, part in enumerate(torch.split(starts, AT_ONCE))
        ]
    )
    scored = length - starts.shape[1]
    counts = Continuations.of(
        written[:, starts.shape[1] :], {ends} if isinstance(ends, int) else set(ends or ())
    )
    return OwnText(TextWindows(NAME, written, scored), counts)
