"""Attention of a prefill chunk over K and V that lie dense on the device, as the staging ring leaves them.

Where prefills lie in blocks that the device addresses, the paged kernels compute them (`sub_batch_attention`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from neo_compile.attention import AttentionSite


def attend_chunk(
    site: AttentionSite,
    q_THD: torch.Tensor,
    k_HSD: torch.Tensor,
    v_HSD: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a chunk of T tokens that ends a context of S >= T tokens.

    Args:
        q_THD: queries of the chunk, [T, num_q_heads, head_dim].
        k_HSD, v_HSD: K and V of the whole context, the chunk included, [num_kv_heads, S, dim].
        sinks: extra logit per query head in the softmax's denominator, [num_q_heads], or None.

    Returns:
        [T, num_q_heads, v_head_dim] in q's dtype.
    """
    num_tokens, context_len = q_THD.shape[0], k_HSD.shape[1]
    q = q_THD.transpose(0, 1).unsqueeze(0)
    k, v = k_HSD.unsqueeze(0).to(q.dtype), v_HSD.unsqueeze(0).to(q.dtype)
    window = site.window if site.window is not None and site.window < context_len else None
    is_whole = num_tokens == context_len and window is None
    mask = None if is_whole else _causal_mask(num_tokens, context_len, window)
    if site.softcap is None and sinks is None:
        grouped = site.num_q_heads != site.num_kv_heads
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_whole, scale=site.scale, enable_gqa=grouped
        )
    else:
        if mask is None:
            mask = _causal_mask(num_tokens, context_len, None)
        out = _explicit_attention(site, q, k, v, mask, sinks)
    return out[0].transpose(0, 1)


def _causal_mask(num_tokens: int, context_len: int, window: int | None) -> torch.Tensor:
    """True where a query may look, [T, S]; the chunk's first query is token S - T."""
    query = torch.arange(context_len - num_tokens, context_len)[:, None]
    key = torch.arange(context_len)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def _explicit_attention(
    site: AttentionSite,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention written out, in fp32, for what SDPA has no argument for (soft cap, sinks)."""
    group = site.num_q_heads // site.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q.float() @ k.float().transpose(-1, -2)) * site.scale
    if site.softcap is not None:
        scores = site.softcap * torch.tanh(scores / site.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink_column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[-2]]
    return (weights @ v.float()).to(q.dtype)
