"""Write keys and values to a KV cache: new tokens of one layer, and a prompt for all layers."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def append(
    k, v, cache_length, keys, values, T, LENGTH,
    k_b, k_h, k_t, v_b, v_h, v_t, keys_b, keys_h, keys_l, values_b, values_h, values_l,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Append T new tokens to a KV cache in place: `k` [B, H, T, D] to `keys`, `v` [B, H, T, V] to `values`.

        keys, values     caches [B, H, LENGTH, D] and [B, H, LENGTH, V], with room for LENGTH tokens
        cache_length     [] int64, the number of tokens already in the caches
        k_b, k_h, ..     strides, named after tensor and dimension
        D, V             features of a key and of a value; DP and VP are D and V rounded up to powers of two
        PDL              if True, start before the previous kernel ends (programmatic dependent launch)

    There are B sequences of H heads. A token without room is not written; the last key in the cache of each
    head then becomes NaN. Grid: (B * T, H).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    first = tl.load(cache_length).to(tl.int64)
    at = tl.minimum(first + t, LENGTH - 1)
    lost = (first + T > LENGTH) & (at == LENGTH - 1)
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    key = tl.load(k + b * k_b + head * k_h + t * k_t + d, mask=d < D, other=0.0)
    value = tl.load(v + b * v_b + head * v_h + t * v_t + e, mask=e < V, other=0.0)
    key = tl.where(lost, float("nan"), key).to(key.dtype)
    tl.store(keys + b * keys_b + head * keys_h + at * keys_l + d, key, mask=d < D)
    tl.store(
        values + b * values_b + head * values_h + at * values_l + e, value, mask=(e < V) & (first + t == at)
    )


@triton.jit(do_not_specialize=["T", "LENGTH", "END", "HEADS"])
def fill(table, T, LENGTH, END, HEADS, W: tl.constexpr, WP: tl.constexpr, BT: tl.constexpr):
    """Copy keys or values of a prompt from N source tensors to N caches, and write zeros behind them.

        table        [N, 5] int64, a row per cache: addresses of the cache and of its source, then the strides
                     of sequences, heads and tokens of the source, in words of 8 bytes
        cache        contiguous [B, HEADS, LENGTH, W]: a token of a head has W words of 8 bytes
        source       [B, HEADS, T, W], its T tokens are copied to the first T of the cache
        END          tokens T to END - 1 of the cache become 0; none if END is T
        WP           W rounded up to a power of two
        BT           tokens per program

    There are B sequences. Grid: (N, B * HEADS, END / BT rounded up).
    """
    entry = table + tl.program_id(0) * 5
    cache = tl.load(entry).to(table.dtype)
    states = tl.load(entry + 1).to(table.dtype)
    head = tl.program_id(1).to(tl.int64)
    at = (tl.program_id(2) * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    w = tl.arange(0, WP)[None, :]
    states += (head // HEADS) * tl.load(entry + 2) + (head % HEADS) * tl.load(entry + 3)
    words = tl.load(states + at * tl.load(entry + 4) + w, mask=(at < T) & (w < W), other=0)
    tl.store(cache + (head * LENGTH + at) * W + w, words, mask=(at < END) & (w < W))
