"""One run of `neo bench kernel`: per case, make the arena, open and check every implementation, measure in turns."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from neo_compile.app.bench import peers
from neo_compile.app.bench.bandwidth import BandwidthMeter
from neo_compile.app.bench.cases import TOLERANCE, KernelCase, KVArena, relative_error
from neo_compile.app.bench.kernel_options import Settings
from neo_compile.app.bench.measure import Turn, bandwidth_share, measure_in_turns, median_us
from neo_compile.app.bench.peers import Runner, UnavailableError
from neo_compile.app.progress import StatusLine
from neo_compile.host_attention import WorkerPool

FLEX_REASON = "left out by --quick: it compiles for half a minute (--impl flex asks for it)"


class WrongResultError(Exception):
    """An implementation differs from the reference by more than rounding; the message says by how much."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. gbps counts the bytes of keys and values only; bandwidth_share: see `measure.py`."""

    impl: str
    dtype: str
    batch: int
    context_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    median_us: float
    gbps: float
    bandwidth_share: float


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """One measurement that is missing, and why. `is_wrong`: it ran, and its result was not right."""

    impl: str
    case: KernelCase
    reason: str
    is_wrong: bool = False


def open_checked(name: str, arena: KVArena, num_threads: int) -> Runner:
    """A runner whose results on the first and last slot are right. Raises UnavailableError, WrongResultError."""
    runner = peers.open_runner(name, arena, num_threads)
    try:
        check(runner, arena)
    except BaseException:
        runner.close()
        raise
    return runner


def check(runner: Runner, arena: KVArena) -> None:
    """Compare with `reference.py`. Raises WrongResultError."""
    limit = TOLERANCE[arena.case.torch_dtype]
    for slot in sorted({0, arena.num_slots - 1}):
        error = relative_error(runner(slot), arena.expected(runner.layout, slot))
        if not error <= limit:
            raise WrongResultError(f"wrong result: off by {error:.2g} of the largest value (at most {limit:.2g})")


class KernelBench:
    """Runs the cases one after the other and collects rows."""

    def __init__(self, settings: Settings, status: StatusLine) -> None:
        self.settings = settings
        self.skipped: list[Skipped] = []
        self.load_average = os.getloadavg()[0]  # of the last minute, before this run adds to it
        self._status = status
        self._measured: list[tuple[str, KernelCase, list[Turn]]] = []
        self._pool = WorkerPool(settings.threads - 1, participate=True)
        self.bandwidth = BandwidthMeter(self._pool, 2 * settings.arena_bytes)

    def run(self) -> None:
        """Measure everything."""
        for number, case in enumerate(self.settings.cases, 1):
            self._status.announce(f"case {number} of {len(self.settings.cases)}: {case}")
            self._run_case(case)
        if not self._measured:
            self.bandwidth.measure(passes=1)

    def _run_case(self, case: KernelCase) -> None:
        arena = KVArena(case, self.settings.arena_bytes)
        with ExitStack() as stack:
            runners: dict[str, Runner] = {}
            for name in self.settings.impls:
                self._status.update(f"{case}: preparing {name}")
                try:
                    if name == "flex" and self.settings.skip_flex:
                        raise UnavailableError(FLEX_REASON)
                    runner = open_checked(name, arena, self.settings.threads)
                except (UnavailableError, WrongResultError) as error:
                    is_wrong = isinstance(error, WrongResultError)
                    self.skipped.append(Skipped(impl=name, case=case, reason=str(error), is_wrong=is_wrong))
                    continue
                stack.callback(runner.close)
                runners[name] = runner
            self._status.update(f"{case}: measuring {', '.join(runners)}")
            turns = measure_in_turns(runners, arena.num_slots, self.settings.effort, self.bandwidth.read)
            self._measured += [(name, case, taken) for name, taken in turns.items()]

    @property
    def rows(self) -> list[Row]:
        """What was measured, by case and in the order of the implementations."""
        rows = []
        for impl, case, turns in self._measured:
            time_us = median_us(turns)
            rows.append(
                Row(
                    impl=impl,
                    dtype=case.dtype,
                    batch=case.batch,
                    context_len=case.context_len,
                    num_q_heads=case.num_q_heads,
                    num_kv_heads=case.num_kv_heads,
                    head_dim=case.head_dim,
                    median_us=time_us,
                    gbps=round(case.gbps(time_us), 3),
                    bandwidth_share=round(bandwidth_share(turns, case.kv_bytes), 4),
                )
            )
        return rows

    @property
    def is_any_wrong(self) -> bool:
        """Did an implementation compute something wrong?"""
        return any(skipped.is_wrong for skipped in self.skipped)

    def __enter__(self) -> KernelBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()
