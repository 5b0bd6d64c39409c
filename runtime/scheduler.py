"""Decides what runs in the next iteration, and where each request's KV cache is.

`schedule()` is the paper's six steps. Steps 1 to 3 move requests and blocks (`tiering`, `admission`); steps 4 to 6 only
look (`composer`). Guarantees, for every policy:

* a request that can fit a tier finishes; one that outgrows every tier ends alone with "cache_full";
* tokens do not depend on the policy, only times do;
* an iteration swaps in one direction at most, and a request's swap-ins grow with the logarithm of its iterations;
* with a policy that computes on the host, an admitted request is left out of at most `max_idle_iterations`
  iterations in a row. A device-only policy keeps swapped-out requests waiting until older ones have finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from operator import attrgetter

from neo_compile.errors import CapacityError, NeoError
from neo_compile.runtime.admission import Admission
from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.composer import GreedyComposer
from neo_compile.runtime.composition import Composer, Composition, Prices, load_of
from neo_compile.runtime.cost_model import CostModel, SubBatchLoad
from neo_compile.runtime.decision import Decision, Work
from neo_compile.runtime.plan import IterationPlan, Strategy
from neo_compile.runtime.queues import Census, Queues
from neo_compile.runtime.request import FinishReason, Request, RequestStatus, Tier
from neo_compile.runtime.scheduler_config import POLICIES, SchedulerConfig
from neo_compile.runtime.symmetric import SymmetricComposer
from neo_compile.runtime.tiering import Tiering

_MAX_EMPTY_ITERATIONS = 8
_CONTEXT_SMOOTHING = 0.05
_SLACK_PRICE = 7.0


class SchedulerStallError(NeoError, RuntimeError):
    """Iterations go by and no request comes nearer to its end: a bug; the message holds a dump."""


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
        self._tiering = Tiering(config, self.queues)
        self._admission = Admission(config, self.queues, cost_model)
        self._composer: Composer = (
            SymmetricComposer(cost_model) if self.policy.splits_evenly else GreedyComposer(cost_model, config)
        )
        self._num_added = 0
        self._num_empty_iterations = 0
        self._num_unsampled_tokens = 0  # computed since a token was last sampled
        self._stall_tokens = 0
        self._mean_context = 0.0  # tokens of a running request

    def add(self, request: Request) -> None:
        """Queues a request; CapacityError if its prompt and one more token can never fit."""
        if self.queues.find(request.request_id) is not None:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        device, host = self.queues.pools[Tier.DEVICE], self.queues.pools[Tier.HOST]
        need, limit = device.num_blocks_for(request.num_tokens + 1), self._admission.max_request_blocks
        if need > limit:
            knob = " or ".join(f"{tier.value}_blocks" for tier in self.policy.prefill_tiers)
            raise CapacityError(
                f"request {request.request_id!r}: {request.num_tokens} prompt tokens + 1 need {need} KV blocks of "
                f"{device.block_size} tokens, but policy {self.policy.name!r} can give one request at most {limit} "
                f"(device_blocks={device.num_blocks}, host_blocks={host.num_blocks}); raise {knob} "
                "or shorten the prompt",
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

    def schedule(self) -> IterationPlan:
        """The next iteration's plan, with all its blocks allocated."""
        decision = self._initialise()
        self._schedule_device_decodes(decision)
        self._schedule_prefills(decision)
        composition = self._composer.compose(decision.work, self._prices(decision))
        return self._commit(decision, composition)

    def complete(
        self,
        plan: IterationPlan,
        stop: Mapping[str, FinishReason] | None = None,
        measured_ms: float | None = None,
        measured_parts: Mapping[str, float] | None = None,
    ) -> None:
        """Takes note that `plan` has run and its sampled tokens have been appended to the requests' outputs.

        Args:
            stop: requests to end, by id ("stop", "length", "error", ...); `max_tokens` is enforced here besides.
            measured_ms: what the iteration took, to correct the cost model.
            measured_parts: what parts of it took (`cost_model.PARTS`, summed over layers and sub-batches), where known;
                the time of the host attention is the one that matters most.
        """
        stop = stop or {}
        if not plan.is_empty:
            self._observe(plan, measured_ms, measured_parts or {})
        for sub_batch in plan.sub_batches:
            for prefill in sub_batch.prefills:
                self._advance(prefill.request, prefill.num_tokens, prefill.samples, stop)
            for decode in (*sub_batch.device_decodes, *sub_batch.host_decodes):
                self._advance(decode, 1, True, stop)
        for request_id, reason in stop.items():
            self.abort(request_id, reason)

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

    def _initialise(self) -> Decision:
        """Step 1: the budgets; requests that outgrew every tier end; host decodes get the blocks of their next tokens.

        When the host cannot give every host decode its block, its newest requests are preempted.
        """
        self.iteration += 1
        budget, block_size = self.config.max_num_batched_tokens, self.queues.pools[Tier.DEVICE].block_size
        work = Work(max_tokens=budget, block_size=block_size)
        decision = Decision(
            self.iteration,
            work,
            self._count(),
            overdue_before=self.iteration - self.config.max_idle_iterations,
            num_free_tokens=budget,
        )
        if num_running := self.queues.num_running:
            mean = sum(census.kv_tokens for census in decision.census.values()) / num_running
            self._mean_context += (mean - self._mean_context) * (_CONTEXT_SMOOTHING if self._mean_context else 1.0)
        self._finish_outgrown(decision)
        if self.policy.computes_on_host:
            self._tiering.grow_or_evict(decision, Tier.HOST)
        return decision

    def _count(self) -> dict[Tier, Census]:
        return {tier: self.queues.count(tier) for tier in Tier}

    def _finish_outgrown(self, decision: Decision) -> None:
        """Ends requests that need more blocks than any tier has: decodes about to grow, or preempted ones."""
        max_tokens = self._admission.max_request_blocks * decision.work.block_size
        growing = [request for census in decision.census.values() for request in census.growing]
        for request in (*growing, *self.queues.list_preempted()):
            if request.num_tokens > max_tokens:
                self.queues.finish(request, "cache_full")
                decision.finished.append(request)
        if decision.finished:
            decision.census = self._count()

    def _schedule_device_decodes(self, decision: Decision) -> None:
        """Step 2: all device decodes run; the newest leave while they do not fit, or else host requests come back."""
        self._tiering.grow_or_evict(decision, Tier.DEVICE)
        self._tiering.swap_in(decision)
        work = decision.work
        work.num_swapped_blocks = sum(swap.num_blocks for swap in (*decision.swap_outs, *decision.swap_ins))
        if decision.has_moved:
            decision.census = self._count()
        work.device_decodes = decision.census[Tier.DEVICE].decodes
        if self.policy.computes_on_host:
            work.host_decodes = sorted(decision.census[Tier.HOST].decodes, key=attrgetter("last_advanced"))
            work.num_overdue_decodes = sum(1 for _ in takewhile(decision.is_overdue, work.host_decodes))
        decision.num_free_tokens -= len(work.device_decodes) + len(work.host_decodes)

    def _schedule_prefills(self, decision: Decision) -> None:
        """Step 3: prefills under way go on in their tier; then the waiting queue in order, device first."""
        self._admission.look_at_host(decision)
        self._admission.pace_prefills(decision)
        self._admission.continue_prefills(decision)
        self._admission.admit_waiting(decision)
        work = decision.work
        work.host_prefills.sort(key=lambda prefill: not decision.is_overdue(prefill.request))
        work.num_overdue_prefills = sum(decision.is_overdue(prefill.request) for prefill in work.host_prefills)

    def _commit(self, decision: Decision, composition: Composition) -> IterationPlan:
        """Admits the host-bound prefills that were kept."""
        for sub_batch in composition.sub_batches:
            for prefill in sub_batch.prefills:
                if prefill.request.status is RequestStatus.WAITING:
                    num_blocks = self._admission.num_blocks_for(prefill.request)
                    self.queues.admit(prefill.request, prefill.tier, num_blocks)
        plan = IterationPlan(
            strategy=composition.strategy,
            sub_batches=composition.sub_batches,
            swap_outs=tuple(decision.swap_outs),
            swap_ins=tuple(decision.swap_ins),
            preempted=tuple(decision.preempted),
            finished=tuple(decision.finished),
            predicted_ms=composition.predicted_ms,
        )
        self._check_progress(plan)
        return plan

    def _check_progress(self, plan: IterationPlan) -> None:
        """Raises SchedulerStallError where nothing runs, or where the same prefills are computed over and over.

        Before a token is sampled, prefills can at most compute every token there is, once. Twice that many is a
        livelock.
        """
        is_idle = plan.is_empty and self.has_unfinished
        self._num_empty_iterations = self._num_empty_iterations + 1 if is_idle else 0
        if self._num_empty_iterations > _MAX_EMPTY_ITERATIONS:
            raise self._stall(f"nothing scheduled for {self._num_empty_iterations} iterations")
        if any(prefill.samples for sub_batch in plan.sub_batches for prefill in sub_batch.prefills) or any(
            sub_batch.device_decodes or sub_batch.host_decodes for sub_batch in plan.sub_batches
        ):
            self._num_unsampled_tokens = 0
            return
        self._num_unsampled_tokens += plan.num_tokens
        if self._num_unsampled_tokens > self._stall_tokens:  # the sum is taken anew only where it matters
            requests = (*self.queues.list_running(), *self.queues.waiting.values())
            self._stall_tokens = 2 * sum(request.num_tokens for request in requests)
            if self._num_unsampled_tokens > self._stall_tokens:
                raise self._stall(f"{self._num_unsampled_tokens} tokens computed since the last one was sampled")

    def _stall(self, what: str) -> SchedulerStallError:
        return SchedulerStallError(f"{what}, in iteration {self.iteration} under {self.config}\n{self.queues.dump()}")

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

    def _observe(self, plan: IterationPlan, measured_ms: float | None, measured_parts: Mapping[str, float]) -> None:
        model = self.cost_model
        explained_ms = plan.predicted_ms
        if measured_parts:
            predicted_parts = model.predict_parts(self._loads(plan))
            for part, part_ms in measured_parts.items():
                model.observe_part(part, predicted_parts[part], part_ms)
            num_swapped_blocks = sum(swap.num_blocks for swap in (*plan.swap_outs, *plan.swap_ins))
            explained_ms = model.iteration_ms(plan.strategy, self._loads(plan), num_swapped_blocks)
        if measured_ms is not None:
            model.observe(plan.strategy, plan.predicted_ms, measured_ms, explained_ms)

    def _loads(self, plan: IterationPlan) -> list[SubBatchLoad]:
        block_size = self.queues.pools[Tier.DEVICE].block_size
        return [load_of(sub_batch, self.cost_model, block_size) for sub_batch in plan.sub_batches]

    def _prices(self, decision: Decision) -> Prices:
        """A decode is worth what it costs on a device whose cache is full; a prefill what it costs alone.

        A prefill that fills the host is worth more, and much more while the attention of all host requests hides under
        the linear stage of the decodes alone: then each further request makes every later iteration's tokens cheaper.
        Beyond that point it is prefills that hide attention, and they had better be spread.
        """
        device = self.queues.pools[Tier.DEVICE]
        num_tokens = device.num_blocks * device.block_size
        num_decodes = max(1, min(int(num_tokens / max(self._mean_context, 1.0)), self.config.max_running))
        load = SubBatchLoad(
            num_decodes, num_device_decodes=num_decodes, device_kv_tokens=num_tokens, num_logits=num_decodes
        )
        longest_ms = self._admission.longest_linear_ms
        fill_price = self.config.prefill_price * decision.host_emptiness * (1.0 + _SLACK_PRICE * decision.host_slack)
        return Prices(
            decode_ms=self.cost_model.iteration_ms(Strategy.DEVICE_ONLY, [load]) / num_decodes,
            prefill_ms_per_token=self.cost_model.num_layers * longest_ms / self.config.max_num_batched_tokens,
            host_prefill_factor=1.0 + fill_price,
        )
