"""What the tests of faults share."""

from .faults import out, sharded, source

__all__ = ["out", "sharded", "source"]
