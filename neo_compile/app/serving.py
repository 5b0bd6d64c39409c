"""Serve a fixed set of prompts with an Engine and measure the whole run: the commands' common loop."""

from __future__ import annotations

import time
from collections import deque
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
    """Outputs in the prompts' order, the wall time of the whole run, and what the engine's counters rose by.

    `arrivals_s` and `token_times_s` (when each output token was there) are seconds since the run began.
    """

    outputs: list[RequestOutput]
    seconds: float
    counters: dict[str, int]
    strategies: dict[str, int]
    """Iterations by strategy."""
    arrivals_s: list[float]
    token_times_s: list[list[float]]

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
    arrivals_s: Sequence[float] | None = None,
    on_output: Callable[[int, RequestOutput], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ServedRun:
    """Serve all `prompts` (token ids) to the end.

    Args:
        params: the same for all, or one each; `n` must be 1.
        arrivals_s: when each is there, ascending; all at once if not given.
        on_output: called with the prompt's index and its cumulative output, whenever it changed.
        on_progress: called after every iteration.

    Raises:
        CapacityError, ConfigError: a prompt was refused; nothing is left in the engine.
    """
    from neo_compile.runtime.prompts import as_params_list  # loads torch, which `neo --help` does not wait for

    before = engine.stats()
    load = _Load(engine, prompts, as_params_list(params, len(prompts)), arrivals_s or [0.0] * len(prompts))
    try:
        load.run(on_output, on_progress)
    except BaseException:
        load.abort()
        raise
    seconds = time.perf_counter() - load.start
    after = engine.stats()
    counters = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
    strategies = {
        name: count - before.iterations_by_strategy.get(name, 0) for name, count in after.iterations_by_strategy.items()
    }
    outputs = [load.latest[index] for index in range(len(prompts))]
    return ServedRun(outputs, seconds, counters, strategies, list(load.arrivals_s), load.token_times_s)


class _Load:
    """Prompts on their way through an engine."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        arrivals_s: Sequence[float],
    ) -> None:
        self.engine = engine
        self.arrivals_s = arrivals_s
        self.start = time.perf_counter()
        self.latest: dict[int, RequestOutput] = {}
        self.token_times_s: list[list[float]] = [[] for _ in prompts]
        self._pending = deque(enumerate(zip(prompts, params, arrivals_s, strict=True)))
        self._num_requests = len(prompts)
        self._num_finished = 0
        self._index_of: dict[str, int] = {}

    def run(
        self,
        on_output: Callable[[int, RequestOutput], None] | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        while self._num_finished < self._num_requests:
            self._add_arrived()
            if not self.engine.has_unfinished:
                time.sleep(max(0.0, self._pending[0][1][2] - self._elapsed_s()))
                continue
            for output in self.engine.step():
                self._take(output, on_output)
            if on_progress is not None:
                num_tokens = sum(len(output.token_ids) for output in self.latest.values())
                on_progress(Progress(self._num_finished, self._num_requests, num_tokens, self._elapsed_s()))

    def abort(self) -> None:
        """Leave nothing in the engine."""
        for request_id in self._index_of:
            self.engine.abort(request_id)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def _add_arrived(self) -> None:
        now = self._elapsed_s()
        while self._pending and self._pending[0][1][2] <= now:
            index, (prompt, params, _) = self._pending.popleft()
            self._index_of[self.engine.add_request(list(prompt), params)] = index

    def _take(self, output: RequestOutput, on_output: Callable[[int, RequestOutput], None] | None) -> None:
        index = self._index_of[output.request_id]
        times = self.token_times_s[index]
        times += [self._elapsed_s()] * (len(output.token_ids) - len(times))
        self.latest[index] = output
        self._num_finished += output.is_finished
        if on_output is not None:
            on_output(index, output)
