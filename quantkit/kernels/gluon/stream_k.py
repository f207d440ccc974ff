"""Stream-K schedule of `wgmma_gemm`: which program computes which part of an output tile, and the fix-up.

An output tile is BN rows of W times BM rows of x. Its columns K are cut into STEPS equal steps. Programs
compute the first WHOLE_TILES tiles whole, one tile after another. The steps of the remaining tiles, which are
shared, are numbered in one sequence. A shared tile takes TILE_STRIDE indices, of which the first STEPS are
steps and any others are empty. Indices are divided evenly among the programs:

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
    """Return the share of this program in the stream-K schedule: five int32 scalars.

        whole          number of tiles that the program computes whole
        items          number of its work items: whole tiles, and pieces of shared tiles
        begin, end     the program's steps of shared tiles have index begin <= i < end
        has_partial    1 if its last steps are a piece of a tile that another program writes, else 0

    A step is one of STEPS equal slices of the columns K of a tile; steps of all shared tiles are numbered in
    one sequence. The arguments are:

        M, N, BM, BN         y is [M, N]; an output tile is BN rows of W times BM rows of x
        WHOLE_TILES          number of tiles that are not shared
        STEPS_PER_PROGRAM    steps of shared tiles per program
        TILE_STRIDE          index of step 0 of a shared tile, minus that of the shared tile before
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

    A step is one of STEPS equal slices of the columns K of a tile. An item whose end step is STEPS writes the
    tile; any other stores partial sums. Item 0 is such a piece if `has_partial`, because another program
    waits for it.

        whole, begin, end, has_partial    results of `work_range`
        WHOLE_TILES                       number of tiles that are not shared
        TILE_STRIDE                       index of step 0 of a shared tile, minus that of the one before
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
    """Return the index of the first program that computes steps of the shared output tile `tile`: a scalar.

    tile                 index of the tile among all output tiles
    WHOLE_TILES          number of tiles that are not shared; they come first
    STEPS_PER_PROGRAM    steps of shared tiles per program; a step is a slice of the columns K of a tile
    TILE_STRIDE          index of step 0 of a shared tile, minus that of the shared tile before
    """
    return (tile - WHOLE_TILES) * TILE_STRIDE // gl.maximum(STEPS_PER_PROGRAM, 1)


@gluon.jit
def store_partials(total, sums, group: gl.constexpr, TOKEN, BN: gl.constexpr, BM: gl.constexpr):
    """Store partial sums `total` float32 [64, BM] of a warp group, then set its flag to TOKEN (release).

        sums     float32 [programs, BN // 64, 64 * BM], followed by flags int64 [programs, BN // 64]
        group    index of the warp group; the sums go to `sums[program, group]`
        TOKEN    int64 that marks this launch

    An output tile is BN rows of W, 64 per warp group, times BM rows of x. The program that writes the tile
    waits for the flag (`fixup`).
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
    """Return `total` plus the partial sums of programs `before` to p - 1, where p is this program: [64, BM].

        total     float32 [64, BM], layout ACC: sums of warp group `group`, 64 of the BN rows of W of a tile
        sums      float32 [programs, BN // 64, 64 * BM], followed by flags int64 [programs, BN // 64]
        before    index of the first program with partial sums of the tile
        TOKEN     int64 that marks this launch

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
    """Reorder sums [64, BM] of a warp group to [64 * BM], so that each thread holds runs of four, 16 bytes.

    Runs of 16 bytes are stored and loaded by one instruction.
    """
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
    """Return pointers to the int64 flags of warp group `group` of `program`, a scalar or [...].

    `sums` points to the partial sums, float32 [programs, BN * BM]. Flags int64 [programs, BN // 64] follow
    them.
    """
    flags = sums + gl.num_programs(0).to(gl.int64) * (BN * BM)
    return flags.to(gl.pointer_type(gl.int64), bitcast=True) + program * (BN // 64) + group


@gluon.jit
def _load_acquire(words):
    """Load flags of other programs, int64, from pointers `words` [...], with acquire semantics.

    Stores that those programs made before they set the flag are visible afterwards.
    """
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [words], dtype=gl.int64, is_pure=False, pack=1
    )
