"""The frozen result of one scheduling decision; the executor does exactly what it says.

    layer i     device |  linear of batch-0            | linear of batch-1, attention of batch-0 |
                host   |  host attention of batch-1    | host attention of batch-0               |

When a plan is returned every block it needs is allocated: `request.block_ids` is the table *after* the swaps and has
room for the tokens of this iteration. A layer's KV is swapped before that layer's attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from neo_compile.runtime.request import Request, Tier


class Strategy(Enum):
    """How the sub-batches of an iteration run (the paper's section 3, and one more)."""

    DEVICE_ONLY = "device-only"  # one sub-batch, no work on the host
    PIPELINED = "pipelined"  # two sub-batches, each one's host attention under the other's linear stage
    UNSPLIT = "unsplit"  # one sub-batch, host attention beside device attention, the rest of it exposed


@dataclass(frozen=True, slots=True)
class ScheduledPrefill:
    """Tokens [start, start + num_tokens) of `request.all_token_ids`; attention is computed on the device.

    Attributes:
        tier: where the KV goes; HOST means it leaves the device layer by layer.
        samples: the chunk ends at the newest token, so one token is sampled from its last row.
    """

    request: Request
    start: int
    num_tokens: int
    tier: Tier
    samples: bool


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Requests that go through the linear stages together; a decode is one token."""

    prefills: tuple[ScheduledPrefill, ...] = ()
    device_decodes: tuple[Request, ...] = ()
    host_decodes: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(prefill.num_tokens for prefill in self.prefills) + len(self.device_decodes) + len(self.host_decodes)

    @property
    def num_requests(self) -> int:
        return len(self.prefills) + len(self.device_decodes) + len(self.host_decodes)

    @property
    def requests(self) -> Iterator[Request]:
        """Prefills, then device decodes, then host decodes."""
        yield from (prefill.request for prefill in self.prefills)
        yield from self.device_decodes
        yield from self.host_decodes


@dataclass(frozen=True, slots=True)
class Swap:
    """Copy of a whole request between tiers, before the iteration: src_block_ids[i] -> dst_block_ids[i].

    Both lists have the same length: the blocks that hold computed KV, in order. The source blocks are already free, so
    this iteration's tokens may be given them: in each layer the copy ends before attention begins.
    """

    request: Request
    src_tier: Tier
    dst_tier: Tier
    src_block_ids: tuple[int, ...]
    dst_block_ids: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.src_block_ids)


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """One iteration. At most one of `swap_outs` and `swap_ins` is not empty.

    Attributes:
        sub_batches: batch-0 first; one for DEVICE_ONLY and UNSPLIT, two for PIPELINED; empty if nothing can run.
        preempted: requests that lost their blocks and went back to the front of the waiting queue.
        finished: requests that the scheduler ended itself (`finish_reason` is set, e.g. "cache_full").
        predicted_ms: the cost model's time for the whole iteration, all layers.
    """

    strategy: Strategy
    sub_batches: tuple[SubBatch, ...] = ()
    swap_outs: tuple[Swap, ...] = ()
    swap_ins: tuple[Swap, ...] = ()
    preempted: tuple[Request, ...] = ()
    finished: tuple[Request, ...] = ()
    predicted_ms: float = 0.0

    @property
    def is_empty(self) -> bool:
        """No token is computed (swaps may still have to be done)."""
        return not any(sub_batch.num_requests for sub_batch in self.sub_batches)

    @property
    def num_tokens(self) -> int:
        return sum(sub_batch.num_tokens for sub_batch in self.sub_batches)

    @property
    def requests(self) -> Iterator[Request]:
        for sub_batch in self.sub_batches:
            yield from sub_batch.requests
