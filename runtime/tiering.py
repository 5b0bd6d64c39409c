"""Moves requests between the tiers as their KV grows (step 2, and the host's growth in step 1).

Invariant: after `grow_or_evict(tier)` every decode in that tier has the block of its next token. The newest requests
leave first, so the oldest always advances and each one finishes in turn.
"""

from __future__ import annotations

from operator import attrgetter

from neo_compile.runtime.decision import Decision
from neo_compile.runtime.queues import Queues
from neo_compile.runtime.request import Request, Tier
from neo_compile.runtime.scheduler_config import POLICIES, SchedulerConfig

_MAX_COOLDOWN_DOUBLINGS = 10
_MAX_LOOKS = 16  # host requests looked at for a swap-in


class Tiering:
    """Evictions and swap-ins under one configuration."""

    def __init__(self, config: SchedulerConfig, queues: Queues) -> None:
        self.config = config
        self.policy = POLICIES[config.policy]
        self.queues = queues

    def grow_or_evict(self, decision: Decision, tier: Tier) -> None:
        """Gives each decode of a tier the block of its next token; the newest leave until there are enough."""
        queues, pool = self.queues, self.queues.pools[tier]
        growing = dict.fromkeys(decision.census[tier].growing)
        if len(growing) > pool.num_free:
            newest_last = sorted(queues.running[tier].values(), key=attrgetter("sequence_number"))
            while len(growing) > pool.num_free:
                victim = newest_last.pop()
                growing.pop(victim, None)
                self._evict(decision, victim)
        for request in growing:
            queues.grow(request)

    def _evict(self, decision: Decision, victim: Request) -> None:
        """From the device to the host where the policy and the space allow; otherwise dropped and recomputed."""
        queues = self.queues
        num_blocks = queues.num_blocks_needed(victim)
        may_swap = self.policy.computes_on_host or self.config.full_cache == "swap"
        is_movable = victim.tier is Tier.DEVICE and not victim.is_prefilling
        if may_swap and is_movable and queues.pools[Tier.HOST].can_allocate(num_blocks):
            decision.swap_outs.append(queues.swap(victim, num_blocks, decision.iteration))
        else:
            queues.preempt(victim)
            decision.preempted.append(victim)

    def swap_in(self, decision: Decision) -> None:
        """Brings host requests back, in the order in which they went, while the device has room to spare.

        Not in an iteration that evicts, nor where a new request can have the room: it gets there without a copy.
        """
        queues, pool = self.queues, self.queues.pools[Tier.DEVICE]
        host = queues.running[Tier.HOST]
        if not host or decision.swap_outs or decision.preempted or Tier.DEVICE not in self.policy.prefill_tiers:
            return
        if self.policy.computes_on_host and self._is_room_claimed():
            return
        for request in list(host.values())[:_MAX_LOOKS]:
            num_blocks = queues.num_blocks_needed(request)
            if request.is_prefilling or not pool.can_allocate(num_blocks):
                continue
            num_residents = len(queues.running[Tier.DEVICE])
            if num_residents > 0:
                limit = self.config.swap_in_threshold * pool.num_blocks
                is_tight = pool.num_free - num_blocks < num_residents + 1  # a block each to grow by
                if is_tight or pool.num_taken + num_blocks > limit:
                    return
            must_come = num_residents == 0 and not self.policy.computes_on_host  # or nothing would run
            if must_come or not self._is_cooling_down(request, decision.iteration):
                decision.swap_ins.append(queues.swap(request, num_blocks, decision.iteration))

    def _is_room_claimed(self) -> bool:
        """Whether the first waiting request can start on the device now, or can start nowhere else."""
        queues, pools = self.queues, self.queues.pools
        if not queues.waiting or queues.num_running >= self.config.max_running:
            return False
        num_blocks = queues.num_blocks_needed(next(iter(queues.waiting.values())))
        fits_device = pools[Tier.DEVICE].num_free >= num_blocks + len(queues.running[Tier.DEVICE])
        return fits_device or num_blocks > pools[Tier.HOST].num_blocks

    def _is_cooling_down(self, request: Request, iteration: int) -> bool:
        """Hysteresis: each swap of a request doubles the time until the next, so swaps are few over any run."""
        if request.num_swaps == 0:
            return False
        cooldown = self.config.swap_cooldown << min(request.num_swaps - 1, _MAX_COOLDOWN_DOUBLINGS)
        return iteration - request.swapped_at <= cooldown
