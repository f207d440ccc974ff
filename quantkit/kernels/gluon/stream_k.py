"""Who does which steps of the tiles of `wgmma_gemm`, and how the sums of several become those of a tile.

Tiles up to WHOLE_TILES are done whole, one by one. The steps of the others, which begin TILE_STRIDE after
each other, are shared out, STEPS_PER_PROGRAM to each program (stream-K, arXiv 2301.03598). Who has the last
steps of such a tile writes it. The others leave what they have in `sums`, float32 [programs, BN // 64, 64 *
BM], and say so by TOKEN, which no other launch of the process has, in what follows there: int64 [programs, BN
// 64].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.compat import barrier


@gluon.jit
def work_range(M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, STEPS, BN: gl.constexpr, BM: gl.constexpr):
    """How many whole tiles this program does, how many in all, its share of the others, and what it leaves.

    First is the part that it leaves to another program, if there is one, and last the end of a tile of which
    others have parts.
    """
    program = gl.program_id(0)
    split_tiles = gl.cdiv(M, BM) * gl.cdiv(N, BN) - WHOLE_TILES
    whole = gl.cdiv(gl.maximum(WHOLE_TILES - program, 0), gl.num_programs(0))
    begin = gl.minimum(program * STEPS_PER_PROGRAM, split_tiles * TILE_STRIDE)
    end = gl.minimum(begin + STEPS_PER_PROGRAM, split_tiles * TILE_STRIDE)
    split_items = gl.where(begin < end, (end + TILE_STRIDE - 1) // TILE_STRIDE - begin // TILE_STRIDE, 0)
    has_end = end - begin // TILE_STRIDE * TILE_STRIDE >= STEPS
    has_partial = gl.where((split_items == 2) | ((split_items == 1) & (not has_end)), 1, 0)
    return whole, whole + split_items, begin, end, has_partial


@gluon.jit
def work_tile(number, whole, begin, end, has_partial, WHOLE_TILES, TILE_STRIDE, STEPS):
    """The tile of a job, its first step, and the one after its last."""
    is_whole = (number >= has_partial) & (number < whole + has_partial)
    other = gl.where(number < has_partial, (end - 1) // TILE_STRIDE, begin // TILE_STRIDE)
    tile = gl.where(
        is_whole, gl.program_id(0) + (number - has_partial) * gl.num_programs(0), WHOLE_TILES + other
    )
    first = gl.where(is_whole, 0, gl.maximum(begin - other * TILE_STRIDE, 0))
    last = gl.where(is_whole, STEPS, gl.minimum(end - other * TILE_STRIDE, STEPS))
    return tile, first, last


@gluon.jit
def first_contributor(tile, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE):
    """The first of the programs that have steps of a tile that is shared out."""
    return (tile - WHOLE_TILES) * TILE_STRIDE // gl.maximum(STEPS_PER_PROGRAM, 1)


@gluon.jit
def store_partials(total, sums, group: gl.constexpr, TOKEN, BN: gl.constexpr, BM: gl.constexpr):
    """Leave sums to the program that writes the tile."""
    flat = _thread_order(total, BM)
    FLAT: gl.constexpr = flat.type.layout
    gl.store(_partial_pointers(gl.program_id(0), sums, group, FLAT, BN, BM), flat)
    barrier()
    gl.atomic_xchg(_flag_pointers(gl.program_id(0), sums, group, BN, BM), TOKEN, sem="release", scope="gpu")


@gluon.jit
def fixup(
    total, sums, before, group: gl.constexpr, TOKEN, BN: gl.constexpr, BM: gl.constexpr, ACC: gl.constexpr
):
    """Add what programs from `before` on have left, and take back their words: a graph has a token for good.

    They have begun before this one, as programs begin in the order of their numbers, and wait for none with a
    larger one.
    """
    last = gl.program_id(0) - 1
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for first in range(before, last + 1, 32):
        programs = gl.minimum(first + gl.arange(0, 32, LANES), last)
        flags = _flag_pointers(programs, sums, group, BN, BM)
        while gl.min((_load_acquire(flags) == TOKEN).to(gl.int32), 0) == 0:
            pass
        barrier()
        gl.store(flags, gl.full([32], 0, gl.int64, LANES))
    flat = _thread_order(total, BM)
    FLAT: gl.constexpr = flat.type.layout
    for program in range(before, last + 1):
        flat += gl.load(_partial_pointers(program, sums, group, FLAT, BN, BM))
    flat = gl.permute(gl.reshape(flat, (BM // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(flat, (64, BM)), ACC, assert_trivial=True)


@gluon.jit
def _thread_order(total, BM: gl.constexpr):
    """Sums [64, BM] as threads hold them: four in a row of one thread, then the next thread."""
    flat = gl.permute(gl.reshape(total, (4, 2, 8, BM // 8, 4, 2)), (3, 0, 2, 4, 1, 5))
    return gl.reshape(flat, (64 * BM,))


@gluon.jit
def _partial_pointers(
    program, sums, group: gl.constexpr, FLAT: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr
):
    """Where a group of warps of a program leaves its sums."""
    return sums + (program.to(gl.int64) * (BN // 64) + group) * (64 * BM) + gl.arange(0, 64 * BM, FLAT)


@gluon.jit
def _flag_pointers(program, sums, group: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr):
    """Where it says that they are there."""
    flags = sums + gl.num_programs(0).to(gl.int64) * (BN * BM)
    return flags.to(gl.pointer_type(gl.int64), bitcast=True) + program * (BN // 64) + group


@gluon.jit
def _load_acquire(words):
    """Words of other programs; what they wrote before is there if they are."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [words], dtype=gl.int64, is_pure=False, pack=1
    )
