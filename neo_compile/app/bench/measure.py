"""Times of several implementations of one thing, in turns, so that they can be compared on a machine with other work.

    round 1                                round 2
    | r a a A A A | r b b B B B | r c ...  | r a a A A A | r b ...       small letters: not timed as calls

A turn begins with a look at the memory's read bandwidth (r), as a machine with neighbours has quick and slow seconds.
Then come untimed calls until `settle_s` has passed: the threads of the implementation before it spin for a moment after
their last call. Then it is timed, call by call, without pauses. Times are medians over the calls of all rounds, shares
of the bandwidth are medians over the rounds.
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


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One implementation's calls in one round.

    Attributes:
        read_gbps: the sequential read's rate just before them, by the number of streams a thread.
        times_us: of every timed call.
    """

    read_gbps: dict[int, float]
    times_us: list[float]


def measure_in_turns(
    calls: Mapping[str, Callable[[int], object]],
    num_slots: int,
    effort: Effort,
    read_gbps: Callable[[], dict[int, float]],
) -> dict[str, list[Turn]]:
    """The turns of each implementation, by name. A call gets the slot to work on, one after the other."""
    turns: dict[str, list[Turn]] = {name: [] for name in calls}
    slots = count()
    for _ in range(effort.rounds):
        for name, call in calls.items():
            turn = Turn(read_gbps=read_gbps(), times_us=[])
            turns[name].append(turn)
            settled = time.perf_counter() + effort.settle_s
            call(next(slots) % num_slots)
            while time.perf_counter() < settled:
                call(next(slots) % num_slots)
            end = time.perf_counter() + effort.turn_s
            while len(turn.times_us) < effort.min_calls or time.perf_counter() < end:
                slot = next(slots) % num_slots
                start = time.perf_counter_ns()
                call(slot)
                turn.times_us.append((time.perf_counter_ns() - start) / 1e3)
    return turns


def median_us(turns: list[Turn]) -> float:
    """Of all calls, to a hundredth of a microsecond."""
    return round(statistics.median(time_us for turn in turns for time_us in turn.times_us), 2)


def bandwidth_share(turns: list[Turn], num_bytes: int) -> float:
    """The share of the sequential read's rate that calls reach which read `num_bytes`.

    Of a turn: the rate of its median call over its own read. The median over the turns counts, for the number of
    streams that reads fastest, and so gives the smallest share.
    """
    rates = [num_bytes / statistics.median(turn.times_us) / 1e3 for turn in turns]
    return min(
        statistics.median(rate / turn.read_gbps[streams] for rate, turn in zip(rates, turns, strict=True))
        for streams in turns[0].read_gbps
    )
