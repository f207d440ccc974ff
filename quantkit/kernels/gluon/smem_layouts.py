"""Layouts of x in shared memory for `fused-gemv`, and of the threads that copy it.

Sizes are from `gemm.decode.decode_config.DecodeConfig`, powers of two.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gemm.decode.decode_config import DecodeConfig


@gluon.constexpr_function
def x_smem_layout(SIZES: tuple[int, ...], S: DecodeConfig) -> gl.SharedLinearLayout:
    """Return the row-major layout of int32 words of shape `SIZES` in shared memory.

    The last axes are `S.vec4_shape`: warps, columns of operand B, and the four words of four lanes. Unless
    words are stored as `as_vec4`, the words of a column are XOR-swizzled. One word of eight columns, and all
    words of two columns, then lie in different banks. `S` is a `DecodeConfig`: all compile-time constants.
    """
    bases = _bits(SIZES)
    for number, word in ((5, 1), (6, 2)) if not S.as_vec4 else ():
        # Axes before those of `vec4_shape` are indexed separately, so only bits of `vec4_shape` are swizzled.
        if number < len(_bits(S.vec4_shape)):
            bases[number][-2] = word
    return gl.SharedLinearLayout(bases)


@gluon.constexpr_function
def copy_layout(SIZES: tuple[int, ...], W: int) -> gl.DistributedLinearLayout:
    """Return the register layout of an int32 tensor of shape SIZES for W warps that copy it.

    A thread has four words (16 bytes) in row-major order, the next thread the next four. A larger tensor
    goes on with the first thread. Of a smaller one, threads have copies.
    """
    bits, threads = _bits(SIZES), 6 + W.bit_length()
    bits += [[0] * len(SIZES)] * (threads - len(bits))
    return gl.DistributedLinearLayout(bits[:2] + bits[threads:], bits[2:7], bits[7:threads], [], list(SIZES))


@gluon.constexpr_function
def _bits(SIZES: tuple[int, ...]) -> list[list[int]]:
    """Return a basis vector per bit of an index of shape `SIZES`, last axis and lowest bit first."""
    bits = []
    for axis, size in reversed(list(enumerate(SIZES))):
        for bit in range(size.bit_length() - 1):
            bits.append([1 << bit if other == axis else 0 for other in range(len(SIZES))])
    return bits
