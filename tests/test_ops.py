"""`neo::attention` without a forward batch is attention; with one it belongs to the handler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neo_compile.attention import AttentionSite, active_handler, forward_batch
from neo_compile.ops import plain_attention

Q, K, V = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 6)


def by_hand(
    window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, causal: bool = True
) -> torch.Tensor:
    """Float64 attention of Q, K, V, position by position."""
    out = torch.zeros(2, 5, 4, 6, dtype=torch.float64)
    for batch in range(2):
        for head in range(4):
            for token in range(5):
                first = 0 if window is None else max(0, token - window + 1)
                last = token + 1 if causal else 5
                scores = K[batch, first:last, head // 2].double() @ Q[batch, token, head].double() * 0.3
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = scores.softmax(0)[: last - first]
                out[batch, token, head] = weights @ V[batch, first:last, head // 2].double()
    return out


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_plain_attention(window: int | None, softcap: float | None, has_sinks: bool) -> None:
    sinks = torch.randn(4) if has_sinks else None
    out = plain_attention(Q, K, V, None, sinks, 0.3, True, window, softcap)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), by_hand(window, softcap, sinks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("is_boolean", [False, True])
def test_mask(softcap: float | None, is_boolean: bool) -> None:
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    mask = allowed if is_boolean else torch.zeros(5, 5).masked_fill(~allowed, float("-inf"))
    out = plain_attention(Q, K, V, mask[None, None], None, 0.3, False, None, softcap)
    torch.testing.assert_close(out.double(), by_hand(softcap=softcap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_operator_checks(window: int | None, softcap: float | None) -> None:
    args = (Q, K, V, None, torch.randn(4) if softcap else None, 0, 0.3, True, window, softcap)
    torch.library.opcheck(torch.ops.neo.attention.default, args)


def test_strides_do_not_matter() -> None:
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (Q, K, V))
    out = plain_attention(q, k, v, None, None, 0.3, True, None, None)
    torch.testing.assert_close(out.double(), by_hand(), atol=1e-5, rtol=1e-5)


class Recorder:
    """Answers every site with zeros, and keeps what it was given."""

    def __init__(self) -> None:
        self.sites: list[AttentionSite] = []

    def begin(self, site: AttentionSite, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any) -> torch.Tensor:
        self.sites.append(site)
        assert all(tensor.is_contiguous() for tensor in (q, k, v))
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    def finish(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket


def test_a_forward_batch_takes_over() -> None:
    recorder = Recorder()
    with forward_batch(recorder):
        assert active_handler() is recorder
        out = torch.ops.neo.attention(Q[:1], K[:1], V[:1], None, None, 3, 0.3, True, 7, None)
    assert active_handler() is None
    assert out.shape == (1, 5, 4, 6)
    assert not out.any()
    (site,) = recorder.sites
    assert site == AttentionSite(3, 4, 2, 8, 6, 0.3, 7, None, False, torch.float32)


def test_forward_batches_do_not_nest() -> None:
    with forward_batch(Recorder()), pytest.raises(AssertionError, match="already active"), forward_batch(Recorder()):
        pass
    assert active_handler() is None


def test_grouped_queries_equal_repeated_heads() -> None:
    out = plain_attention(Q, K, V, None, None, 0.3, False, None, None)
    q, k, v = (tensor.transpose(1, 2) for tensor in (Q, K.repeat_interleave(2, 2), V.repeat_interleave(2, 2)))
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, expected)
