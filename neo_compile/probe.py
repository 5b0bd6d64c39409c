"""A numeric check of a staged model: ragged batches, whole and cut in two sub-batches, against the model itself.

It is what notices a model whose attention lives in its mask, or whose linear stages mix tokens. Small on purpose: two
requests, two iterations (a prefill chunk, then the rest), compared at every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from neo_compile.attention import AttentionSite
from neo_compile.errors import UnsupportedModelError
from neo_compile.ops import plain_attention
from neo_compile.staged import StagedModel

# Largest difference of logits, relative to their largest magnitude, that rounding explains.
RELATIVE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass
class ContiguousKV:
    """Keys and values of one request, per site: each [1, tokens so far, Hkv, D]."""

    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)


class ContiguousAttention:
    """The simplest attention handler: contiguous KV per request, attention by torch. An oracle, not a cache.

    Args:
        spans: (request's KV, number of tokens) in the order of the batch's rows.
    """

    def __init__(self, spans: Sequence[tuple[ContiguousKV, int]]) -> None:
        self._spans = spans

    def begin(
        self,
        site: AttentionSite,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Appends and attends; the ticket is the result."""
        outs, row = [], 0
        for kv, num_tokens in self._spans:
            rows = slice(row, row + num_tokens)
            row += num_tokens
            k, v = k_THD[None, rows], v_THD[None, rows]
            if site.index in kv.keys:
                k = torch.cat([kv.keys[site.index], k], 1)
                v = torch.cat([kv.values[site.index], v], 1)
            kv.keys[site.index], kv.values[site.index] = k, v
            mask = causal_mask(num_tokens, k.shape[1], site.window, q_THD.device)
            outs.append(plain_attention(q_THD[None, rows], k, v, mask, sinks, site.scale, False, None, site.softcap)[0])
        assert row == q_THD.shape[0], f"spans cover {row} of {q_THD.shape[0]} tokens"
        return torch.cat(outs)

    def finish(self, ticket: torch.Tensor) -> torch.Tensor:
        """The result of `begin`."""
        return ticket


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean [num_queries, num_keys] for the last `num_queries` of `num_keys` tokens."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    allowed = key <= query
    return allowed if window is None else allowed & (key > query - window)


def check_against(
    staged: StagedModel,
    reference: Callable[[torch.Tensor], torch.Tensor],
    *,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int] = (5, 8),
) -> float:
    """Largest relative difference between `staged` and `reference` (input_ids [1, S] -> logits [1, S, V]).

    Raises:
        UnsupportedModelError: it is more than rounding explains.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab_size, (length,), generator=generator).to(device) for length in lengths]
    with torch.no_grad():
        expected = [reference(prompt[None])[0].float() for prompt in prompts]
        whole = _run_in_two_iterations(staged, prompts, [list(range(len(prompts)))])
        apart = _run_in_two_iterations(staged, prompts, [[index] for index in range(len(prompts))])
    worst = 0.0
    for name, actual in (("staged execution", whole), ("staged execution in two sub-batches", apart)):
        for logits, wanted in zip(actual, expected, strict=True):
            error = ((logits.float() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)).item()
            worst = max(worst, error)
            if not error <= RELATIVE_TOLERANCE[dtype]:
                raise UnsupportedModelError(
                    f"{name} differs from the model's own forward: logits are off by {error:.1e} of their magnitude, "
                    f"more than the {RELATIVE_TOLERANCE[dtype]:.0e} that rounding in {dtype} explains"
                )
    return worst


def _run_in_two_iterations(
    staged: StagedModel, prompts: Sequence[torch.Tensor], sub_batches: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Logits [S, V] of each prompt: all but the last two tokens first, then those two, one iteration each."""
    caches = [ContiguousKV() for _ in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for is_first in (True, False):
        for members in sub_batches:
            bounds = [(0, len(prompts[i]) - 2) if is_first else (len(prompts[i]) - 2, len(prompts[i])) for i in members]
            tokens = torch.cat([prompts[i][a:b] for i, (a, b) in zip(members, bounds, strict=True)])
            positions = torch.cat([torch.arange(a, b, device=tokens.device) for a, b in bounds])
            handler = ContiguousAttention([(caches[i], b - a) for i, (a, b) in zip(members, bounds, strict=True)])
            (out,) = staged.run(
                handler,
                input_ids=tokens[None],
                position_ids=positions[None],
                logit_rows=torch.arange(len(tokens), device=tokens.device),
            )
            for i, part in zip(members, out[0].split([b - a for a, b in bounds]), strict=True):
                logits[i].append(part)
    return [torch.cat(parts) for parts in logits]
