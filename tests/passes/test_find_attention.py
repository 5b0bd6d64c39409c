"""What counts as attention, how it is described, and what is refused by name."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from neo_compile.passes.canonicalize import canonicalize
from neo_compile.passes.find_attention import AttentionMatch, Findings, find_attention
from neo_compile.passes.replace_attention import replace_attention
from neo_compile.passes.split_stages import find_sites
from tests.passes.graphs import targets, trace

Q = torch.randn(2, 4, 6, 8)
K, V = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
MASK = torch.randn(1, 1, 6, 6)
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()


def repeat_kv(x: torch.Tensor, count: int) -> torch.Tensor:
    batch, heads, length, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, count, length, dim).reshape(batch, heads * count, length, dim)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, 0.1, False), v)


def nano_gpt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def soft_capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.5 / 3.0) * 3.0 + mask
    return torch.matmul(F.softmax(scores, dim=-1), v)


def sdpa_grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, scale=0.2)


def sdpa_repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask)


def sdpa_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=True) + mask.sum()


def masked_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A causal mask and one of padding, finite and infinite, in both spellings."""
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.where(mask, q @ k.transpose(-2, -1) * 0.4, torch.finfo(q.dtype).min)
    scores = scores.masked_fill(torch.arange(6) == 0, float("-inf"))
    return scores.softmax(-1) @ v


def masked_and_biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = q @ k.transpose(-2, -1) * 0.4 + mask
    return scores.masked_fill(torch.arange(6) > 3, float("-inf")).softmax(-1) @ v


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ repeat_kv(k, 2).transpose(-2, -1)
    scores /= 3.0
    scores += mask
    return F.softmax(scores, dim=-1) @ repeat_kv(v, 2)


def unsqueezed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k = k.unsqueeze(2).expand(2, 2, 2, 6, 8).flatten(1, 2)
    v = v.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(2, 4, 6, 8)
    return F.scaled_dot_product_attention(q, k, v, mask)


def with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, repeat_kv(k, 2).transpose(2, 3)) * 0.3 + mask
    sinks = torch.tensor([0.5, -1.0, 2.0, 3.0]).reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    scores = torch.cat([scores, sinks], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(F.dropout(weights, 0.1, False), repeat_kv(v, 2))


def find(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Findings:
    gm, _ = trace(function, *inputs)
    return find_attention(canonicalize(gm).graph)


def only_match(findings: Findings) -> AttentionMatch:
    assert not findings.refusals
    (match,) = findings.matches
    return match


@pytest.mark.parametrize(
    ("function", "mask", "scale", "is_causal", "softcap"),
    [
        (sdpa_grouped, MASK, 0.2, False, None),
        (sdpa_repeated, MASK, 8**-0.5, False, None),
        (sdpa_causal, MASK, 8**-0.5, True, None),
        (by_hand, MASK, 0.3, False, None),
        (nano_gpt, CAUSAL, 8**-0.5, False, None),
        (soft_capped, MASK, 0.5, False, 3.0),
        (masked_twice, CAUSAL, 0.4, False, None),
        (masked_and_biased, MASK, 0.4, False, None),
        (in_place, MASK, 1 / 3, False, None),
        (unsqueezed, MASK, 8**-0.5, False, None),
        (with_sinks, MASK, 0.3, False, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_found_and_replaced(
    function: Callable[..., torch.Tensor], mask: torch.Tensor, scale: float, is_causal: bool, softcap: float | None
) -> None:
    gm, example_inputs = trace(function, Q, K, V, mask)
    expected = function(Q, K, V, mask)
    match = only_match(find_attention(canonicalize(gm).graph))
    assert match.scale == pytest.approx(scale)
    assert (match.is_causal, match.softcap) == (is_causal, softcap)
    assert match.k.meta["example_value"].shape == K.shape
    assert match.v.meta["example_value"].shape == V.shape
    replace_attention(gm, [match])
    assert len(find_sites(gm.graph)) == 1
    assert F.softmax not in targets(gm)
    assert F.scaled_dot_product_attention not in targets(gm)
    torch.testing.assert_close(gm(*example_inputs)[0], expected, atol=1e-5, rtol=1e-5)
    assert not find_attention(canonicalize(gm).graph).matches


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q, k, v: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), "dropout_p=0.5"),
        (lambda q, k, v: F.scaled_dot_product_attention(q[0], q[0], q[0]), "not \\[batch, heads"),
        (lambda q, k, v: (q @ q.transpose(2, 3)).masked_fill(q[..., :6] > 0, 7.0).softmax(-1) @ q, "filled with 7.0"),
        (lambda q, k, v: (q @ q.transpose(2, 3)).softmax(-1)[..., :-1] @ q[:, :, 1:], "not that of sinks"),
    ],
    ids=["dropout", "rank", "fill", "last column"],
)
def test_refused_by_name(function: Callable[..., torch.Tensor], reason: str) -> None:
    findings = find(function, Q, K, V)
    assert not findings.matches
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(findings.why_none())


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: q @ torch.ones(8, 3),
        lambda q, k, v: F.softmax(q, dim=-1) @ torch.ones(8, 3),
        lambda q, k, v: F.softmax(q @ torch.ones(8, 3), dim=-1).topk(2).values,
    ],
    ids=["matmul", "mixture", "router"],
)
def test_not_attention(function: Callable[..., torch.Tensor]) -> None:
    findings = find(function, Q, K, V)
    assert (findings.matches, findings.refusals) == ([], [])
    assert "no attention found" in findings.why_none()


def test_what_is_changed_in_place_and_read_elsewhere_is_left_alone() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ q.transpose(-2, -1)
        divided = operator.itruediv(scores, 3.0)
        return F.softmax(divided, dim=-1) @ q, scores

    gm, _ = trace(function, Q, K, V)
    assert not find_attention(canonicalize(gm).graph).matches


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_rows_that_attend_to_nothing_stay_what_they_were(fill: float) -> None:
    """A finite fill makes them uniform, as in models that pad on the left."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        allowed = torch.arange(6)[:, None] > 1
        return (q @ q.transpose(-2, -1)).masked_fill(~allowed, fill).softmax(-1) @ q

    gm, example_inputs = trace(function, Q, K, V)
    replace_attention(gm, [only_match(find_attention(canonicalize(gm).graph))])
    torch.testing.assert_close(gm(*example_inputs)[0], function(Q, K, V), atol=1e-5, rtol=1e-5)


def test_only_what_the_rewrite_made_dead_is_erased() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = torch.zeros(3)
        state[0] = 1.0
        weights = F.softmax(q @ repeat_kv(k, 2).transpose(2, 3) + mask, dim=-1)
        return weights @ repeat_kv(v, 2), weights, state

    gm, example_inputs = trace(function, Q, K, V, MASK)
    expected = function(Q, K, V, MASK)
    replace_attention(gm, find_attention(canonicalize(gm).graph).matches)
    for actual, wanted in zip(gm(*example_inputs), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)
