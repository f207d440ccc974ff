"""Where words of x are in shared memory, and which threads copy them: layouts of `x_smem`.

Sizes are those of `quantkit.kernels.gemm.decode.decode_config.DecodeConfig`, powers of two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gemm.decode.decode_config import DecodeConfig


@gluon.constexpr_function
def x_smem_layout(SIZES: tuple[int, ...], S: DecodeConfig) -> gl.SharedLinearLayout:
    """Where words of `SIZES` are, whose last axes are those of `S.vec4_shape`: one after the other.

    Where they are no quads, words of a column n have an order of their own, so that both a word of eight
    columns, and all of two, are in all banks.
    """
    bases = _bits(SIZES)
    for number, word in ((5, 1), (6, 2)) if not S.as_vec4 else ():
        # What has a number of its own is read without those before it.
        if number < len(_bits(S.vec4_shape)):
            bases[number][-2] = word
    return gl.SharedLinearLayout(bases)


@gluon.constexpr_function
def copy_layout(SIZES: tuple[int, ...], W: int) -> gl.DistributedLinearLayout:
    """Four words of a thread, threads of W warps side by side."""
    bits, threads = _bits(SIZES), 6 + W.bit_length()
    bits += [[0] * len(SIZES)] * (threads - len(bits))
    return gl.DistributedLinearLayout(bits[:2] + bits[threads:], bits[2:7], bits[7:threads], [], list(SIZES))


@gluon.constexpr_function
def _bits(SIZES: tuple[int, ...]) -> list[list[int]]:
    """The bits that count all of `SIZES`, those of the last axis first."""
    bits = []
    for axis, size in reversed(list(enumerate(SIZES))):
        for bit in range(size.bit_length() - 1):
            bits.append([1 << bit if other == axis else 0 for other in range(len(SIZES))])
    return bits
