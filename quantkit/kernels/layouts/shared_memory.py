"""Sizes of tables and blocks that kernels and their launchers share. Imports neither torch nor Triton."""

#: Bytes of shared memory that a program gets without a request for more.
USUAL_SHARED = 48 << 10
#: Bits of codes whose values a table in shared memory may hold, and most copies of each pair of values.
SHARED_BITS, COPIES = 4, 32


def next_power_of_2(least: int) -> int:
    """Return the smallest power of two >= `least`, because block sizes in Triton are powers of two."""
    return 1 << (least - 1).bit_length()


def fragment_distance(count: int, dot: int) -> int:
    """Return the distance, in fragments of 16 columns, of two codes that become bytes of one register.

    This is for int8 products. A span, stored in the same registers, has `count` fragments. Both codes are
    among the `dot` columns that share a scale.
    """
    return min(count, dot // 16) // 2


def low_fragments(count: int, distance: int) -> tuple[int, ...]:
    """Return the fragments f (16 columns) below `count` whose codes become the low byte of a halfword.

    This is for int8 products. The code of fragment f + `distance` becomes the high byte next to it.
    """
    return tuple(fragment for fragment in range(count) if fragment // distance % 2 == 0)


def undeclared_bytes(counted: int, table: int) -> int:
    """Return the bytes to add to a launch's shared memory, so that a `table` of inline PTX fits too.

    `table` and `counted` are bytes; Triton counts only `counted`. It asks the driver for more than
    `USUAL_SHARED` bytes only if its own count exceeds that. Returns 0 if no addition is needed.
    """
    return max(0, USUAL_SHARED + 1 - counted) if table and counted + table > USUAL_SHARED else 0


def shared_bytes(copies: int = COPIES) -> int:
    """Return the bytes of the lookup table in shared memory: 256 pairs of 16-bit values, `copies` times each.

    A pair is the values of the two 4-bit codes of a byte.
    """
    return (1 << 2 * SHARED_BITS) * copies * 4
