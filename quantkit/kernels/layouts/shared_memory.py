"""Compute sizes that kernels and their launchers share. Imports neither torch nor Triton."""

#: Bytes of shared memory that a program gets without a request for more.
USUAL_SHARED = 48 << 10
#: Bits of codes whose values a table in shared memory may hold, and most copies of each pair of values.
SHARED_BITS, COPIES = 4, 32


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`; block sizes in Triton are powers of two."""
    return 1 << (least - 1).bit_length()


def planes_apart(count: int, dot: int) -> int:
    """Return the distance of two planes whose codes share a register as bytes; both are of one `dot`.

    There are `count` planes of 16 columns; a `dot` is columns with one scale.
    """
    return min(count, dot // 16) // 2


def low_planes(count: int, apart: int) -> tuple[int, ...]:
    """Return the planes of `count` that become low bytes; plane + `apart` becomes the high byte."""
    return tuple(plane for plane in range(count) if plane // apart % 2 == 0)


def undeclared_bytes(counted: int, table: int) -> int:
    """Return the bytes to add to a launch's shared memory for a `table` that inline PTX allocates.

    Triton counts only its own `counted` bytes. A launch with more than `USUAL_SHARED` bytes must ask for
    them, so Triton's own count is raised above that. Returns 0 if no request is needed.
    """
    return max(0, USUAL_SHARED + 1 - counted) if table and counted + table > USUAL_SHARED else 0


def shared_bytes(copies: int = COPIES) -> int:
    """Return the bytes of a table of pairs of values in shared memory, with `copies` of each pair."""
    return (1 << 2 * SHARED_BITS) * copies * 4
