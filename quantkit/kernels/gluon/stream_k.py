"""Stream-K schedule of `wgmma_gemm`: which program computes which part of an output tile, and the fix-up.

An output tile is BN rows of W times BM rows of x. Its columns K are cut into STEPS equal steps. Programs
compute the first WHOLE_TILES tiles whole, one tile after another. The steps of the remaining tiles are
numbered in one sequence, in which a tile takes TILE_STRIDE numbers, and divided evenly among the programs:

    tiles      | A, steps 0..n      | B, steps 0..n      |
    programs   | 0      | 1      | 2      | 3      |          1 writes A, 3 writes B

The program with the last steps of a tile writes the tile. The others store partial sums in `sums`, float32
[programs, BN // 64, 64 * BM]. They then store TOKEN in flags after the sums, int64 [programs, BN // 64]. No
other launch of the process has the same TOKEN.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.compat import barrier


@gluon.jit
def work_range(M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, STEPS, BN: gl.constexpr, BM: gl.constexpr):
    """Return the share of this program in the stream-K schedule: five int32 scalars that `work_tile` takes.

        whole          number of tiles that the program computes whole
        items          number of all its work items: whole tiles, and pieces of shared tiles
        begin, end     its steps of shared tiles: begin <= index < end
        has_partial    1 if its last steps begin a tile that another program writes

    A step is one of STEPS equal slices of the columns K of a tile. The piece that begins a tile is computed
    first, because another program waits for it. The piece that ends a tile is computed last.

        M, N, BM, BN        y is [M, N]; an output tile is BN rows of W times BM rows of x
        WHOLE_TILES         tiles that are not shared
        STEPS_PER_PROGRAM   steps of shared tiles per program
        TILE_STRIDE         distance of the indices of step 0 of two neighbouring shared tiles
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
    """Return work item `number` of this program: (output tile, first step, end step), int32 scalars.

    A step is one of STEPS equal slices of the columns K of a tile. An item whose end is STEPS writes the
    tile; any other stores partial sums. `whole`, `begin`, `end` and `has_partial` are from `work_range`. The
    first WHOLE_TILES tiles are not shared. Indices of step 0 of two neighbouring shared tiles differ by
    TILE_STRIDE.
    """
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
    """Return the index of the first program with steps of shared output tile `tile`, for `fixup`: a scalar.

    The first WHOLE_TILES tiles are not shared. A step is a slice of the columns K; the indices of step 0 of
    two neighbouring shared tiles differ by TILE_STRIDE. Each program has STEPS_PER_PROGRAM indices of steps.
    """
    return (tile - WHOLE_TILES) * TILE_STRIDE // gl.maximum(STEPS_PER_PROGRAM, 1)


@gluon.jit
def store_partials(total, sums, group: gl.constexpr, TOKEN, BN: gl.constexpr, BM: gl.constexpr):
    """Store partial sums `total` float32 [64, BM] of a warp group, for the program that writes the tile.

    `sums[program, group]`, of float32 [programs, BN // 64, 64 * BM], gets the sums. Then the flag of
    (program, group) is set to TOKEN, with release semantics. A tile is BN rows of W, 64 per warp group, times
    BM rows of x.
    """
    flat = _thread_order(total, BM)
    FLAT: gl.constexpr = flat.type.layout
    gl.store(_partial_pointers(gl.program_id(0), sums, group, FLAT, BN, BM), flat)
    barrier()
    gl.atomic_xchg(_flag_pointers(gl.program_id(0), sums, group, BN, BM), TOKEN, sem="release", scope="gpu")


@gluon.jit
def fixup(
    total, sums, before, group: gl.constexpr, TOKEN, BN: gl.constexpr, BM: gl.constexpr, ACC: gl.constexpr
):
    """Return `total` float32 [64, BM] plus the partial sums of programs from `before` to this one.

        total    sums of warp group `group`: 64 of the BN rows of W of the output tile, in register layout ACC
        sums     float32 [programs, BN // 64, 64 * BM], then a flag int64 for each (program, group)

    Waits until the flag of each program is TOKEN, then clears the flag, because a captured graph replays the
    same TOKEN. Sums are added in the order of programs, so results are the same every run. Programs start in
    the order of their indices and wait only for smaller ones, so this cannot deadlock.
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
    """Reorder sums [64, BM] of a warp group to [64 * BM]: four adjacent sums, 16 bytes, per thread."""
    flat = gl.permute(gl.reshape(total, (4, 2, 8, BM // 8, 4, 2)), (3, 0, 2, 4, 1, 5))
    return gl.reshape(flat, (64 * BM,))


@gluon.jit
def _partial_pointers(
    program, sums, group: gl.constexpr, FLAT: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr
):
    """Return pointers [64 * BM] to the partial sums of warp group `group` of `program`, in layout FLAT.

    `sums` is float32 [programs, BN // 64, 64 * BM]: BN rows of W, 64 per warp group, times BM rows of x.
    """
    return sums + (program.to(gl.int64) * (BN // 64) + group) * (64 * BM) + gl.arange(0, 64 * BM, FLAT)


@gluon.jit
def _flag_pointers(program, sums, group: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr):
    """Return pointers to the int64 flags of warp group `group` of `program`, which is a scalar or [...].

    In `sums`, flags [programs, BN // 64] follow the partial sums, float32 [programs, BN * BM].
    """
    flags = sums + gl.num_programs(0).to(gl.int64) * (BN * BM)
    return flags.to(gl.pointer_type(gl.int64), bitcast=True) + program * (BN // 64) + group


@gluon.jit
def _load_acquire(words):
    """Load flags of other programs, int64, from pointers `words` [...], with acquire semantics.

    Stores of those programs before the flag are visible afterwards.
    """
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [words], dtype=gl.int64, is_pure=False, pack=1
    )
