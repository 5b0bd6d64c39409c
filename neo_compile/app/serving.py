"""Serve a fixed set of prompts with an Engine and measure the whole run: the commands' common loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neo_compile.runtime.outputs import RequestOutput
from neo_compile.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from neo_compile.runtime.engine import Engine

COUNTERS = ("num_iterations", "num_swap_outs", "num_swap_ins", "num_preemptions", "num_host_requests")


@dataclass(frozen=True)
class Progress:
    """Where a run stands after an iteration."""

    num_finished: int
    num_requests: int
    num_output_tokens: int
    seconds: float

    def __str__(self) -> str:
        rate = self.num_output_tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.num_finished}/{self.num_requests} answers, {self.num_output_tokens} tokens, "
            f"{rate:.1f} tokens/s, {self.seconds:.0f} s"
        )


@dataclass(frozen=True)
class ServedRun:
    """Outputs in the prompts' order, the wall time of the whole run, and what the engine's counters rose by."""

    outputs: list[RequestOutput]
    seconds: float
    counters: dict[str, int]
    strategies: dict[str, int]
    """Iterations by strategy."""

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of the whole run, prefills included in the time."""
        return self.num_output_tokens / self.seconds

    @property
    def mean_latency_s(self) -> float:
        """Mean time from a request's arrival to its end; all arrive at the start."""
        latencies = [
            output.metrics.finish_time - output.metrics.arrival_time
            for output in self.outputs
            if output.metrics.finish_time is not None
        ]
        return sum(latencies) / len(latencies) if latencies else 0.0


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    on_output: Callable[[int, RequestOutput], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ServedRun:
    """Serve all `prompts` (token ids) at once.

    Args:
        params: the same for all, or one each; `n` must be 1.
        on_output: called with the prompt's index and its cumulative output, whenever it changed.
        on_progress: called after every iteration.

    Raises:
        CapacityError, ConfigError: a prompt was refused; nothing is left in the engine.
    """
    from neo_compile.runtime.prompts import as_params_list  # loads torch, which `neo --help` does not wait for

    before = engine.stats()
    start = time.perf_counter()
    index_of: dict[str, int] = {}
    try:
        for index, (prompt, own_params) in enumerate(zip(prompts, as_params_list(params, len(prompts)), strict=True)):
            index_of[engine.add_request(list(prompt), own_params)] = index
        latest = _run_to_the_end(engine, index_of, start, on_output, on_progress)
    except BaseException:
        for request_id in index_of:
            engine.abort(request_id)
        raise
    seconds = time.perf_counter() - start
    after = engine.stats()
    counters = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
    strategies = {
        name: count - before.iterations_by_strategy.get(name, 0) for name, count in after.iterations_by_strategy.items()
    }
    return ServedRun([latest[index] for index in range(len(prompts))], seconds, counters, strategies)


def _run_to_the_end(
    engine: Engine,
    index_of: dict[str, int],
    start: float,
    on_output: Callable[[int, RequestOutput], None] | None,
    on_progress: Callable[[Progress], None] | None,
) -> dict[int, RequestOutput]:
    latest: dict[int, RequestOutput] = {}
    while sum(output.is_finished for output in latest.values()) < len(index_of):
        for output in engine.step():
            index = index_of[output.request_id]
            latest[index] = output
            if on_output is not None:
                on_output(index, output)
        if on_progress is not None:
            on_progress(
                Progress(
                    num_finished=sum(output.is_finished for output in latest.values()),
                    num_requests=len(index_of),
                    num_output_tokens=sum(len(output.token_ids) for output in latest.values()),
                    seconds=time.perf_counter() - start,
                )
            )
    return latest
