"""The virtual engine of `neo simulate`, with every iteration checked against the contract of `IterationPlan`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neo_compile.app.simulate import virtual
from neo_compile.app.simulate.setups import SETUPS
from neo_compile.runtime.cost_model import AnalyticCostModel, CostModel
from neo_compile.runtime.plan import IterationPlan, Strategy
from neo_compile.runtime.request import Request, Tier
from neo_compile.runtime.scheduler_config import SchedulerConfig


@dataclass
class VirtualRun(virtual.VirtualRun):
    """`longest_idle`: the most iterations in a row that a request holding KV was left out of."""

    longest_idle: int = 0


class VirtualEngine(virtual.VirtualEngine):
    """Asserts the promises of plans, blocks and queues in every iteration unless `check` is off."""

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
        super().__init__(
            config,
            cost_model,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            block_size=block_size,
            true_model=true_model,
        )
        self.check = check
        self.result: VirtualRun = VirtualRun()
        self._last_advanced: dict[str, int] = {}

    def advance(self, plan: IterationPlan) -> None:
        if not self.check:
            super().advance(plan)
            return
        self.check_plan(plan)
        super().advance(plan)
        self._check_idleness(list(plan.requests))

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
    """`SETUPS["t4"]`, with parameters of `AnalyticCostModel` replaced."""
    return SETUPS["t4"].cost_model(**changes)


def a10g_llama3_8b(**changes: float) -> AnalyticCostModel:
    """`SETUPS["a10g-8xlarge"]`, with parameters of `AnalyticCostModel` replaced."""
    return SETUPS["a10g-8xlarge"].cost_model(**changes)
