"""Kernels: y = x W^T on packed tensors. Nothing here knows how the codes were chosen.

Docstrings give the shape of each tensor, and its dtype unless it is one of these:

    x, y, bias, q, k, v, weights of norms    one activation dtype: bfloat16 or float16, without fused kernels
                                             float32 too
    sums                                     float32; int32 for products of 8-bit integers
    order, expert blocks                     int32; experts chosen by a router are int64
    scales, zero-points                      as the layout stores them (`layouts/fragment_layout.py`)

Words of several docstrings: a program is a thread block, a tile a launch configuration, a row tile 16 rows of
W. "Why" functions return a reason, as part of a sentence, or None.
"""
