"""One scheduling decision in the making: what the six steps hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from neo_compile.runtime.plan import ScheduledPrefill, Swap
from neo_compile.runtime.queues import Census
from neo_compile.runtime.request import Request, Tier


@dataclass(slots=True)
class Work:
    """What may run in this iteration, as steps 1 to 3 leave it to steps 4 to 6.

    Attributes:
        device_prefills, device_decodes: run in any case.
        host_prefills: KV to the host; may be dropped from the end, but for the first `num_overdue_prefills`.
        host_decodes: the most overdue first; the first `num_overdue_decodes` must run.
        max_tokens: token budget of the iteration; holds all decodes and the chunks above.
        num_swapped_blocks: blocks to copy before the iteration, per layer.
        block_size: tokens of a block.
    """

    device_prefills: list[ScheduledPrefill] = field(default_factory=list)
    device_decodes: list[Request] = field(default_factory=list)
    host_prefills: list[ScheduledPrefill] = field(default_factory=list)
    host_decodes: list[Request] = field(default_factory=list)
    num_overdue_prefills: int = 0
    num_overdue_decodes: int = 0
    max_tokens: int = 0
    num_swapped_blocks: int = 0
    block_size: int = 16


@dataclass(slots=True)
class Decision:
    """The work, the moves that are already made, and what is left of the budgets.

    Attributes:
        census: who is in each tier, as the moves made so far leave it.
        overdue_before: a request that has not advanced since before this iteration must run.
        num_free_tokens: token budget after the decodes and the prefills placed so far.
        num_free_host_blocks, num_host_residents, host_kv_tokens: the host tier as it will be if every host-bound
            prefill placed so far is kept.
        host_emptiness: 1 for an idle host, 0 for a full one, before those prefills.
        host_slack: share of the decodes' own linear stage that host attention leaves free; 0 where it takes longer.
    """

    iteration: int
    work: Work
    census: dict[Tier, Census]
    overdue_before: int = 0
    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_free_tokens: int = 0
    num_free_host_blocks: int = 0
    num_host_residents: int = 0
    host_kv_tokens: int = 0
    host_emptiness: float = 0.0
    host_slack: float = 0.0

    def is_overdue(self, request: Request) -> bool:
        """Whether `request` has waited as long as it may while it could have run."""
        return 0 <= request.last_advanced < self.overdue_before

    @property
    def has_moved(self) -> bool:
        """Whether any request has left its tier in this decision."""
        return bool(self.swap_outs or self.swap_ins or self.preempted or self.finished)
