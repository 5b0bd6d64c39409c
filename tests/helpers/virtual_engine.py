"""The real scheduler on a virtual clock: tokens are counted, not computed. No torch.

The clock advances by the cost model's prediction (or by `true_model`'s time for the same plan, to study a scheduler
whose model is wrong).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.composition import load_of
from neo_compile.runtime.cost_model import AnalyticCostModel, CostModel
from neo_compile.runtime.plan import IterationPlan, Strategy
from neo_compile.runtime.request import Request, Tier
from neo_compile.runtime.scheduler import Scheduler
from neo_compile.runtime.scheduler_config import SchedulerConfig


@dataclass
class VirtualRun:
    """What a run did."""

    elapsed_ms: float = 0.0
    num_iterations: int = 0
    num_swaps: int = 0
    num_preemptions: int = 0
    longest_idle: int = 0
    finished: list[Request] = field(default_factory=list)
    iterations: dict[Strategy, int] = field(default_factory=lambda: dict.fromkeys(Strategy, 0))

    @property
    def requests_per_s(self) -> float:
        return 1000.0 * len(self.finished) / self.elapsed_ms


class VirtualEngine:
    """Runs requests through a scheduler and checks every iteration against the contract."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost_model: CostModel,
        *,
        device_blocks: int,
        host_blocks: int,
        block_size: int = 16,
        true_model: CostModel | None = None,
        check: bool = True,
    ) -> None:
        self.device_pool = BlockPool(device_blocks, block_size, Tier.DEVICE)
        self.host_pool = BlockPool(host_blocks, block_size, Tier.HOST)
        self.scheduler = Scheduler(config, self.device_pool, self.host_pool, cost_model)
        self.config = config
        self.true_model = true_model
        self.check = check
        self.result = VirtualRun()
        self._last_advanced: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> IterationPlan:
        """One iteration; finished requests end up in `result.finished`."""
        plan = self.scheduler.schedule()
        if self.check:
            self.check_plan(plan)
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
            sampling = [p.request for p in sub_batch.prefills if p.samples]
            for request in (*sampling, *sub_batch.device_decodes, *sub_batch.host_decodes):
                request.output_token_ids.append(len(request.output_token_ids))
        self.scheduler.complete(plan, {}, measured_ms, measured_parts)
        result.finished.extend(request for request in running if request.is_finished)
        if self.check:
            self._check_idleness(running)
        return plan

    def run(self, requests: Sequence[Request], max_iterations: int = 1_000_000) -> VirtualRun:
        """All requests at once, to the end."""
        for request in requests:
            self.add(request)
        while self.scheduler.has_unfinished:
            assert self.result.num_iterations < max_iterations, self.scheduler.queues.dump()
            self.step()
        return self.result

    def check_plan(self, plan: IterationPlan) -> None:
        """The promises of `IterationPlan`."""
        self.scheduler.check_integrity()
        assert not (plan.swap_outs and plan.swap_ins)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert self.scheduler.num_running <= self.config.max_num_seqs
        requests = list(plan.requests)
        assert len({request.request_id for request in requests}) == len(requests)
        assert len(plan.sub_batches) <= 2
        if plan.strategy is Strategy.PIPELINED:
            assert len(plan.sub_batches) == 2
            assert all(sub_batch.num_requests for sub_batch in plan.sub_batches)
        if plan.strategy is Strategy.DEVICE_ONLY:
            assert all(request.tier is Tier.DEVICE for request in requests)
        if plan.strategy is Strategy.UNSPLIT:
            assert any(request.tier is Tier.HOST for request in requests)
        for sub_batch in plan.sub_batches:
            for prefill in sub_batch.prefills:
                request = prefill.request
                assert prefill.num_tokens > 0
                assert request.tier is prefill.tier
                assert prefill.start == request.num_computed_tokens
                assert prefill.samples == (prefill.start + prefill.num_tokens == request.num_tokens)
                assert len(request.block_ids) >= self.device_pool.num_blocks_for(prefill.start + prefill.num_tokens)
            for tier, decodes in ((Tier.DEVICE, sub_batch.device_decodes), (Tier.HOST, sub_batch.host_decodes)):
                for request in decodes:
                    assert request.tier is tier
                    assert request.num_computed_tokens == request.num_tokens - 1
                    assert len(request.block_ids) >= self.device_pool.num_blocks_for(request.num_tokens)
        for swap in (*plan.swap_outs, *plan.swap_ins):
            assert len(swap.src_block_ids) == len(swap.dst_block_ids)
            assert swap.request.block_ids[: swap.num_blocks] == list(swap.dst_block_ids)

    def _measure(self, plan: IterationPlan) -> tuple[float, dict[str, float]]:
        """Milliseconds of the iteration and of its host attention."""
        if self.true_model is None or plan.is_empty:
            return plan.predicted_ms, {}
        loads = [load_of(sub_batch, self.true_model, self.device_pool.block_size) for sub_batch in plan.sub_batches]
        num_swapped = sum(swap.num_blocks for swap in (*plan.swap_outs, *plan.swap_ins))
        host_ms = self.true_model.predict_parts(loads)["host_attention"]
        return self.true_model.iteration_ms(plan.strategy, loads, num_swapped), {"host_attention": host_ms}

    def _check_idleness(self, advanced: Sequence[Request]) -> None:
        now = self.result.num_iterations
        for request in advanced:
            self._last_advanced[request.request_id] = now
        for tier in Tier:
            for request in self.scheduler.queues.running[tier].values():
                since = self._last_advanced.setdefault(request.request_id, now)
                self.result.longest_idle = max(self.result.longest_idle, now - since)


def random_requests(
    num: int, prompt: Callable[[random.Random], int], output: Callable[[random.Random], int], seed: int = 0
) -> list[Request]:
    rng = random.Random(seed)
    return [Request(f"r{i}", [0] * max(1, prompt(rng)), max(1, output(rng))) for i in range(num)]


def around(mean: int, spread: float = 0.3) -> Callable[[random.Random], int]:
    """Lengths spread evenly over mean * (1 -+ spread)."""
    return lambda rng: round(mean * rng.uniform(1 - spread, 1 + spread))


def t4_llama2_7b(**changes: float) -> AnalyticCostModel:
    """T4 with Llama-2-7B in fp16: 13.5 GB of weights at 320 GB/s; 16 KiB of KV a token and layer, read at 250 GB/s on
    the device and 24 GB/s by 8 cores, copied at 10 GB/s."""
    parameters: dict[str, float] = {
        "num_layers": 32,
        "linear_floor_ms": 42.0 / 32,
        "knee_tokens": 64,
        "linear_ms_per_token": 0.43 / 32,
        "device_tokens_per_ms": 15_259,
        "host_tokens_per_ms": 1_465,
        "swap_blocks_per_ms": 38,
        "prefill_attention_ms_per_token2": 1e-6,
        "launch_ms": 0.1,
    }
    return AnalyticCostModel(**(parameters | changes))  # type: ignore[arg-type]


def a10g_llama3_8b(**changes: float) -> AnalyticCostModel:
    """A10G with Llama-3-8B in bf16: 16 GB at 600 GB/s; 4 KiB of KV a token and layer, 45 GB/s on the host (8xlarge)."""
    parameters: dict[str, float] = {
        "num_layers": 32,
        "linear_floor_ms": 27.0 / 32,
        "knee_tokens": 80,
        "linear_ms_per_token": 0.33 / 32,
        "device_tokens_per_ms": 122_000,
        "host_tokens_per_ms": 11_000,
        "swap_blocks_per_ms": 300,
        "prefill_attention_ms_per_token2": 2e-7,
        "launch_ms": 0.1,
    }
    return AnalyticCostModel(**(parameters | changes))  # type: ignore[arg-type]
