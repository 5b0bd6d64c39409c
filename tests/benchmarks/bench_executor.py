"""Iterations against the formula's bound: `pytest tests/benchmarks/bench_executor.py --benchmark-only`.

Ids are plan-dtype. A plan is forced on SmolLM2 on the emulated device (one core a side) and run again and again. The
benchmark's time is the iteration's; `extra_info` has `ratio`, the median of actual over bound (`iteration_bound`), the
parts in ms, and `timeline_off_ratio`, the iteration's time with the recorder off over that with it on.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import pytest
import torch

from neo_compile.runtime.captured import captured_model
from neo_compile.runtime.device import DeviceConfig, open_device
from neo_compile.runtime.executor import Executor
from neo_compile.runtime.iteration_bound import bound_of
from neo_compile.runtime.kv_cache import KVCache
from neo_compile.runtime.plan import IterationPlan, ScheduledPrefill, Strategy, SubBatch, Swap
from neo_compile.runtime.request import Request, RequestStatus, Tier
from neo_compile.runtime.timeline import Timeline
from tests.helpers.smollm import require_smollm2

BLOCK_SIZE, CONTEXT = 16, 400
NUM_BLOCKS = {Tier.DEVICE: 1200, Tier.HOST: 3000}
ROUNDS = 30


@dataclass(frozen=True)
class Load:
    """What an iteration does: prefill tokens by tier, decodes of (batch-0 device, batch-0 host, batch-1 host)."""

    prefill_tokens: int = 0
    prefill_tier: Tier = Tier.DEVICE
    decodes: tuple[int, int, int] = (0, 0, 0)
    num_swapped: int = 0
    staging_blocks: int | None = None


# 48 host decodes take about as long as batch-0's linear stage on a Zen 4 core a side. A host that idles falls asleep,
# and waking it costs the launching thread some 70 us: hence the one with an idle host.
LOADS = {
    "device-only": Load(128, decodes=(24, 0, 0)),
    "unsplit": Load(128, decodes=(12, 12, 0)),
    "pipelined": Load(32, decodes=(16, 4, 48)),
    "pipelined-decodes": Load(decodes=(24, 8, 48)),
    "pipelined-idle-host": Load(128, decodes=(16, 4, 24)),
    "pipelined-swap": Load(32, decodes=(16, 4, 48), num_swapped=4),
    "host-prefill-direct": Load(256, Tier.HOST, decodes=(8, 2, 24)),
    "host-prefill-ring": Load(256, Tier.HOST, decodes=(8, 2, 24), staging_blocks=128),
}


class Bench:
    """An executor and one plan for it."""

    def __init__(self, model, load: Load, dtype: torch.dtype) -> None:
        self.device = open_device(DeviceConfig(device_threads=1, host_threads=1), has_host_cache=True)
        with self.device.launching():
            staged = captured_model(model, "inductor", 1)
            caches = {
                tier: KVCache(staged.sites, NUM_BLOCKS[tier], BLOCK_SIZE, dtype, self.device.torch_device)
                for tier in Tier
            }
            for cache in caches.values():
                for pool in cache.pools:
                    pool.normal_()
            self.executor = Executor(staged, self.device, caches, staging_blocks=load.staging_blocks)
        self._next_block = dict.fromkeys(Tier, 0)
        self.plan = self._make_plan(load)

    def run(self) -> None:
        with self.device.launching(), torch.no_grad():
            self.executor.execute(self.plan)

    def _make_plan(self, load: Load) -> IterationPlan:
        prefills: list[ScheduledPrefill] = []
        if load.prefill_tokens:
            request = self._request(load.prefill_tokens, 0, load.prefill_tier)
            prefills.append(ScheduledPrefill(request, 0, load.prefill_tokens, load.prefill_tier, samples=True))
        device0, host0, host1 = load.decodes
        batch0 = SubBatch(tuple(prefills), self._decodes(device0, Tier.DEVICE), self._decodes(host0, Tier.HOST))
        batch1 = SubBatch(host_decodes=self._decodes(host1, Tier.HOST))
        swaps = []
        for _ in range(load.num_swapped):
            block_ids = {tier: tuple(self._request(CONTEXT, 1, tier).block_ids) for tier in Tier}
            swaps.append(Swap(Request("s", [1], 1), *Tier, block_ids[Tier.DEVICE], block_ids[Tier.HOST]))
        return IterationPlan(
            Strategy.PIPELINED if host1 else Strategy.UNSPLIT, (batch0, batch1), swap_outs=tuple(swaps)
        )

    def _decodes(self, count: int, tier: Tier) -> tuple[Request, ...]:
        return tuple(self._request(CONTEXT + 17 * i, 1, tier) for i in range(count))

    def _request(self, num_tokens: int, num_outputs: int, tier: Tier) -> Request:
        request = Request(f"r{sum(self._next_block.values())}", [1 + i % 99 for i in range(num_tokens)], 100)
        request.output_token_ids += [7] * num_outputs
        num_blocks = -(-(num_tokens + num_outputs) // BLOCK_SIZE)
        first = self._next_block[tier]
        assert first + num_blocks <= NUM_BLOCKS[tier]
        self._next_block[tier] += num_blocks
        request.block_ids = list(range(first, first + num_blocks))
        request.status, request.tier = RequestStatus.RUNNING, tier
        return request


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).split(".")[1])
@pytest.mark.parametrize("name", LOADS)
def test_iteration(benchmark, name, dtype):
    model, _ = require_smollm2(dtype)
    bench = Bench(model, LOADS[name], dtype)
    try:
        benchmark.pedantic(bench.run, rounds=ROUNDS, warmup_rounds=3)
        bench.executor.timeline = timeline = Timeline()
        for _ in range(ROUNDS):
            bench.run()
    finally:
        bench.device.close()
    bounds = [bound_of(timeline.of_iteration(iteration)) for iteration in timeline.iterations()]
    benchmark.extra_info["ratio"] = round(median(bound.ratio for bound in bounds), 3)
    benchmark.extra_info["bound_ms"] = round(median(bound.bound_ms for bound in bounds), 2)
    benchmark.extra_info["unaccounted_ms"] = round(median(bound.unaccounted_ms for bound in bounds), 2)
    for part in sorted(bounds[0].parts_ms):
        benchmark.extra_info[f"{part} ms"] = round(median(bound.parts_ms.get(part, 0.0) for bound in bounds), 2)
    actual_ms = median(bound.actual_ms for bound in bounds)
    benchmark.extra_info["timeline_off_ratio"] = round(benchmark.stats["median"] * 1e3 / actual_ms, 3)
