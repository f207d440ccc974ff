"""Keys, values and masks of decode attention, loaded straight into the fragments of `mma`."""
# mypy: ignore-errors

import triton
import triton.language as tl

#: exp(x) = exp2(x * LOG2E); GPUs have an instruction for exp2.
LOG2E = tl.constexpr(1.4426950408889634)
#: The lowest float32.
LOWEST = tl.constexpr(-3.4028234663852886e38)
#: Keeps Triton from changing the layout of load addresses.
_AS_IT_IS = tl.constexpr("mov.b32 $0, $1;")


@triton.jit
def load_rows(
    at, stride, first, WARP: tl.constexpr, valid, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, others=0.0, OTHER: tl.constexpr = False,
):  # fmt: skip
    """Load R rows of D features per warp, WARP rows apart: [4, 8, W, R / 8 * runs, 8].

    Dimensions are t, r, warp, every eighth row times runs of 32 features, and 8 features. Rows that are not
    `valid` [4, 8, W, R / 8, 1] are `others`. With OTHER, it loads `other_half` instead.
    """
    RUNS: tl.constexpr = DP // 32
    r = tl.arange(0, 8)[:, None, None, None]
    w = tl.arange(0, W)[:, None, None]
    i = tl.arange(0, R // 8 * RUNS)[:, None]
    row = first + w * WARP + i // RUNS * 8 + r
    d = features_of_lanes(R, DP)
    valid = tl.reshape(tl.broadcast_to(valid, (4, 8, W, R // 8, RUNS)), (4, 8, W, R // 8 * RUNS, 1))
    at += row.to(tl.int64) * stride
    if OTHER:
        return other_half(at, d, valid & (d < D), D)
    return tl.load(at + d, mask=valid & (d < D), other=others)


@triton.jit
def features_of_lanes(R: tl.constexpr, DP: tl.constexpr):
    """Return the features of a key that each lane has in `load_rows`: int32 [4, 1, 1, R / 8 * runs, 8]."""
    run = tl.arange(0, R // 8 * (DP // 32))[:, None] % (DP // 32)
    return run * 32 + tl.arange(0, 4)[:, None, None, None, None] * 8 + tl.arange(0, 8)


@triton.jit
def repeated(x, TIMES: tl.constexpr):
    """Repeat rows of `load_rows` TIMES, one after the other: [4, 8, W, TIMES * runs, 8]."""
    W: tl.constexpr = x.shape[2]
    RUNS: tl.constexpr = x.shape[3]
    x = tl.broadcast_to(tl.reshape(x, (4, 8, W, 1, RUNS, 8)), (4, 8, W, TIMES, RUNS, 8))
    return tl.reshape(x, (4, 8, W, TIMES * RUNS, 8))


@triton.jit
def as_rows(x, W: tl.constexpr, R: tl.constexpr, DP: tl.constexpr):
    """Return what `load_rows` loaded, W warps of R rows, as [W, DP, R]; runs of 32 features are permuted."""
    # t, r, warp, 8 rows, 32 features, and 8: two `mma` take 2 + 2 of them each.
    x = tl.reshape(x, (4, 8, W, R // 8, DP // 32, 2, 2, 2))
    return tl.reshape(tl.permute(x, (2, 4, 5, 6, 0, 7, 3, 1)), (W, DP, R))


@triton.jit
def load_columns(
    at, stride, first, valid, W: tl.constexpr, R: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, others=0.0
):
    """Load R rows of V features per warp, for sums over rows: [4, 8, W, R / 4 * S, 8].

    S is the number of runs of 64 features.
    """
    S: tl.constexpr = VP // 64
    t = tl.arange(0, 4)[:, None, None, None, None]
    r = tl.arange(0, 8)[:, None, None, None]
    w = tl.arange(0, W)[:, None, None]
    i = tl.arange(0, R // 4 * S)[:, None]
    row = first + w * R + i // (2 * S) * 8 + t * 2 + i // S % 2
    e = (i % S * 8 + r) * 8 + tl.arange(0, 8)
    valid = tl.reshape(tl.broadcast_to(valid, (4, 8, W, R // 4, S)), (4, 8, W, R // 4 * S, 1))
    return tl.load(at + row.to(tl.int64) * stride + e, mask=valid & (e < V), other=others)


@triton.jit
def as_columns(x, W: tl.constexpr, R: tl.constexpr, VP: tl.constexpr):
    """View the result of `load_columns` as [W, VP, R]: feature 64 s + 8 r + j is 64 s + 8 j + r."""
    x = tl.reshape(x, (4, 8, W, R // 8, 2, VP // 64, 8))
    return tl.reshape(tl.permute(x, (2, 5, 6, 1, 3, 0, 4)), (W, VP, R))


@triton.jit
def key_numbers(first, W: tl.constexpr, KEYS: tl.constexpr):
    """Return the numbers of the keys that each lane has, from key `first` on, in two layouts.

    They are those of `load_rows`, [4, 8, W, KEYS / 8, 1], and `load_columns`, [4, 8, W, KEYS / 4, 1].
    """
    t = tl.arange(0, 4)[:, None, None, None, None]
    r = tl.arange(0, 8)[:, None, None, None]
    w = tl.arange(0, W)[:, None, None]
    i = tl.arange(0, KEYS // 8)[:, None]
    j = tl.arange(0, KEYS // 4)[:, None]
    return first + w * KEYS + i * 8 + r + t * 0, first + w * KEYS + j // 2 * 8 + t * 2 + j % 2 + r * 0


@triton.jit
def other_half(at, d, valid, D: tl.constexpr):
    """Load the partner of each feature `d` [...] under rotation, from the other half of a head."""
    return tl.load(at + tl.where(d < D // 2, d + D // 2, d - D // 2), mask=valid, other=0.0)


@triton.jit
def visible_keys(
    mask, first, LENGTH, m_l, W: tl.constexpr, KEYS: tl.constexpr, G: tl.constexpr, MASK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Return which keys are visible, in both layouts of `key_numbers`, and addends of scores [W, G, KEYS]."""
    row, column = key_numbers(first, W, KEYS)
    row, column = _added(mask, row, LENGTH, m_l, MASK, PTX), _added(mask, column, LENGTH, m_l, MASK, PTX)
    # t, r, warp, 8 keys, c
    added = tl.permute(tl.reshape(column, (4, 8, W, KEYS // 8, 2)), (2, 1, 3, 0, 4))
    added = tl.broadcast_to(tl.reshape(added, (W, 1, 8, KEYS)), (W, G // 8, 8, KEYS))
    return row > -float("inf"), column > -float("inf"), tl.reshape(added, (W, G, KEYS))


@triton.jit
def _added(mask, at, LENGTH, m_l, MASK: tl.constexpr, PTX: tl.constexpr):
    """Return the addends of scores of keys number `at` [...], times log2(e), float32; -inf: hidden."""
    if PTX:
        at = tl.inline_asm_elementwise(_AS_IT_IS, "=r,r", [at], tl.int32, True, 1)
    valid = at < LENGTH
    if MASK == "":
        return tl.where(valid, 0.0, -float("inf"))
    at = mask + at.to(tl.int64) * m_l
    if MASK == "bool":
        return tl.where(tl.load(at, mask=valid, other=0) != 0, 0.0, -float("inf"))
    added = tl.load(at, mask=valid, other=-float("inf")).to(tl.float32)
    # A mask of the lowest float32 hides a key, unless all keys are hidden.
    return tl.where(added > -float("inf"), tl.maximum(added * LOG2E, LOWEST), added)
