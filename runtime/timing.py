"""How the profiler takes times: what repeats, what counts, what is smoothed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

_LONG_MS = 200.0  # work that takes longer is not repeated beyond the least
_MIN_REPEATS = 3


def typical_ms(run: Callable[..., Any], num_repeats: int, setup: Callable[[], Any] | None = None) -> float:
    """What `run` takes after one run to warm up: by its ticket if it returns one, else by this thread's clock.

    `setup` makes each run's argument outside the timing. Other processes only ever add time, so it is the lower
    quartile of a few runs, fewer where each is long.
    """
    times: list[float] = []
    while len(times) <= num_repeats:
        arguments = () if setup is None else (setup(),)
        start_ns = time.perf_counter_ns()
        ticket = run(*arguments)
        end_ns = time.perf_counter_ns()
        if ticket is not None and hasattr(ticket, "end_ns"):
            start_ns, end_ns = ticket.start_ns, ticket.end_ns
        times.append((end_ns - start_ns) / 1e6)
        if times[-1] > _LONG_MS and len(times) > _MIN_REPEATS:
            break
    return lower_quartile(times[1:])


def lower_quartile(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]


def increasing(times: list[float]) -> list[float]:
    """Times of growing amounts of work, none above a later one: noise only adds time, so the later one is right."""
    return [float(time_ms) for time_ms in np.minimum.accumulate(np.array(times)[::-1])[::-1]]
