"""What steps 4 to 6 of a decision produce, what work is worth, and the interface of what composes an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from neo_compile.runtime.cost_model import CostModel, SubBatchLoad
from neo_compile.runtime.decision import Work
from neo_compile.runtime.plan import Strategy, SubBatch
from neo_compile.runtime.request import Request, Tier

NUM_COMPUTED: Callable[[Request], int] = attrgetter("num_computed_tokens")


@dataclass(frozen=True, slots=True)
class Prices:
    """What work is worth, in milliseconds of an iteration.

    Attributes:
        decode_ms: one decoded token.
        prefill_ms_per_token: the linear stages of one prompt token among many.
        host_prefill_factor: how much more a prefill is worth that fills the host cache.
    """

    decode_ms: float
    prefill_ms_per_token: float
    host_prefill_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Composition:
    """The iteration as chosen; no sub-batches if there is no work."""

    strategy: Strategy
    sub_batches: tuple[SubBatch, ...]
    predicted_ms: float


class Composer(Protocol):
    """Composes an iteration from the work at hand. Pure: reads requests, changes nothing."""

    def compose(self, work: Work, prices: Prices) -> Composition:
        """Everything in `work` that must run, and as much of the rest as pays."""
        ...


def kv_tokens_of(decodes: Iterable[Request]) -> int:
    """KV that `decodes` read, their newest tokens included. A decode has all its tokens computed but the newest."""
    computed = list(map(NUM_COMPUTED, decodes))
    return sum(computed) + len(computed)


def load_of(sub_batch: SubBatch, cost_model: CostModel, block_size: int) -> SubBatchLoad:
    """What the time of a finished sub-batch depends on."""
    return SubBatchLoad(
        num_tokens=sub_batch.num_tokens,
        prefill_attention_ms=cost_model.prefill_attention_ms((p.start, p.num_tokens) for p in sub_batch.prefills),
        num_device_decodes=len(sub_batch.device_decodes),
        device_kv_tokens=kv_tokens_of(sub_batch.device_decodes),
        num_host_decodes=len(sub_batch.host_decodes),
        host_kv_tokens=kv_tokens_of(sub_batch.host_decodes),
        leaving_blocks=sum(-(-p.num_tokens // block_size) for p in sub_batch.prefills if p.tier is Tier.HOST),
        num_logits=sum(p.samples for p in sub_batch.prefills)
        + len(sub_batch.device_decodes)
        + len(sub_batch.host_decodes),
    )
