"""Decides what runs in the next iteration, and where each request's KV cache is.

`schedule()` is the paper's six steps, one function each. Steps 1 to 3 move requests and blocks; steps 4 to 6, in
`composer`, only look. Guarantees, for every policy:

* a request that can fit a tier finishes; one that outgrows every tier ends alone with "cache_full";
* tokens do not depend on the policy, only times do;
* an iteration swaps in one direction at most, and a request's swaps grow with the logarithm of its iterations;
* with a policy that computes on the host, an admitted request is left out of at most `max_idle_iterations`
  iterations in a row. A device-only policy keeps swapped-out requests waiting until older ones have finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from neo_compile.errors import CapacityError, NeoError
from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.composer import Composer, Prices, Work, compose_symmetric, loads_of
from neo_compile.runtime.cost_model import CostModel, SubBatchLoad
from neo_compile.runtime.plan import IterationPlan, ScheduledPrefill, Strategy, Swap
from neo_compile.runtime.queues import Queues
from neo_compile.runtime.request import FinishReason, Request, RequestStatus, Tier
from neo_compile.runtime.scheduler_config import POLICIES, SchedulerConfig

_MAX_EMPTY_ITERATIONS = 8
_MAX_COOLDOWN_DOUBLINGS = 10
_MAX_SWAP_IN_LOOKS = 16  # host requests looked at for a swap-in


class SchedulerStallError(NeoError, RuntimeError):
    """Nothing was scheduled for several iterations although requests wait: a bug; the message holds a dump."""


@dataclass(slots=True)
class _Decision:
    """One decision in the making."""

    work: Work
    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_free_tokens: int = 0  # of the token budget, after the decodes and prefills placed so far
    num_free_host_blocks: int = 0  # after the tentative host-bound prefills, which the next two count as residents
    num_host_residents: int = 0
    host_kv_tokens: int = 0


class Scheduler:
    """Owns the queues; the engine adds requests and runs the plans.

    Not thread-safe: one caller at a time. `complete` must follow each `schedule` before the next.
    """

    def __init__(
        self, config: SchedulerConfig, device_pool: BlockPool, host_pool: BlockPool, cost_model: CostModel
    ) -> None:
        self.config = config
        self.policy = POLICIES[config.policy]
        self.cost_model = cost_model
        self.queues = Queues(device_pool, host_pool)
        self.iteration = 0
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._num_added = 0
        self._num_empty_iterations = 0
        self._mean_context = 0.0
        self._longest_linear_ms = cost_model.linear_ms(config.max_num_batched_tokens)

    # ------------------------------------------------------------------------------------------- requests in and out

    def add(self, request: Request) -> None:
        """Queues a request; CapacityError if its prompt and one more token can never fit."""
        if self.queues.find(request.request_id) is not None:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        need = self.queues.pools[Tier.DEVICE].num_blocks_for(request.num_tokens + 1)
        limit = self._max_request_blocks
        if need > limit:
            pools = self.queues.pools
            knob = " or ".join(f"{tier.value}_blocks" for tier in self.policy.prefill_tiers)
            raise CapacityError(
                f"request {request.request_id!r}: {request.num_tokens} prompt tokens + 1 need {need} KV blocks of "
                f"{pools[Tier.DEVICE].block_size}, but policy {self.policy.name!r} can give one request at most "
                f"{limit} (device_blocks={pools[Tier.DEVICE].num_blocks}, host_blocks={pools[Tier.HOST].num_blocks}); "
                f"raise {knob} or shorten the prompt",
                need=need,
                limit=limit,
                knob=knob,
            )
        request.sequence_number = self._num_added
        self._num_added += 1
        self.queues.waiting[request.request_id] = request

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """Ends a request in any state and frees its blocks; False if there is no such unfinished request."""
        request = self.queues.find(request_id)
        if request is None:
            return False
        self.queues.finish(request, reason)
        return True

    def complete(
        self, plan: IterationPlan, stop: Mapping[str, FinishReason] | None = None, measured_ms: float | None = None
    ) -> None:
        """Takes note that `plan` has run and its sampled tokens have been appended to the requests' outputs.

        Args:
            stop: requests to end, by id ("stop", "length", "error", ...); `max_tokens` is enforced here besides.
            measured_ms: what the iteration took, to correct the cost model.
        """
        stop = stop or {}
        for sub_batch in plan.sub_batches:
            for prefill in sub_batch.prefills:
                self._advance(prefill.request, prefill.num_tokens, prefill.samples, stop)
            for decode in (*sub_batch.device_decodes, *sub_batch.host_decodes):
                self._advance(decode, 1, True, stop)
        for request_id, reason in stop.items():
            self.abort(request_id, reason)
        if measured_ms is not None and not plan.is_empty:
            self.cost_model.observe(plan.strategy, plan.predicted_ms, measured_ms)

    def _advance(self, request: Request, num_tokens: int, samples: bool, stop: Mapping[str, FinishReason]) -> None:
        if request.status is not RequestStatus.RUNNING:
            return  # aborted while the iteration ran
        request.num_computed_tokens += num_tokens
        request.last_advanced = self.iteration
        if samples and request.request_id not in stop:
            assert request.num_computed_tokens == request.num_tokens - 1, (
                f"{request.request_id}: no sampled token was appended ({request.num_tokens} tokens)"
            )
            if len(request.output_token_ids) >= request.max_tokens:
                self.queues.finish(request, "length")

    @property
    def has_unfinished(self) -> bool:
        return bool(self.queues.waiting) or self.queues.num_running > 0

    @property
    def num_waiting(self) -> int:
        return len(self.queues.waiting)

    @property
    def num_running(self) -> int:
        return self.queues.num_running

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, queues and requests agree."""
        self.queues.check_integrity()

    # ------------------------------------------------------------------------------------------------- one decision

    def schedule(self) -> IterationPlan:
        """The next iteration's plan, with all its blocks allocated."""
        decision = self._initialise()
        self._schedule_device_decodes(decision)
        self._schedule_prefills(decision)
        plan = self._compose(decision)
        self._check_progress(plan)
        return plan

    def _initialise(self) -> _Decision:
        """Step 1: budgets; requests that outgrew every tier end; host decodes get their next block.

        When the host pool cannot give every host decode its block, the newest are preempted.
        """
        self.iteration += 1
        decision = _Decision(Work(block_size=self.queues.pools[Tier.DEVICE].block_size))
        decision.work.max_tokens = decision.num_free_tokens = self.config.max_num_batched_tokens
        limit = self._max_request_blocks
        requests = [request for queue in self.queues.running.values() for request in queue.values()]
        max_tokens = limit * decision.work.block_size
        for request in [*requests, *self._preempted_waiting()]:
            if request.num_tokens > max_tokens:
                self.queues.finish(request, "cache_full")
                decision.finished.append(request)
        if requests:
            mean = sum(request.num_tokens for request in requests) / len(requests)
            self._mean_context += (mean - self._mean_context) * (0.05 if self._mean_context else 1.0)
        if self.policy.computes_on_host:
            self._grow_or_evict(decision, Tier.HOST)
        return decision

    def _schedule_device_decodes(self, decision: _Decision) -> None:
        """Step 2: all device decodes run; the newest leave while they do not fit, or host requests come back."""
        self._grow_or_evict(decision, Tier.DEVICE)
        if not decision.swap_outs and not decision.preempted:
            self._swap_in(decision)
        work = decision.work
        work.device_decodes = [r for r in self.queues.running[Tier.DEVICE].values() if not r.is_prefilling]
        if self.policy.computes_on_host:
            host_decodes = [r for r in self.queues.running[Tier.HOST].values() if not r.is_prefilling]
            host_decodes.sort(key=_by_idleness)
            work.host_decodes = host_decodes
            work.num_overdue_decodes = self._num_overdue(host_decodes)
        num_swapped = sum(swap.num_blocks for swap in (*decision.swap_outs, *decision.swap_ins))
        work.num_swapped_blocks = num_swapped
        decision.num_free_tokens -= len(work.device_decodes) + len(work.host_decodes)

    def _schedule_prefills(self, decision: _Decision) -> None:
        """Step 3: prefills under way go on in their tier; then the waiting queue in order, device first.

        Device-bound requests are admitted at once; host-bound ones only if the composed iteration keeps them.
        """
        work = decision.work
        for request in self._prefills_under_way():
            if decision.num_free_tokens > 0:
                assert request.tier is not None, request
                self._add_chunk(decision, request, request.tier)
        host = self.queues.running[Tier.HOST].values()
        decision.num_free_host_blocks = self.queues.pools[Tier.HOST].num_free
        decision.num_host_residents = len(host)
        decision.host_kv_tokens = sum(request.num_tokens for request in host)
        if self._may_admit(decision):
            self._admit_waiting(decision)
        overdue = [prefill for prefill in work.host_prefills if self._is_overdue(prefill.request)]
        if overdue:
            others = [prefill for prefill in work.host_prefills if not self._is_overdue(prefill.request)]
            work.host_prefills = overdue + others
            work.num_overdue_prefills = len(overdue)

    def _compose(self, decision: _Decision) -> IterationPlan:
        """Steps 4 to 6: the composer's choice, put into effect."""
        work = decision.work
        if self.policy.splits_evenly:
            sub_batches = compose_symmetric(work)
            strategy = Strategy.PIPELINED if len(sub_batches) == 2 else Strategy.UNSPLIT
            loads = loads_of(sub_batches, self.cost_model, work.block_size)
            predicted_ms = self.cost_model.iteration_ms(strategy, loads, work.num_swapped_blocks) if loads else 0.0
        else:
            composer = Composer(
                work, self.cost_model, self._prices(), self.config.allowed_strategies, self.config.min_gain_margin
            )
            candidate = composer.choose()
            strategy, predicted_ms = candidate.strategy, candidate.predicted_ms
            sub_batches = composer.sub_batches(candidate)
        for sub_batch in sub_batches:
            for prefill in sub_batch.prefills:
                if prefill.request.status is RequestStatus.WAITING:
                    self.queues.admit(prefill.request, prefill.tier, self._num_blocks_at_admission(prefill.request))
        return IterationPlan(
            strategy=strategy,
            sub_batches=sub_batches,
            swap_outs=tuple(decision.swap_outs),
            swap_ins=tuple(decision.swap_ins),
            preempted=tuple(decision.preempted),
            finished=tuple(decision.finished),
            predicted_ms=predicted_ms,
        )

    # -------------------------------------------------------------------------------------------- blocks under pressure

    def _grow_or_evict(self, decision: _Decision, tier: Tier) -> None:
        """Gives each decode of a tier the block of its next token; the newest requests leave until there are enough."""
        queues, pool = self.queues, self.queues.pools[tier]
        growing: dict[str, int] = {}
        for request in queues.running[tier].values():
            missing = queues.num_blocks_needed(request) - len(request.block_ids)
            if missing > 0 and not request.is_prefilling:
                growing[request.request_id] = missing
        need = sum(growing.values())
        if need > pool.num_free:
            newest_last = sorted(queues.running[tier].values(), key=lambda request: request.sequence_number)
            while need > pool.num_free:
                victim = newest_last.pop()
                need -= growing.pop(victim.request_id, 0)
                self._evict(decision, victim)
        for request_id, missing in growing.items():
            queues.grow(queues.running[tier][request_id], missing)

    def _evict(self, decision: _Decision, victim: Request) -> None:
        """Out of its tier: from the device to the host where the policy and the space allow, else recomputed later."""
        queues = self.queues
        num_blocks = queues.num_blocks_needed(victim)
        may_swap = self.policy.computes_on_host or self.config.full_cache == "swap"
        if (
            victim.tier is Tier.DEVICE
            and may_swap
            and not victim.is_prefilling
            and queues.pools[Tier.HOST].can_allocate(num_blocks)
        ):
            decision.swap_outs.append(queues.swap(victim, num_blocks, self.iteration))
        else:
            queues.preempt(victim)
            decision.preempted.append(victim)

    def _swap_in(self, decision: _Decision) -> None:
        """Brings host requests back, in the order in which they went, while the device has room to spare.

        New requests have the first claim on the room: they get there without a copy.
        """
        queues, pool = self.queues, self.queues.pools[Tier.DEVICE]
        host = queues.running[Tier.HOST]
        if not host or Tier.DEVICE not in self.policy.prefill_tiers:
            return
        if self.policy.computes_on_host and queues.waiting:
            return
        for request in list(host.values())[:_MAX_SWAP_IN_LOOKS]:
            num_blocks = queues.num_blocks_needed(request)
            num_residents = len(queues.running[Tier.DEVICE])
            is_alone = num_residents == 0
            if request.is_prefilling or not pool.can_allocate(num_blocks):
                continue
            if not is_alone:
                limit = self.config.swap_in_threshold * pool.num_blocks
                if pool.num_taken + num_blocks > limit or pool.num_free - num_blocks < num_residents + 1:
                    return
            if self._is_cooling_down(request) and not (is_alone and not self.policy.computes_on_host):
                continue
            decision.swap_ins.append(queues.swap(request, num_blocks, self.iteration))

    def _is_cooling_down(self, request: Request) -> bool:
        if request.num_swaps == 0:
            return False
        cooldown = self.config.swap_cooldown << min(request.num_swaps - 1, _MAX_COOLDOWN_DOUBLINGS)
        return self.iteration - request.swapped_at <= cooldown

    # ------------------------------------------------------------------------------------------------------- prefills

    def _prefills_under_way(self) -> list[Request]:
        under_way = [r for queue in self.queues.running.values() for r in queue.values() if r.is_prefilling]
        under_way.sort(key=lambda request: request.sequence_number)
        return under_way

    def _may_admit(self, decision: _Decision) -> bool:
        if self.queues.num_running == 0:
            return True
        if decision.preempted or (not self.policy.computes_on_host and self.queues.running[Tier.HOST]):
            return False  # what was evicted comes back first
        return True

    def _admit_waiting(self, decision: _Decision) -> None:
        queues = self.queues
        num_running = queues.num_running
        for request in list(_first(queues.waiting, decision.num_free_tokens)):
            if num_running >= self._max_running or decision.num_free_tokens <= 0:
                return
            if not self._can_start(decision, request):
                return
            tier = self._find_tier(decision, request)
            if tier is None:
                return
            self._add_chunk(decision, request, tier)
            num_running += 1
            if tier is Tier.DEVICE:
                queues.admit(request, tier, self._num_blocks_at_admission(request))
            else:
                self._place_on_host(decision, request)

    def _place_on_host(self, decision: _Decision, request: Request) -> None:
        """Tentatively: the composer may drop it; from now on the request waits by our choice, so it ages."""
        decision.num_free_host_blocks -= self._num_blocks_at_admission(request)
        decision.num_host_residents += 1
        decision.host_kv_tokens += request.num_tokens
        if request.last_advanced < 0:
            request.last_advanced = self.iteration

    def _can_start(self, decision: _Decision, request: Request) -> bool:
        """Without chunked prefill a prompt starts only if it is finished at once, or longer than any budget."""
        budget = self.config.max_num_batched_tokens
        return (
            self.config.chunked_prefill
            or request.num_tokens <= decision.num_free_tokens
            or (request.num_tokens > budget)
        )

    def _add_chunk(self, decision: _Decision, request: Request, tier: Tier) -> None:
        start = request.num_computed_tokens
        remaining = request.num_tokens - start
        num_tokens = min(remaining, decision.num_free_tokens)
        decision.num_free_tokens -= num_tokens
        chunk = ScheduledPrefill(request, start, num_tokens, tier, samples=num_tokens == remaining)
        prefills = decision.work.device_prefills if tier is Tier.DEVICE else decision.work.host_prefills
        prefills.append(chunk)

    def _find_tier(self, decision: _Decision, request: Request) -> Tier | None:
        """The first tier of the policy with room for the request and for its residents to grow by a block each."""
        queues = self.queues
        num_blocks = self._num_blocks_at_admission(request)
        for tier in self.policy.prefill_tiers:
            num_free = queues.pools[tier].num_free if tier is Tier.DEVICE else decision.num_free_host_blocks
            num_residents = len(queues.running[tier]) if tier is Tier.DEVICE else decision.num_host_residents
            is_reserved = self.config.full_cache == "reserve" and not self.policy.computes_on_host
            headroom = 0 if is_reserved else num_residents
            if num_free < num_blocks + headroom:
                continue
            if tier is Tier.DEVICE or num_residents == 0 or self._can_serve_on_host(decision, request):
                return tier
        return None

    def _can_serve_on_host(self, decision: _Decision, request: Request) -> bool:
        """Admission control: one iteration's longest linear stage must be able to hide all host attention."""
        num_tokens = decision.host_kv_tokens + request.num_tokens
        attention_ms = self.cost_model.host_attention_ms(decision.num_host_residents + 1, num_tokens)
        return attention_ms <= self._longest_linear_ms

    def _num_blocks_at_admission(self, request: Request) -> int:
        """All blocks of the prompt, so that a prefill under way never waits for blocks; "reserve" takes all ever."""
        if self.config.full_cache == "reserve" and not self.policy.computes_on_host:
            most_tokens = request.num_prompt_tokens + request.max_tokens - 1  # the last token's KV is never written
            num_blocks = self.queues.pools[Tier.DEVICE].num_blocks_for(max(most_tokens, request.num_tokens))
            return min(num_blocks, self._max_request_blocks)
        return self.queues.num_blocks_needed(request)

    # ---------------------------------------------------------------------------------------------------------- helpers

    @property
    def _max_request_blocks(self) -> int:
        return max(self.queues.pools[tier].num_blocks for tier in self.policy.prefill_tiers)

    def _preempted_waiting(self) -> list[Request]:
        """Preempted requests are at the front; only they can have outgrown the tiers while waiting."""
        preempted = []
        for request in self.queues.waiting.values():
            if not request.num_preemptions:
                break
            preempted.append(request)
        return preempted

    def _is_overdue(self, request: Request) -> bool:
        return 0 <= request.last_advanced < self.iteration - self.config.max_idle_iterations

    def _num_overdue(self, by_idleness: list[Request]) -> int:
        num = 0
        while num < len(by_idleness) and self._is_overdue(by_idleness[num]):
            num += 1
        return num

    def _prices(self) -> Prices:
        """A decode costs what it does on a device whose cache is full; a prefill what it does alone."""
        model, config = self.cost_model, self.config
        device = self.queues.pools[Tier.DEVICE]
        num_tokens = device.num_blocks * device.block_size
        num_decodes = max(1, min(int(num_tokens / max(self._mean_context, 1.0)), self._max_running))
        load = SubBatchLoad(num_tokens=num_decodes, num_device_decodes=num_decodes, device_kv_tokens=num_tokens)
        decode_ms = model.iteration_ms(Strategy.DEVICE_ONLY, [load]) / num_decodes
        prefill_ms = model.num_layers * self._longest_linear_ms / config.max_num_batched_tokens
        return Prices(decode_ms, prefill_ms, 1.0 + config.prefill_price * self._host_emptiness())

    def _host_emptiness(self) -> float:
        """1 for an idle host, 0 for one that is full, by its blocks or by what it can serve in an iteration."""
        pool = self.queues.pools[Tier.HOST]
        host = self.queues.running[Tier.HOST].values()
        attention_ms = self.cost_model.host_attention_ms(len(host), sum(request.num_tokens for request in host))
        by_time = 1.0 - attention_ms / max(self._longest_linear_ms, 1e-9)
        by_blocks = pool.num_free / max(pool.num_blocks, 1)
        return max(0.0, min(by_time, by_blocks))

    def _check_progress(self, plan: IterationPlan) -> None:
        if not plan.is_empty or not self.has_unfinished:
            self._num_empty_iterations = 0
            return
        self._num_empty_iterations += 1
        if self._num_empty_iterations > _MAX_EMPTY_ITERATIONS:
            raise SchedulerStallError(
                f"nothing scheduled for {self._num_empty_iterations} iterations under {self.config}\n"
                + self.queues.dump()
            )


def _by_idleness(request: Request) -> tuple[int, int]:
    return request.last_advanced, request.sequence_number


def _first(waiting: Mapping[str, Request], num: int) -> list[Request]:
    """At most `num` requests from the front; a request takes a token of the budget at least."""
    return [request for _, request in zip(range(num), waiting.values(), strict=False)]
