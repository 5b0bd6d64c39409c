"""Float64 attention by the definition: the oracle of every kernel and every test. Slow on purpose, nothing clever in
it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["attend", "paged_decode_reference", "paged_varlen_reference"]


def attend(
    q_HTD: Tensor,
    k_HSD: Tensor,
    v_HSD: Tensor,
    scale: float,
    *,
    causal: bool = True,
    offset: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask_TS: Tensor | None = None,
) -> Tensor:
    """Attention of T query tokens over S cached tokens of one request; float64 [Hq, T, Dv].

    q [Hq, T, D], k [Hkv, S, D], v [Hkv, S, Dv], Hq a multiple of Hkv (query head h reads KV head h // (Hq / Hkv)).
    Query t sits at position offset + t (default S - T: the queries are the last tokens); causal hides later keys,
    window w leaves the last w up to the query's own. softcap: s = cap * tanh(s / cap), before masking. sinks [Hq]:
    one extra logit per head in the denominator only. mask_TS: True (or 0.0) = visible, False (or -inf) = hidden, on
    top. A row that sees nothing is 0.
    """
    q, k, v = q_HTD.double(), k_HSD.double(), v_HSD.double()
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    num_queries, num_keys = q.shape[1], k.shape[1]
    scores = (q @ k.transpose(1, 2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    first = num_keys - num_queries if offset is None else offset
    query_pos = torch.arange(num_queries).unsqueeze(1) + first
    key_pos = torch.arange(num_keys).unsqueeze(0)
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    if causal:
        hidden |= key_pos > query_pos
    if window is not None:
        hidden |= key_pos <= query_pos - window
    if mask_TS is not None:
        if mask_TS.dtype == torch.bool:
            hidden |= ~mask_TS
        else:
            scores = scores + mask_TS.double()
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink_column = sinks.double().view(-1, 1, 1).expand(-1, num_queries, 1)
        scores = torch.cat([scores, sink_column], dim=-1)
    top = scores.amax(dim=-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    weights = torch.where(total == 0, torch.zeros_like(weights), weights / total)
    return weights[..., :num_keys] @ v


def paged_decode_reference(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Any,
    context_lens: Any,
    scale: float,
    **options: Any,
) -> Tensor:
    """What `host_attention.paged_decode` must return, in float64 [B, Hq, Dv]; reads only the blocks that it must."""
    rows = range(q_BHD.shape[0] + 1)
    return paged_varlen_reference(q_BHD, k_cache, v_cache, block_tables, context_lens, rows, scale, **options)


def paged_varlen_reference(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Any,
    context_lens: Any,
    cu_seqlens: Any,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `host_attention.paged_attention_varlen` must return, in float64 [T, Hq, Dv]; reads only what it must."""
    block_size = k_cache.shape[2]
    tables, lens, rows = torch.as_tensor(block_tables), torch.as_tensor(context_lens), torch.as_tensor(cu_seqlens)
    out = torch.zeros(q_THD.shape[0], q_THD.shape[1], v_cache.shape[3], dtype=torch.float64)
    for b, length in enumerate(lens.tolist()):
        begin, end = int(rows[b]), int(rows[b + 1])
        if length == 0 or begin == end:
            continue
        first_query = length - (end - begin)
        first = max(0, first_query + 1 - window) if window is not None else 0
        blocks = tables[b, : -(-length // block_size)].long().clone()
        if window is not None:
            blocks[: first // block_size] = blocks[-1]  # blocks before the window may be gone
        k = k_cache[blocks].transpose(0, 1).flatten(1, 2)[:, first:length]
        v = v_cache[blocks].transpose(0, 1).flatten(1, 2)[:, first:length]
        q = q_THD[begin:end].transpose(0, 1)
        offset = first_query - first
        out[begin:end] = attend(q, k, v, scale, offset=offset, window=window, softcap=softcap, sinks=sinks).transpose(
            0, 1
        )
    return out
