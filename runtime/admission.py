"""Which prefills run, and to which tier new requests go (step 3).

A request gets all blocks of its prompt when it is admitted, so a prefill under way never waits for blocks, and its tier
stays the same over all chunks.
"""

from __future__ import annotations

from itertools import islice

from neo_compile.runtime.cost_model import CostModel
from neo_compile.runtime.decision import Decision
from neo_compile.runtime.plan import ScheduledPrefill
from neo_compile.runtime.queues import Queues
from neo_compile.runtime.request import Request, Tier
from neo_compile.runtime.scheduler_config import POLICIES, SchedulerConfig


class Admission:
    """Admission under one configuration."""

    def __init__(self, config: SchedulerConfig, queues: Queues, cost_model: CostModel) -> None:
        self.config = config
        self.policy = POLICIES[config.policy]
        self.queues = queues
        self.cost_model = cost_model
        self._reserves = config.full_cache == "reserve" and not self.policy.computes_on_host

    @property
    def longest_linear_ms(self) -> float:
        """Linear stage of the largest iteration, per layer."""
        return self.cost_model.linear_ms(self.config.max_num_batched_tokens)

    @property
    def paced_linear_ms(self) -> float:
        """Linear stage of a paced iteration, per layer."""
        return self.config.prefill_pace * self.cost_model.linear_ms(1)

    @property
    def max_host_ms(self) -> float:
        """The most host attention per layer to admit requests for."""
        return max(self.longest_linear_ms, self.paced_linear_ms)

    @property
    def max_request_blocks(self) -> int:
        """The most blocks that one request can ever have."""
        return max(self.queues.pools[tier].num_blocks for tier in self.policy.prefill_tiers)

    def num_blocks_for(self, request: Request) -> int:
        """Blocks given at admission; "reserve" gives all that the request can ever need."""
        if not self._reserves:
            return self.queues.num_blocks_needed(request)
        most_tokens = request.num_prompt_tokens + request.max_tokens - 1  # the last token's KV is never written
        num_blocks = self.queues.pools[Tier.DEVICE].num_blocks_for(max(most_tokens, request.num_tokens))
        return min(num_blocks, self.max_request_blocks)

    def look_at_host(self, decision: Decision) -> None:
        """How full the host is, by its blocks or by what it can serve in an iteration."""
        pool = self.queues.pools[Tier.HOST]
        decision.num_free_host_blocks = pool.num_free
        decision.num_host_residents = len(self.queues.running[Tier.HOST])
        decision.host_kv_tokens = decision.census[Tier.HOST].kv_tokens
        attention_ms = self.cost_model.host_attention_ms(decision.num_host_residents, decision.host_kv_tokens)
        free_time = 1.0 - attention_ms / max(self.max_host_ms, 1e-9)
        decision.host_emptiness = max(0.0, min(free_time, pool.num_free / max(pool.num_blocks, 1)))
        num_decodes = sum(len(census.decodes) for census in decision.census.values())
        decision.host_slack = max(0.0, 1.0 - attention_ms / max(self.cost_model.linear_ms(max(num_decodes, 1)), 1e-9))

    def pace_prefills(self, decision: Decision) -> None:
        """Spreads prefills over iterations while requests decode.

        Past some multiple of the time to read the weights, more prefill tokens in one iteration save nothing, but leave
        later iterations without anything to hide host attention under, and let the decodes wait. So they are bounded
        by that multiple, or by what hides all host attention, whichever is more.
        """
        work = decision.work
        if not (work.device_decodes or work.host_decodes) or not self.config.chunked_prefill:
            return
        host_ms = self.cost_model.host_attention_ms(len(work.host_decodes), decision.host_kv_tokens)
        limit_ms = max(self.paced_linear_ms, host_ms)
        low, high = 0, decision.num_free_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.cost_model.linear_ms(middle) <= limit_ms:
                low = middle
            else:
                high = middle - 1
        num_under_way = sum(len(census.prefills) for census in decision.census.values())
        decision.num_free_tokens = min(decision.num_free_tokens, max(low, num_under_way, 1))

    def continue_prefills(self, decision: Decision) -> None:
        """The next chunks of prefills under way: of the overdue ones, at least a token each; then the oldest first.

        A token for each there always is: no more requests run than the budget has tokens (`max_running`).
        """
        under_way = [request for census in decision.census.values() for request in census.prefills]
        under_way.sort(key=lambda request: (not decision.is_overdue(request), request.sequence_number))
        num_overdue = sum(map(decision.is_overdue, under_way))
        for place, request in enumerate(under_way, 1):
            num_tokens = decision.num_free_tokens - max(num_overdue - place, 0)
            if num_tokens > 0:
                assert request.tier is not None, request
                self._add_chunk(decision, request, request.tier, num_tokens)

    def admit_waiting(self, decision: Decision) -> None:
        """First chunks of waiting requests in order, until one does not fit.

        Device-bound requests are admitted at once, host-bound ones when the composed iteration keeps them.
        """
        if not self._may_admit(decision):
            return
        num_free_places = self.config.max_running - self.queues.num_running
        for request in list(islice(self.queues.waiting.values(), max(num_free_places, 0))):
            if decision.num_free_tokens <= 0 or not self._can_start(decision, request):
                return
            tier = self._find_tier(decision, request)
            if tier is None:
                return
            self._add_chunk(decision, request, tier, decision.num_free_tokens)
            if tier is Tier.DEVICE:
                self.queues.admit(request, tier, self.num_blocks_for(request))
            else:
                self._place_on_host(decision, request)

    def _may_admit(self, decision: Decision) -> bool:
        if self.queues.num_running == 0:
            return True
        has_parked = not self.policy.computes_on_host and bool(self.queues.running[Tier.HOST])
        return not decision.preempted and not has_parked  # what was evicted comes back first

    def _can_start(self, decision: Decision, request: Request) -> bool:
        """Without chunked prefill a prompt starts only if it is finished at once, or longer than any budget."""
        is_whole = request.num_tokens <= decision.num_free_tokens
        return self.config.chunked_prefill or is_whole or request.num_tokens > self.config.max_num_batched_tokens

    def _find_tier(self, decision: Decision, request: Request) -> Tier | None:
        """The first tier of the policy with room for the request and for its residents to grow by a block each."""
        num_blocks = self.num_blocks_for(request)
        for tier in self.policy.prefill_tiers:
            if tier is Tier.DEVICE:
                num_free = self.queues.pools[tier].num_free
                num_residents = len(self.queues.running[tier])
            else:
                num_free, num_residents = decision.num_free_host_blocks, decision.num_host_residents
            headroom = 0 if self._reserves else num_residents
            if num_free < num_blocks + headroom:
                continue
            if tier is Tier.DEVICE or num_residents == 0 or self._can_serve_on_host(decision, request):
                return tier
        return None

    def _can_serve_on_host(self, decision: Decision, request: Request) -> bool:
        """The largest iteration's linear stage must be able to hide the attention of all host requests."""
        num_tokens = decision.host_kv_tokens + request.num_tokens
        attention_ms = self.cost_model.host_attention_ms(decision.num_host_residents + 1, num_tokens)
        return attention_ms <= self.max_host_ms

    def _place_on_host(self, decision: Decision, request: Request) -> None:
        """Tentatively: the composer may drop it; from now on the request waits by our choice, so it ages."""
        decision.num_free_host_blocks -= self.num_blocks_for(request)
        decision.num_host_residents += 1
        decision.host_kv_tokens += request.num_tokens
        if request.last_advanced < 0:
            request.last_advanced = decision.iteration

    @staticmethod
    def _add_chunk(decision: Decision, request: Request, tier: Tier, max_tokens: int) -> None:
        start = request.num_computed_tokens
        remaining = request.num_tokens - start
        num_tokens = min(remaining, max_tokens)
        decision.num_free_tokens -= num_tokens
        chunk = ScheduledPrefill(request, start, num_tokens, tier, samples=num_tokens == remaining)
        prefills = decision.work.device_prefills if tier is Tier.DEVICE else decision.work.host_prefills
        prefills.append(chunk)
