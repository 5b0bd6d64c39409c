"""The highest request rate at which a latency stays within its limit, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from neo_compile.errors import NeoError

_MAX_BRACKETING = 12  # doublings or halvings: a factor of 4096


@dataclass
class RateSearch:
    """What was found.

    Attributes:
        rate: the highest rate that was measured within the limit.
        measured: latency by rate, in the order of measuring.
    """

    rate: float = 0.0
    measured: dict[float, float] = field(default_factory=dict)


def find_highest_rate(
    measure: Callable[[float], float], limit: float, start_rate: float, tolerance: float = 0.05
) -> RateSearch:
    """Doubles or halves `start_rate` until one rate is within the limit and one beyond, then bisects.

    Args:
        measure: latency at a rate; rising with it, but for noise.
        limit: the highest latency allowed.
        tolerance: stop when the rate beyond the limit is at most this share above the one within.

    Raises:
        NeoError: no rate within a factor of 4096 is on the other side of the limit.
    """
    search = RateSearch()

    def is_within(rate: float) -> bool:
        search.measured[rate] = measure(rate)
        return search.measured[rate] <= limit

    within = is_within(start_rate)
    low = high = start_rate
    for _ in range(_MAX_BRACKETING):
        if within:
            low, high = high, 2 * high
            if not is_within(high):
                break
        else:
            low, high = low / 2, low
            if is_within(low):
                break
    else:
        side = "below" if within else "above"
        raise NeoError(f"the latency stays {side} {limit:.4g} from {start_rate:.4g} to {high if within else low:.4g}/s")
    while high > low * (1 + tolerance):
        middle = (low * high) ** 0.5
        if is_within(middle):
            low = middle
        else:
            high = middle
    search.rate = low
    return search
