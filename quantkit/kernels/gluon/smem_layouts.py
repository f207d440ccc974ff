"""Layouts of x in shared memory for `fused-gemv`, and register layouts of the threads that copy x there.

Sizes are powers of two, from `gemm.decode.decode_config.DecodeConfig`.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gemm.decode.decode_config import DecodeConfig


@gluon.constexpr_function
def x_smem_layout(SIZES: tuple[int, ...], S: DecodeConfig) -> gl.SharedLinearLayout:
    """Return the shared-memory layout of x: int32 words of shape SIZES, row-major, XOR-swizzled.

    SIZES ends with the five axes of `S.vec4_shape`: warps, digits, rows of x, 4 words, 4 lanes. Digits are
    the int8 digits that x is split into, or 1 for floats. A column of operand B is a pair (digit, row of x),
    so it has 16 words. The index of the word (0 to 3) is XORed with bits 1 and 2 of the index of the
    column. A warp then reads one word of the 4 lanes of eight columns, or all words of two columns, without
    bank conflicts. If `S.as_vec4`, the last two axes are swapped and there is no swizzle.

    `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    bases = _bits(SIZES)
    for number, word in ((5, 1), (6, 2)) if not S.as_vec4 else ():
        # Axes before those of `vec4_shape` are indexed separately, so only bits of `vec4_shape` are swizzled.
        if number < len(_bits(S.vec4_shape)):
            bases[number][-2] = word
    return gl.SharedLinearLayout(bases)


@gluon.constexpr_function
def copy_layout(SIZES: tuple[int, ...], W: int) -> gl.DistributedLinearLayout:
    """Return the register layout in which W warps copy an int32 tensor of shape SIZES, 16 bytes per thread.

    Thread i has words 4 i to 4 i + 3 in row-major order. If the tensor has more words than all threads hold,
    thread 0 has the next words too. If it has fewer, several threads hold the same words.
    """
    bits, threads = _bits(SIZES), 6 + W.bit_length()
    bits += [[0] * len(SIZES)] * (threads - len(bits))
    return gl.DistributedLinearLayout(bits[:2] + bits[threads:], bits[2:7], bits[7:threads], [], list(SIZES))


@gluon.constexpr_function
def _bits(SIZES: tuple[int, ...]) -> list[list[int]]:
    """Return the basis of a row-major linear layout of shape `SIZES`: a vector per bit of an index.

    The lowest bit of the last axis comes first. For (2, 4): [0, 1], [0, 2], [1, 0].
    """
    bits = []
    for axis, size in reversed(list(enumerate(SIZES))):
        for bit in range(size.bit_length() - 1):
            bits.append([1 << bit if other == axis else 0 for other in range(len(SIZES))])
    return bits
