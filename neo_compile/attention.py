"""Attention sites, and how a forward pass hands them to whoever owns the KV cache.

A linear stage ends where attention begins. What happens there depends on the caller:

    no forward batch      the site computes exactly what the model's own attention computed
    forward_batch(h)      the site is  h.finish(h.begin(site, q, k, v, sinks))

A driver of two sub-batches calls `begin` and `finish` itself and runs the other sub-batch between them.

Legend: B batch, T tokens, S query length, C key length, Hq / Hkv query / KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class AttentionSite:
    """The constants of one attention layer.

    Attributes:
        scale: multiplies q @ k.
        window: a token attends to the last `window` tokens, itself included; None is unlimited.
        softcap: scores become softcap * tanh(score / softcap).
        has_sinks: one extra logit per query head takes part in the softmax and is dropped afterwards.
    """

    index: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool
    dtype: torch.dtype


class AttentionHandler(Protocol):
    """Owns the KV of the requests in a forward batch."""

    def begin(
        self,
        site: AttentionSite,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> Any:
        """Append k and v, start attention, return a ticket for `finish`.

        q_THD [T, Hq, D], k_THD [T, Hkv, D] and v_THD [T, Hkv, Dv] are contiguous; sinks is [Hq].
        """

    def finish(self, ticket: Any) -> torch.Tensor:
        """Wait for the attention started by `begin`; contiguous [T, Hq, Dv] of q's dtype."""


_handler: ContextVar[AttentionHandler | None] = ContextVar("neo_attention_handler", default=None)


@contextmanager
def forward_batch(handler: AttentionHandler) -> Generator[None, None, None]:
    """While active, in this thread, every attention site is served by `handler`. Cannot be nested."""
    assert _handler.get() is None, "forward_batch() is already active in this thread"
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def active_handler() -> AttentionHandler | None:
    """The handler of the innermost `forward_batch()`, if one is active in this thread."""
    return _handler.get()
