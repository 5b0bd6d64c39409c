"""Custom operators: `neo::attention`, the only op that a linear stage never contains.

Legend: B batch, S query length, C key length, Hq / Hkv query / KV heads, D head_dim, Dv value head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from neo_compile.attention import AttentionSite, active_handler

ATTENTION_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, int site, float scale, bool is_causal, "
    "int? window, float? softcap) -> Tensor"
)

library = torch.library.Library("neo", "DEF")  # type: ignore[no-untyped-call]
library.define(ATTENTION_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    site: int,
    scale: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one site: by the active forward batch if there is one, otherwise on the tensors given.

    Args:
        q: [B, S, Hq, D]; k: [B, C, Hkv, D]; v: [B, C, Hkv, Dv]; any strides.
        mask: broadcastable to [B, Hq, S, C]; boolean (True attends) or added to the scores.
        sinks: [Hq], one extra logit per head in the softmax's denominator.
        is_causal: query i attends to keys 0..i.
        window: the last `window` keys only, the query's own included.

    Returns:
        [B, S, Hq, Dv], contiguous.
    """
    handler = active_handler()
    if handler is None:
        return plain_attention(q, k, v, mask, sinks, scale, is_causal, window, softcap)
    assert q.shape[0] == 1, f"a forward batch is one row of tokens, got q {q.shape}"
    assert mask is None, "a forward batch has no mask: its handler knows which tokens are whose"
    described = describe_site(q, k, v, sinks, site, scale, window, softcap)
    out_THD = handler.finish(handler.begin(described, q[0].contiguous(), k[0].contiguous(), v[0].contiguous(), sinks))
    return out_THD.unsqueeze(0).contiguous()


def describe_site(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    site: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> AttentionSite:
    """The constants of a site, from the op's arguments (real or fake tensors)."""
    return AttentionSite(
        index=site,
        num_q_heads=int(q.shape[2]),
        num_kv_heads=int(k.shape[2]),
        head_dim=int(q.shape[3]),
        v_head_dim=int(v.shape[3]),
        scale=scale,
        window=window,
        softcap=softcap,
        has_sinks=sinks is not None,
        dtype=q.dtype,
    )


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """What the model's own attention computes; arguments and result as for `attention`."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if window is not None:
        mask, is_causal = _windowed(mask, is_causal, window, q.shape[2], k.shape[2], q.device), False
    if softcap is None and sinks is None:
        is_grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=is_grouped)
    else:
        out = _attend(q, k, v, mask, sinks, scale, is_causal, softcap)
    return out.transpose(1, 2).contiguous()


def _windowed(
    mask: torch.Tensor | None, is_causal: bool, window: int, num_queries: int, num_keys: int, device: torch.device
) -> torch.Tensor:
    """`mask` narrowed to keys that lie at most `window` - 1 before their query, and not after it if causal."""
    query = torch.arange(num_queries, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    allowed = key > query - window
    if is_causal:
        allowed &= key <= query
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, float("-inf"))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    """Softmax attention in float32 for what scaled_dot_product_attention has no argument for. BHSD in and out."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.nan_to_num(0.0).to(v.dtype) @ v


def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    site: int,
    scale: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


library.impl("attention", attention, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("neo::attention", _attention_fake, lib=library)
