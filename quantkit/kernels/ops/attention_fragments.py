"""Load keys, values and masks of decode attention straight into the fragments of `mma`.

Lane 4 r + t of each of W warps loads 8 features (16 bytes) at a time; r is 0 to 7, t 0 to 3. A run is 32
features of a key, or 64 of a value.
"""
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
    """Load R rows of D features for each of W warps, for sums over features: [4, 8, W, R / 8 * runs, 8].

    The axes are t and r of lane 4 r + t, warp, every eighth row times runs of 32 features, and 8 features.

        at, stride      row j is at pointer `at` + j * `stride`
        first, WARP     row i of warp w is row j = `first` + w * WARP + i
        DP              D padded to whole runs
        valid           [4, 8, W, R / 8, 1]: rows to load; the others are set to `others`
        OTHER           True to load the features that rotate with these instead: D / 2 away (`other_half`)
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
    """Return the features that each lane has after `load_rows`: int32 [4, 1, 1, R / 8 * runs, 8].

    The axes are t of lane 4 r + t, 1, 1, every eighth of R rows times runs of 32 features, and 8 features. DP
    is the number of features, padded to runs.
    """
    run = tl.arange(0, R // 8 * (DP // 32))[:, None] % (DP // 32)
    return run * 32 + tl.arange(0, 4)[:, None, None, None, None] * 8 + tl.arange(0, 8)


@triton.jit
def repeated(x, TIMES: tl.constexpr):
    """Repeat eight rows TIMES over, one after the other: [4, 8, W, runs, 8] to [4, 8, W, TIMES * runs, 8].

    `x` is the result of `load_rows` for W warps and eight rows, in runs of 32 features.
    """
    W: tl.constexpr = x.shape[2]
    RUNS: tl.constexpr = x.shape[3]
    x = tl.broadcast_to(tl.reshape(x, (4, 8, W, 1, RUNS, 8)), (4, 8, W, TIMES, RUNS, 8))
    return tl.reshape(x, (4, 8, W, TIMES * RUNS, 8))


@triton.jit
def as_rows(x, W: tl.constexpr, R: tl.constexpr, DP: tl.constexpr):
    """View the result of `load_rows`, R rows of DP features for each of W warps, as an operand [W, DP, R].

    Features are permuted within each run of 32, which a sum over features does not notice.
    """
    # t, r, warp, 8 rows, 32 features, and 8: two `mma` take 2 + 2 of them each.
    x = tl.reshape(x, (4, 8, W, R // 8, DP // 32, 2, 2, 2))
    return tl.reshape(tl.permute(x, (2, 4, 5, 6, 0, 7, 3, 1)), (W, DP, R))


@triton.jit
def load_columns(
    at, stride, first, valid, W: tl.constexpr, R: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, others=0.0
):
    """Load R rows of V features for each of W warps, for sums over rows: [4, 8, W, R / 4 * S, 8].

    The axes are t and r of lane 4 r + t, warp, every fourth row times S runs of 64 features, and 8 features.

        at, stride      row j is at pointer `at` + j * `stride`
        first           row i of warp w is row j = `first` + w * R + i
        VP              V padded to whole runs
        valid           [4, 8, W, R / 4, 1]: rows to load; the others are set to `others`
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
    """View the result of `load_columns`, R rows of VP features for each of W warps, as an operand [W, VP, R].

    Features are permuted: feature 64 i + 8 r + j becomes feature 64 i + 8 j + r.
    """
    x = tl.reshape(x, (4, 8, W, R // 8, 2, VP // 64, 8))
    return tl.reshape(tl.permute(x, (2, 5, 6, 1, 3, 0, 4)), (W, VP, R))


@triton.jit
def key_numbers(first, W: tl.constexpr, KEYS: tl.constexpr):
    """Return the indices of the keys that each lane has, from key `first` on: two int32 tensors.

    Each of W warps has KEYS keys. The first result, [4, 8, W, KEYS / 8, 1], is for keys loaded by
    `load_rows`. The second, [4, 8, W, KEYS / 4, 1], is for values loaded by `load_columns`. The axes are
    those of the loaded tensors.
    """
    t = tl.arange(0, 4)[:, None, None, None, None]
    r = tl.arange(0, 8)[:, None, None, None]
    w = tl.arange(0, W)[:, None, None]
    i = tl.arange(0, KEYS // 8)[:, None]
    j = tl.arange(0, KEYS // 4)[:, None]
    return first + w * KEYS + i * 8 + r + t * 0, first + w * KEYS + j // 2 * 8 + t * 2 + j % 2 + r * 0


@triton.jit
def other_half(at, d, valid, D: tl.constexpr):
    """Load the feature that rotates with each feature `d` [...], for rotary position embedding.

    The features of a head of D, at pointer `at`, rotate in pairs that are D / 2 apart. Features that are not
    `valid` become 0.
    """
    return tl.load(at + tl.where(d < D // 2, d + D // 2, d - D // 2), mask=valid, other=0.0)


@triton.jit
def visible_keys(
    mask, first, LENGTH, m_l, W: tl.constexpr, KEYS: tl.constexpr, G: tl.constexpr, MASK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Return which keys are visible, in both layouts of `key_numbers`, and what the mask adds to scores.

    results    bool [4, 8, W, KEYS / 8, 1], bool [4, 8, W, KEYS / 4, 1], and float32 [W, G, KEYS] for G query
               heads: the mask times log2(e), 0 without a mask, -inf for hidden keys with or without one
    first      index of the first key; each of W warps has KEYS keys; keys from LENGTH on are hidden
    mask       [LENGTH] with stride `m_l`
    MASK       kind of mask: "bool" (True: visible), "float" (added to scores) or "" for none
    PTX        True if inline PTX may be used
    """
    row, column = key_numbers(first, W, KEYS)
    row, column = _added(mask, row, LENGTH, m_l, MASK, PTX), _added(mask, column, LENGTH, m_l, MASK, PTX)
    # t, r, warp, 8 keys, c
    added = tl.permute(tl.reshape(column, (4, 8, W, KEYS // 8, 2)), (2, 1, 3, 0, 4))
    added = tl.broadcast_to(tl.reshape(added, (W, 1, 8, KEYS)), (W, G // 8, 8, KEYS))
    return row > -float("inf"), column > -float("inf"), tl.reshape(added, (W, G, KEYS))


@triton.jit
def _added(mask, at, LENGTH, m_l, MASK: tl.constexpr, PTX: tl.constexpr):
    """Return what the mask adds to scores, times log2(e), for keys of indices `at` [...]: float32 [...].

    Hidden keys get -inf, and so do keys from LENGTH on. `mask` [LENGTH] has stride `m_l` and is of the kind
    MASK: "bool" (True: visible), "float" (added to scores) or "" for none. PTX is True if inline PTX may be
    used.
    """
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
