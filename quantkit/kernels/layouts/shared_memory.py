"""Sizes of tables and blocks that kernels and their launchers share. Imports neither torch nor Triton."""

#: Bytes of shared memory that a program gets without a request for more.
USUAL_SHARED = 48 << 10
#: Bits of codes whose values a table in shared memory may hold, and most copies of each pair of values.
SHARED_BITS, COPIES = 4, 32


def next_power_of_2(least: int) -> int:
    """Return the smallest power of two >= `least`, because block sizes in Triton are powers of two."""
    return 1 << (least - 1).bit_length()


def fragment_distance(count: int, dot: int) -> int:
    """Return the distance, in fragments of 16 columns, between the two codes that share a halfword.

    For int8 products, which take a byte for each code. `count` fragments have their codes in the same
    registers. Both codes are among the `dot` columns whose products are summed before a scale applies. It is
    2 for 4 fragments and 64 columns: those of fragments 0 and 2 share halfwords, and those of 1 and 3.
    """
    return min(count, dot // 16) // 2


def low_fragments(count: int, distance: int) -> tuple[int, ...]:
    """Return the fragments f (16 columns) below `count` whose codes become the low byte of a halfword.

    For int8 products. The code of fragment f + `distance` becomes the high byte of the same halfword.
    """
    return tuple(fragment for fragment in range(count) if fragment // distance % 2 == 0)


def undeclared_bytes(counted: int, table: int) -> int:
    """Return the bytes to add to a launch's shared memory, so that a table of inline PTX fits too.

        counted    bytes of shared memory that Triton counts for the kernel
        table      bytes of the table, which Triton does not count

    A program gets up to `USUAL_SHARED` bytes. Triton asks the driver for more only if its own count exceeds
    that; the result makes the count exceed it. It is 0 if both fit.
    """
    return max(0, USUAL_SHARED + 1 - counted) if table and counted + table > USUAL_SHARED else 0


def shared_bytes(copies: int = COPIES) -> int:
    """Return the bytes of the lookup table in shared memory: 256 pairs of 16-bit values, `copies` times each.

    A pair is the values of the two 4-bit codes of a byte.
    """
    return (1 << 2 * SHARED_BITS) * copies * 4
