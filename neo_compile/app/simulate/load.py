"""One load on the virtual clock, under one policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from neo_compile.app.bench.serving_metrics import RequestTimes, serving_metrics
from neo_compile.app.bench.systems import System
from neo_compile.app.bench.traces import Lengths
from neo_compile.app.simulate.setups import Machine
from neo_compile.app.simulate.virtual import VirtualEngine, VirtualRun
from neo_compile.errors import ConfigError
from neo_compile.runtime.request import Request
from neo_compile.runtime.scheduler_config import SchedulerConfig


def simulate(
    machine: Machine,
    system: System,
    lengths: Sequence[Lengths],
    arrivals_s: Sequence[float] | None = None,
    **options: Any,
) -> VirtualRun:
    """Serve requests of these lengths to the end.

    Args:
        arrivals_s: when each arrives, ascending; all at once if not given.
        options: of `SchedulerConfig`.

    Raises:
        CapacityError: a request that can never fit.
        ConfigError: `system` needs what only a real machine has.
    """
    if system.has_all_cores:
        raise ConfigError(f"{system.name!r} cannot be simulated: a simulated device has no cores to share")
    device_blocks, host_blocks = machine.device_blocks, machine.host_blocks
    if system.is_unlimited:
        device_blocks = sum(-(-sum(each) // machine.block_size) for each in lengths) + len(lengths)
    engine = VirtualEngine(
        SchedulerConfig(policy=system.policy, full_cache=system.full_cache, **options),
        machine.cost_model(),
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        block_size=machine.block_size,
    )
    requests = [Request(str(i), [0] * each.prompt_tokens, each.output_tokens) for i, each in enumerate(lengths)]
    return engine.run(requests, None if arrivals_s is None else [1e3 * seconds for seconds in arrivals_s])


def metrics_of(run: VirtualRun) -> dict[str, float]:
    """`serving_metrics` of a simulated load, and what the scheduler did."""
    times = [
        RequestTimes(
            num_prompt_tokens=request.num_prompt_tokens,
            arrival_s=run.arrivals_ms[request.request_id] / 1e3,
            token_times_s=[ms / 1e3 for ms in run.token_times_ms[request.request_id]],
        )
        for request in run.finished
    ]
    counters = {
        "num_iterations": run.num_iterations,
        "num_swaps": run.num_swaps,
        "num_preemptions": run.num_preemptions,
        **{f"num_{strategy.value}_iterations": count for strategy, count in run.iterations.items()},
    }
    return {**serving_metrics(times, run.elapsed_ms / 1e3), **counters}


def lengths_around(prompt: int, output: int, num: int, spread: float = 0.3, seed: int = 0) -> list[Lengths]:
    """Random lengths, spread evenly over mean * (1 -+ spread)."""
    generator = random.Random(seed)

    def draw(mean: int) -> int:
        return max(1, round(mean * generator.uniform(1 - spread, 1 + spread)))

    return [Lengths(draw(prompt), draw(output)) for _ in range(num)]
