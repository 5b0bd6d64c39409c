"""Times of several implementations of one thing, in turns, so that they can be compared on a machine with other work.

    round 1                          round 2
    | A a A A A | B b B B B | C ...  | A a A A A | B ...       small letters: untimed

A turn begins with untimed calls until `settle_s` has passed: the threads of the implementation before it spin for a
moment after their last call. Then it is timed, call by call, without pauses. Medians are over the calls of all rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure: rounds, and seconds of each turn (at least `min_calls` timed calls)."""

    rounds: int
    settle_s: float
    turn_s: float
    min_calls: int = 3


FULL_EFFORT = Effort(rounds=7, settle_s=0.05, turn_s=0.1)
QUICK_EFFORT = Effort(rounds=3, settle_s=0.01, turn_s=0.02)


def measure_in_turns(
    calls: Mapping[str, Callable[[int], object]], num_slots: int, effort: Effort
) -> dict[str, list[float]]:
    """Microseconds of every timed call, by name. A call gets the slot to work on, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    slots = count()
    for _ in range(effort.rounds):
        for name, call in calls.items():
            settled = time.perf_counter() + effort.settle_s
            call(next(slots) % num_slots)
            while time.perf_counter() < settled:
                call(next(slots) % num_slots)
            end = time.perf_counter() + effort.turn_s
            taken = times[name]
            num_before = len(taken)
            while len(taken) - num_before < effort.min_calls or time.perf_counter() < end:
                slot = next(slots) % num_slots
                start = time.perf_counter_ns()
                call(slot)
                taken.append((time.perf_counter_ns() - start) / 1e3)
    return times


def median(times_us: list[float]) -> float:
    """Of the calls' microseconds, to a hundredth."""
    return round(statistics.median(times_us), 2)
