"""Check seeds of random draws."""

from quantkit.errors import UsageError


def check_seed(seed: int) -> None:
    """Raise `UsageError` for a seed that torch's generators refuse."""
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"seed is {seed}; use 0 to {(1 << 63) - 1}.")
