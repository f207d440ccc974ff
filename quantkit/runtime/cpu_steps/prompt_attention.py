"""Attention of prompts on a CPU in 16-bit dtypes, by blocks of queries: faster than SDPA, and less rounded.

scores  = q[a:b] k[:b]^T    float32; keys after the last query of the block are not read
weights = softmax(scores)   float32, where SDPA rounds them to the dtype of v
y[a:b]  = weights v[:b]     rounded once
"""

import torch

#: Queries of a block. Smaller blocks skip more keys that are masked, larger ones are faster per query.
BLOCK = 64
#: Tokens of the prompts for which blocks are faster, measured with 2 cores of Zen 5: SDPA starts faster, and
#: with longer prompts the scores leave the cache.
FEWEST, MOST = 256, 1024
_DTYPES = (torch.bfloat16, torch.float16)


def why_not(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return why SDPA should compute this attention; None if `prompt_attention` should.

    `query` is [B, H, T, D], `key` [B, Hkv, L, D], `value` [B, Hkv, L, V]: B sequences, H query heads, Hkv key
    heads, T queries, L keys, D features of a key and V of a value.
    """
    tensors, tokens = (query, key, value), query.shape[2]
    reasons = (
        (
            query.device.type != "cpu" or query.dtype not in _DTYPES,
            f"SDPA computes {query.dtype} on {query.device.type}",
        ),
        (len({one.dtype for one in tensors}) > 1, "the dtypes differ"),
        (not FEWEST <= tokens <= MOST, f"SDPA is faster for {tokens} tokens"),
        (key.shape[2] < tokens, "some queries have no key of their own"),
        (torch.cpu._is_amx_tile_supported(), "SDPA has matrix instructions"),
        (torch.is_grad_enabled() and any(one.requires_grad for one in tensors), "a gradient is needed"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def prompt_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return causal attention y [B, T, H, V] = softmax(scale * query key^T) value, in the dtype of `query`.

    `query` is [B, H, T, D], `key` [B, Hkv, L, D], `value` [B, Hkv, L, V]: B sequences, H query heads, Hkv key
    heads, T queries, L keys, D features of a key and V of a value. Query t attends to the first t + 1 keys.
    Products are computed in float32, and only y is rounded.
    """
    batch, heads, tokens, _ = query.shape
    groups, features = key.shape[1], value.shape[-1]
    out = query.new_empty(batch, tokens, groups, heads // groups, features)
    later = torch.full((BLOCK, BLOCK), float("-inf"), device=query.device).triu_(1)
    # One memory for the scores of all blocks: what is freed goes back to the system, and is cleared again.
    room = torch.empty(heads * min(BLOCK, tokens) * tokens, device=query.device)
    for number in range(batch):
        q = (query[number].float() * scale).view(groups, heads // groups, tokens, -1)
        k, v = key[number, :, :tokens].float(), value[number, :, :tokens].float()
        for start in range(0, tokens, BLOCK):
            stop = min(start + BLOCK, tokens)
            rows = q[:, :, start:stop].reshape(groups, -1, q.shape[-1])
            scores = room[: rows.shape[0] * rows.shape[1] * stop].view(groups, -1, stop)
            torch.bmm(rows, k[:, :stop].mT, out=scores)
            by_query = scores.view(groups, -1, stop - start, stop)
            by_query[..., start:].add_(later[: stop - start, : stop - start])
            torch.softmax(scores, -1, out=scores)
            y = torch.bmm(scores, v[:, :stop]).view(groups, -1, stop - start, features)
            out[number, start:stop] = y.permute(2, 0, 1, 3)
    return out.view(batch, tokens, heads, features)
