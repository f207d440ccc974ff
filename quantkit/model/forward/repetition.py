"""Count runs of tokens that a text had before: sampled and greedy text of bad models falls into loops."""

from collections.abc import Sequence

#: Length of a run of tokens that counts as repeated.
RUN = 4


def repeated_runs(tokens: Sequence[int]) -> tuple[int, int]:
    """Return how many runs of `RUN` tokens of a text it had before, and how many runs it has."""
    runs = [tuple(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
    return len(runs) - len(set(runs)), len(runs)
