"""Compute sizes that kernels and their launchers share. Imports neither torch nor Triton."""

#: Bytes of shared memory that a program gets without a request for more.
USUAL_SHARED = 48 << 10
#: Bits of codes whose values a table in shared memory may hold, and most copies of each pair of values.
SHARED_BITS, COPIES = 4, 32


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`; block sizes in Triton are powers of two."""
    return 1 << (least - 1).bit_length()


def fragments_apart(count: int, dot: int) -> int:
    """Return the distance f2 - f1 of two fragments (16 columns) whose codes share a register as bytes.

    A span has `count` fragments. Both fragments are among the `dot` columns that share a scale.
    """
    return min(count, dot // 16) // 2


def low_fragments(count: int, apart: int) -> tuple[int, ...]:
    """Return the fragments f below `count` whose codes become low bytes.

    The code of fragment f + `apart` becomes the high byte next to it.
    """
    return tuple(fragment for fragment in range(count) if fragment // apart % 2 == 0)


def undeclared_bytes(counted: int, table: int) -> int:
    """Return the bytes to add to a launch's shared memory for a `table` that inline PTX allocates.

    Triton counts only its own `counted` bytes. A launch with more than `USUAL_SHARED` bytes must ask for
    them, so Triton's own count is raised above that. Returns 0 if no request is needed.
    """
    return max(0, USUAL_SHARED + 1 - counted) if table and counted + table > USUAL_SHARED else 0


def shared_bytes(copies: int = COPIES) -> int:
    """Return the bytes of a lookup table in shared memory: both values of each byte of two 4-bit codes.

    There are `copies` of each pair of values.
    """
    return (1 << 2 * SHARED_BITS) * copies * 4
