"""Prefill attention against a float64 reference written out token by token."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from neo_compile.runtime.prefill import attend_chunk
from tests.runtime.test_kv_cache import make_site


def reference(site, q, k, v, sinks):
    """[T, Hq, Dv] in float64; q [T, Hq, D], k and v [Hkv, S, dim]."""
    num_tokens, context_len = q.shape[0], k.shape[1]
    group = site.num_q_heads // site.num_kv_heads
    out = torch.zeros(num_tokens, site.num_q_heads, v.shape[2], dtype=torch.float64)
    for token in range(num_tokens):
        position = context_len - num_tokens + token
        first = 0 if site.window is None else max(0, position - site.window + 1)
        for head in range(site.num_q_heads):
            span = slice(first, position + 1)
            keys, values = k[head // group, span].double(), v[head // group, span].double()
            scores = keys @ q[token, head].double() * site.scale
            if site.softcap is not None:
                scores = site.softcap * torch.tanh(scores / site.softcap)
            extra = math.exp(float(sinks[head])) if sinks is not None else 0.0
            weights = scores.exp()
            out[token, head] = (weights @ values) / (weights.sum() + extra)
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 6, 7, 100])
@pytest.mark.parametrize(("num_tokens", "context_len"), [(1, 1), (6, 6), (7, 7), (1, 9), (4, 11)])
def test_against_reference(softcap, has_sinks, window, num_tokens, context_len):
    torch.manual_seed(num_tokens * 100 + context_len)
    site = dataclasses.replace(make_site(v_head_dim=12), softcap=softcap, window=window, has_sinks=has_sinks)
    q = torch.randn(num_tokens, 4, 8)
    k, v = torch.randn(2, context_len, 8), torch.randn(2, context_len, 12)
    sinks = torch.randn(4) if has_sinks else None
    out = attend_chunk(site, q, k, v, sinks)
    assert out.shape == (num_tokens, 4, 12)
    torch.testing.assert_close(out.double(), reference(site, q, k, v, sinks), atol=1e-5, rtol=1e-5)
