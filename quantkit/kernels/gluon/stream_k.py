"""Who does which steps of the tiles of `wgmma_gemm`, and how the sums of several become those of a tile.

Tiles up to FULL are done whole, one by one. The steps of the others, which begin WIDTH after each other, are
shared out, SHARE to each program (stream-K, arXiv 2301.03598). Who has the last steps of such a tile writes
it. The others leave what they have in `sums`, float32 [programs, ROWS // 64, 64 * BM], and say so by TOKEN,
which no other launch of the process has, in what follows there: int64 [programs, ROWS // 64].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.compat import barrier


@gluon.jit
def work_range(M, N, FULL, SHARE, WIDTH, STEPS, ROWS: gl.constexpr, BM: gl.constexpr):
    """How many whole tiles this program does, how many in all, its share of the others, and what it leaves.

    First is the part that it leaves to another program, if there is one, and last the end of a tile of which
    others have parts.
    """
    program = gl.program_id(0)
    others = gl.cdiv(M, BM) * gl.cdiv(N, ROWS) - FULL
    whole = gl.cdiv(gl.maximum(FULL - program, 0), gl.num_programs(0))
    begin = gl.minimum(program * SHARE, others * WIDTH)
    end = gl.minimum(begin + SHARE, others * WIDTH)
    shared = gl.where(begin < end, (end + WIDTH - 1) // WIDTH - begin // WIDTH, 0)
    has_end = end - begin // WIDTH * WIDTH >= STEPS
    left = gl.where((shared == 2) | ((shared == 1) & (not has_end)), 1, 0)
    return whole, whole + shared, begin, end, left


@gluon.jit
def work_tile(number, whole, begin, end, left, FULL, WIDTH, STEPS):
    """The tile of a job, its first step, and the one after its last."""
    is_whole = (number >= left) & (number < whole + left)
    other = gl.where(number < left, (end - 1) // WIDTH, begin // WIDTH)
    tile = gl.where(is_whole, gl.program_id(0) + (number - left) * gl.num_programs(0), FULL + other)
    first = gl.where(is_whole, 0, gl.maximum(begin - other * WIDTH, 0))
    last = gl.where(is_whole, STEPS, gl.minimum(end - other * WIDTH, STEPS))
    return tile, first, last


@gluon.jit
def first_of(tile, FULL, SHARE, WIDTH):
    """The first of the programs that have steps of a tile that is shared out."""
    return (tile - FULL) * WIDTH // gl.maximum(SHARE, 1)


@gluon.jit
def store_partials(total, sums, which: gl.constexpr, TOKEN, ROWS: gl.constexpr, BM: gl.constexpr):
    """Leave sums to the program that writes the tile."""
    flat = _in_registers_of_threads(total, BM)
    FLAT: gl.constexpr = flat.type.layout
    gl.store(_sums_of(gl.program_id(0), sums, which, FLAT, ROWS, BM), flat)
    barrier()
    gl.atomic_xchg(_said_by(gl.program_id(0), sums, which, ROWS, BM), TOKEN, sem="release", scope="gpu")


@gluon.jit
def fixup(
    total, sums, before, which: gl.constexpr, TOKEN, ROWS: gl.constexpr, BM: gl.constexpr, SUMS: gl.constexpr
):
    """Add what programs from `before` on have left, and take back their words: a graph has a token for good.

    They have begun before this one, as programs begin in the order of their numbers, and wait for none with a
    larger one.
    """
    last = gl.program_id(0) - 1
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for first in range(before, last + 1, 32):
        programs = gl.minimum(first + gl.arange(0, 32, LANES), last)
        said = _said_by(programs, sums, which, ROWS, BM)
        while gl.min((_acquired(said) == TOKEN).to(gl.int32), 0) == 0:
            pass
        barrier()
        gl.store(said, gl.full([32], 0, gl.int64, LANES))
    flat = _in_registers_of_threads(total, BM)
    FLAT: gl.constexpr = flat.type.layout
    for program in range(before, last + 1):
        flat += gl.load(_sums_of(program, sums, which, FLAT, ROWS, BM))
    flat = gl.permute(gl.reshape(flat, (BM // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(flat, (64, BM)), SUMS, assert_trivial=True)


@gluon.jit
def _in_registers_of_threads(total, BM: gl.constexpr):
    """Sums [64, BM] as threads hold them: four in a row of one thread, then the next thread."""
    flat = gl.permute(gl.reshape(total, (4, 2, 8, BM // 8, 4, 2)), (3, 0, 2, 4, 1, 5))
    return gl.reshape(flat, (64 * BM,))


@gluon.jit
def _sums_of(program, sums, which: gl.constexpr, FLAT: gl.constexpr, ROWS: gl.constexpr, BM: gl.constexpr):
    """Where a group of warps of a program leaves its sums."""
    return sums + (program.to(gl.int64) * (ROWS // 64) + which) * (64 * BM) + gl.arange(0, 64 * BM, FLAT)


@gluon.jit
def _said_by(program, sums, which: gl.constexpr, ROWS: gl.constexpr, BM: gl.constexpr):
    """Where it says that they are there."""
    said = sums + gl.num_programs(0).to(gl.int64) * (ROWS * BM)
    return said.to(gl.pointer_type(gl.int64), bitcast=True) + program * (ROWS // 64) + which


@gluon.jit
def _acquired(words):
    """Words of other programs; what they wrote before is there if they are."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [words], dtype=gl.int64, is_pure=False, pack=1
    )
