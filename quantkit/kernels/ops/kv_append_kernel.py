"""Keys and values of a prompt to the memory of a cache: one launch for all layers."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "LENGTH", "END", "HEADS"])
def fill(table, T, LENGTH, END, HEADS, W: tl.constexpr, WP: tl.constexpr, BT: tl.constexpr):
    """`table` [N, 5] says where tensors are written and read, and by what strides: a program for BT tokens.

    What is written is [B, HEADS, LENGTH, W] words of 64 bits, of which END tokens are written: T as they are
    read, the others with zeros. Strides, in words, are those of sequences, heads and tokens.
    """
    entry = table + tl.program_id(0) * 5
    room = tl.load(entry).to(table.dtype)
    states = tl.load(entry + 1).to(table.dtype)
    head = tl.program_id(1).to(tl.int64)
    at = (tl.program_id(2) * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    w = tl.arange(0, WP)[None, :]
    states += (head // HEADS) * tl.load(entry + 2) + (head % HEADS) * tl.load(entry + 3)
    words = tl.load(states + at * tl.load(entry + 4) + w, mask=(at < T) & (w < W), other=0)
    tl.store(room + (head * LENGTH + at) * W + w, words, mask=(at < END) & (w < W))
