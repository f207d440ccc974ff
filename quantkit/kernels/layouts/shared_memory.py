"""Sizes that kernels and those who launch them count alike, in Python alone."""

#: Bytes of shared memory that a program may have without asking for more.
USUAL_SHARED = 48 << 10
#: Bits of a code whose values shared memory may have, and how often it has them, at most.
SHARED_BITS, COPIES = 4, 32


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least so much: sizes of blocks in Triton are such."""
    return 1 << (least - 1).bit_length()


def planes_apart(count: int, dot: int) -> int:
    """How far apart two of so many planes are whose codes share registers, so that both are of one dot."""
    return min(count, dot // 16) // 2


def low_planes(count: int, apart: int) -> tuple[int, ...]:
    """The planes of so many that go to low bytes; those so far after them go to the high ones."""
    return tuple(plane for plane in range(count) if plane // apart % 2 == 0)


def undeclared_bytes(counted: int, table: int) -> int:
    """Bytes of shared memory to have besides those `counted`, for Triton to ask for more than is usual.

    It counts no table that inline PTX has there.
    """
    return max(0, USUAL_SHARED + 1 - counted) if table and counted + table > USUAL_SHARED else 0


def shared_bytes(copies: int = COPIES) -> int:
    """Bytes of shared memory that a table of pairs of values takes."""
    return (1 << 2 * SHARED_BITS) * copies * 4
