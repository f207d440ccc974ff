"""Sequences that a student is trained on, and which of them each step gets."""

from dataclasses import dataclass, field

import torch

#: Most sequences that are held out to measure the divergence; an eighth of all, and at least 1.
HELD_OUT = 16


@dataclass(frozen=True, eq=False)
class Pool:
    """Calibration text int64 [C, T], what the original wrote itself [P, T], and what is held out [H, T].

    What a step gets depends on `seed` and its number alone.
    """

    text: torch.Tensor
    own: torch.Tensor
    held_out: torch.Tensor
    seed: int
    _orders: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, text: torch.Tensor, own: torch.Tensor, seed: int) -> "Pool":
        """Hold out an eighth, 1 to `HELD_OUT` sequences, of `own` if it has twice as many, else of `text`.

        `text` is int64 [C, T], `own` [P, T]. A lone sequence is both held out and trained on.
        """
        kept = own if len(own) >= 2 * HELD_OUT else text
        count = min(HELD_OUT, max(1, len(kept) // 8))
        # Spread over all batches that were written, as these differ.
        held = torch.zeros(len(kept), dtype=torch.bool)
        held[torch.arange(count) * len(kept) // count] = True
        rest = kept[~held] if len(kept) > 1 else kept
        return cls(text if kept is own else rest, rest if kept is own else own, kept[held], seed)

    def batch(self, step: int, size: int, own: float) -> torch.Tensor:
        """Return the sequences of a step, [size, T], a share `own` of them the original's.

        Of either kind all come once before any comes again.
        """
        written = round(size * own) if len(self.own) else 0
        counts = {"own": written, "text": size - written}
        parts = [self._drawn(kind, step * count, count) for kind, count in counts.items() if count]
        return torch.cat(parts)

    def _drawn(self, kind: str, first: int, count: int) -> torch.Tensor:
        rows = self.own if kind == "own" else self.text
        places = torch.arange(first, first + count)
        turns = places // len(rows)
        ids = torch.empty_like(places)
        for turn in sorted(set(turns.tolist())):
            here = turns == turn
            ids[here] = self._order(kind, turn, len(rows))[places[here] % len(rows)]
        return rows[ids]

    def _order(self, kind: str, turn: int, count: int) -> torch.Tensor:
        if (kind, turn) not in self._orders:
            for old in [key for key in self._orders if key[0] == kind]:
                del self._orders[old]
            seed = self.seed * 1_000_003 + 2 * turn + (kind == "own")
            self._orders[kind, turn] = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        return self._orders[kind, turn]
