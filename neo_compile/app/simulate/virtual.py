"""The engine's own scheduler on a virtual clock: tokens are counted, not computed, and no model is needed. No torch.

The clock advances by the cost model's prediction, or by `true_model`'s time for the same plan, to study a scheduler
whose model is wrong. Queues, block pools, plans and the scheduler are those that serve real models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.composition import load_of
from neo_compile.runtime.cost_model import CostModel
from neo_compile.runtime.plan import IterationPlan, Strategy
from neo_compile.runtime.request import Request, Tier
from neo_compile.runtime.scheduler import Scheduler
from neo_compile.runtime.scheduler_config import SchedulerConfig


@dataclass
class VirtualRun:
    """What a run did.

    Attributes:
        elapsed_ms: the virtual clock.
        arrivals_ms: when each request was there, by id; 0 unless `VirtualEngine.run` was given arrivals.
        token_times_ms: when each output token of a request was there, by id.
    """

    elapsed_ms: float = 0.0
    num_iterations: int = 0
    num_swaps: int = 0
    num_preemptions: int = 0
    finished: list[Request] = field(default_factory=list)
    iterations: dict[Strategy, int] = field(default_factory=lambda: dict.fromkeys(Strategy, 0))
    arrivals_ms: dict[str, float] = field(default_factory=dict)
    token_times_ms: dict[str, list[float]] = field(default_factory=dict)

    @property
    def requests_per_s(self) -> float:
        """Of the whole run."""
        return 1000.0 * len(self.finished) / self.elapsed_ms


class VirtualEngine:
    """Runs requests through a scheduler.

    Args:
        true_model: what iterations really take, where the scheduler's `cost_model` is wrong.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost_model: CostModel,
        *,
        device_blocks: int,
        host_blocks: int,
        block_size: int = 16,
        true_model: CostModel | None = None,
    ) -> None:
        self.device_pool = BlockPool(device_blocks, block_size, Tier.DEVICE)
        self.host_pool = BlockPool(host_blocks, block_size, Tier.HOST)
        self.scheduler = Scheduler(config, self.device_pool, self.host_pool, cost_model)
        self.config = config
        self.true_model = true_model
        self.result = VirtualRun()

    def add(self, request: Request, arrival_ms: float = 0.0) -> None:
        """Queue a request. Raises CapacityError if it can never fit."""
        self.scheduler.add(request)
        self.result.arrivals_ms[request.request_id] = arrival_ms
        self.result.token_times_ms[request.request_id] = []

    def step(self) -> IterationPlan:
        """One iteration; finished requests end up in `result.finished`."""
        plan = self.scheduler.schedule()
        self.advance(plan)
        return plan

    def advance(self, plan: IterationPlan) -> None:
        """What running `plan` would do: time passes, tokens come out, the scheduler learns of both."""
        result = self.result
        result.num_iterations += 1
        result.num_swaps += len(plan.swap_outs) + len(plan.swap_ins)
        result.num_preemptions += len(plan.preempted)
        result.finished.extend(plan.finished)
        measured_ms, measured_parts = self._measure(plan)
        result.elapsed_ms += measured_ms
        if not plan.is_empty:
            result.iterations[plan.strategy] += 1
        running = list(plan.requests)
        for sub_batch in plan.sub_batches:
            sampling = [prefill.request for prefill in sub_batch.prefills if prefill.samples]
            for request in (*sampling, *sub_batch.device_decodes, *sub_batch.host_decodes):
                request.output_token_ids.append(len(request.output_token_ids))
                result.token_times_ms[request.request_id].append(result.elapsed_ms)
        self.scheduler.complete(plan, {}, measured_ms, measured_parts)
        result.finished.extend(request for request in running if request.is_finished)

    def run(
        self,
        requests: Sequence[Request],
        arrivals_ms: Sequence[float] | None = None,
        max_iterations: int = 1_000_000,
    ) -> VirtualRun:
        """Serve `requests` to the end.

        Args:
            arrivals_ms: when each is there, ascending; all at once if not given. The clock jumps over idle times.
        """
        pending = deque(zip(requests, arrivals_ms or [0.0] * len(requests), strict=True))
        while pending or self.scheduler.has_unfinished:
            assert self.result.num_iterations < max_iterations, self.scheduler.queues.dump()
            if not self.scheduler.has_unfinished:
                self.result.elapsed_ms = max(self.result.elapsed_ms, pending[0][1])
            while pending and pending[0][1] <= self.result.elapsed_ms:
                self.add(*pending.popleft())
            self.step()
        return self.result

    def _measure(self, plan: IterationPlan) -> tuple[float, dict[str, float]]:
        """Milliseconds of the iteration and of its host attention."""
        if self.true_model is None or plan.is_empty:
            return plan.predicted_ms, {}
        loads = [load_of(sub_batch, self.true_model, self.device_pool.block_size) for sub_batch in plan.sub_batches]
        num_swapped = sum(swap.num_blocks for swap in (*plan.swap_outs, *plan.swap_ins))
        host_ms = self.true_model.predict_parts(loads)["host_attention"]
        return self.true_model.iteration_ms(plan.strategy, loads, num_swapped), {"host_attention": host_ms}
