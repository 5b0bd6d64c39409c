"""Decoders that never heard of transformers: each usual way to write attention becomes sites, with logits as eager."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.test_backend_families import watched

HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB_SIZE, WINDOW = 4, 2, 8, 32, 50, 3

# q [B, H, S, D], k and v [B, Hkv, S, D], allowed [S, S] -> [B, H, S, D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def expand_heads(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, dim = x.shape
    count = HEADS // heads
    return x[:, :, None].expand(batch, heads, count, length, dim).reshape(batch, heads * count, length, dim)


def sdpa_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    count = HEADS // KV_HEADS
    return F.scaled_dot_product_attention(
        q, k.repeat_interleave(count, dim=1), v.repeat_interleave(count, dim=1), attn_mask=allowed
    )


def sdpa_expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
    return F.scaled_dot_product_attention(q, expand_heads(k), expand_heads(v), attn_mask=bias, scale=0.25)


def by_hand_masked_fill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    scores = (q @ expand_heads(k).transpose(-2, -1)) * (1.0 / math.sqrt(HEAD_DIM))
    return F.softmax(scores.masked_fill(allowed == 0, float("-inf")), dim=-1) @ expand_heads(v)


def by_hand_added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(q.dtype).min)
    scores = torch.matmul(q / math.sqrt(HEAD_DIM), expand_heads(k).transpose(2, 3)) + bias
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(q.dtype), expand_heads(v))


def by_hand_where(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, expand_heads(k).transpose(-1, -2)) / math.sqrt(HEAD_DIM)
    return torch.matmul(torch.softmax(torch.where(allowed, scores, -1e9), dim=-1), expand_heads(v))


class Layer(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm_1(x)
        q = self.q(h).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = self.kv(h).view(batch, length, 2, KV_HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, allowed).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """Tokens [B, S] to logits [B, S, V], with tied embeddings and a window in every second layer."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([Layer(attend) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1])
        distance = positions[:, None] - positions[None, :]
        x = self.tokens(tokens) + self.positions(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, (distance >= 0) & (distance < WINDOW if index % 2 else distance >= 0))
        return self.norm(x) @ self.tokens.weight.T


WAYS = (sdpa_causal, sdpa_masked, sdpa_expanded, by_hand_masked_fill, by_hand_added, by_hand_where)


@pytest.mark.parametrize("attend", WAYS, ids=lambda way: way.__name__)
@torch.no_grad()
def test_logits_equal_eager(attend: Attend) -> None:
    torch._dynamo.reset()
    model = Decoder(attend).eval()
    compiled, returned = watched(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="neo")
        for shape in ((2, 9), (3, 12), (1, 1)):
            tokens = torch.randint(VOCAB_SIZE, shape)
            torch.testing.assert_close(compiled(tokens), model(tokens), atol=1e-5, rtol=1e-5)
    for function in returned:
        assert [(site.num_q_heads, site.num_kv_heads) for site in function.sites] == 3 * [(HEADS, KV_HEADS)]


@torch.no_grad()
def test_padding_on_the_left_equals_eager() -> None:
    """Rows that attend to nothing but padding are uniform in eager, and their values reach the next layer."""
    torch._dynamo.reset()

    class Padded(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens)
            is_token = (tokens != 0)[:, None, None, :]
            allowed = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril() & is_token
            for layer in self.layers:
                x = layer(x, allowed)
            return x @ self.tokens.weight.T

    model = Padded(by_hand_where).eval()
    tokens = torch.tensor([[0, 0, 0, 5, 6, 7], [1, 2, 3, 4, 5, 6]])
    compiled, returned = watched(model)
    torch.testing.assert_close(compiled(tokens), model(tokens), atol=1e-5, rtol=1e-5)
    assert [len(function.sites) for function in returned] == [3]


@torch.no_grad()
def test_a_decoder_with_its_own_cache_equals_eager() -> None:
    """The cache is the caller's, a list of (k, v) per layer, grown at every call."""
    torch._dynamo.reset()

    class Cached(Layer):
        def forward(self, x: torch.Tensor, past: Any) -> Any:
            batch, length, _ = x.shape
            h = self.norm_1(x)
            q = self.q(h).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
            k, v = self.kv(h).view(batch, length, 2, KV_HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            rows = torch.arange(k.shape[2])
            allowed = rows[None, :] <= rows[-length:, None]
            x = x + self.out(self.attend(q, k, v, allowed).transpose(1, 2).reshape(batch, length, WIDTH))
            return x + self.down(F.gelu(self.up(self.norm_2(x)))), (k, v)

    class CachedDecoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCAB_SIZE, WIDTH)
            self.layers = nn.ModuleList([Cached(by_hand_masked_fill) for _ in range(2)])

        def forward(self, tokens: torch.Tensor, cache: Any) -> Any:
            x, grown = self.tokens(tokens), []
            for layer, past in zip(self.layers, cache or [None, None], strict=True):
                x, pair = layer(x, past)
                grown.append(pair)
            return x @ self.tokens.weight.T, grown

    model = CachedDecoder().eval()
    tokens = torch.randint(VOCAB_SIZE, (2, 10))
    expected, _ = model(tokens, None)
    compiled, returned = watched(model)
    cache, start = None, 0
    for end in (6, 7, 8, 10):
        logits, cache = compiled(tokens[:, start:end], cache)
        torch.testing.assert_close(logits, expected[:, start:end], atol=1e-5, rtol=1e-5)
        start = end
    assert all(len(function.sites) == 2 for function in returned)
