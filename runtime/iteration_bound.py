"""How close an iteration came to the formula: each part as measured, overlapped as the paper's max() says.

Of a pipelined iteration with L attention sites (paper, section 3.2; l: linear stage, ga / ca: device / host attention,
0 / 1: sub-batch, i: site):

    device |  l0_0, ga0_0  | l1_0, ga1_0 | l0_1, ga0_1 | l1_1 ...  l0_L | l1_L
    host   |               |    ca0_0    |    ca1_0    |  ca0_1 ...

    bound = l0_0 + sum over i of  max(ga0_i + l1_i, ca0_i) + max(ga1_i + l0_(i+1), ca1_i)  + l1_L

The first linear stage of batch-0 and the last one of batch-1 have nothing beside them. A single sub-batch overlaps
device and host attention of the same site only: bound = l_0 + sum of max(ga_i, ca_i) + l_(i+1).

What lies above the bound is Python between the parts, hand-overs between threads, building the batch, and waits that
the order of the parts explains (a long ca0 beside a short one): the executor's own cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from neo_compile.runtime.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class IterationBound:
    """Milliseconds of one iteration.

    Attributes:
        actual_ms: from the first event to the last.
        bound_ms: the formula's time with the parts as they were measured.
        parts_ms: sum of the parts by category, waits included.
        unaccounted_ms: time of the launching thread outside every recorded event.
    """

    actual_ms: float
    bound_ms: float
    parts_ms: dict[str, float]
    unaccounted_ms: float

    @property
    def ratio(self) -> float:
        """Actual time over the bound; 1 is perfect."""
        return self.actual_ms / self.bound_ms


def bound_of(events: Sequence[TimelineEvent]) -> IterationBound:
    """The bound of one iteration from its events (`Timeline.of_iteration`).

    Raises:
        ValueError: no linear stage was recorded.
    """
    parts = _Parts(events)
    if not parts.num_stages:
        raise ValueError("the iteration has no linear stages: it computed no tokens")
    launching = [event for event in events if event.lane == "device"]
    sums: dict[str, int] = defaultdict(int)
    for event in events:
        sums[event.category] += event.end_ns - event.start_ns
    actual_ns = max(event.end_ns for event in events) - min(event.start_ns for event in events)
    busy_ns = sum(event.end_ns - event.start_ns for event in launching)
    return IterationBound(
        actual_ms=actual_ns / 1e6,
        bound_ms=parts.bound_ns() / 1e6,
        parts_ms={category: total_ns / 1e6 for category, total_ns in sums.items()},
        unaccounted_ms=(actual_ns - busy_ns) / 1e6,
    )


class _Parts:
    """Nanoseconds by (category, layer, sub-batch); 0 for what did not happen."""

    def __init__(self, events: Sequence[TimelineEvent]) -> None:
        self._ns: dict[tuple[str, int, int], int] = defaultdict(int)
        for event in events:
            if event.layer is not None and event.sub_batch is not None:
                self._ns[event.category, event.layer, event.sub_batch] += event.end_ns - event.start_ns
        linear = [(layer, sub_batch) for category, layer, sub_batch in self._ns if category == "linear"]
        self.num_stages = max((layer for layer, _ in linear), default=-1) + 1
        self.num_sub_batches = max((sub_batch for _, sub_batch in linear), default=-1) + 1

    def bound_ns(self) -> int:
        """See the module's docstring."""
        last = self.num_stages - 1
        if self.num_sub_batches == 1:
            sites = sum(max(self._device(site, 0), self._host(site, 0)) for site in range(last))
            return sites + sum(self._linear(stage, 0) for stage in range(self.num_stages))
        total = self._linear(0, 0) + self._linear(last, 1)
        for site in range(last):
            total += max(self._device(site, 0) + self._linear(site, 1), self._host(site, 0))
            total += max(self._device(site, 1) + self._linear(site + 1, 0), self._host(site, 1))
        return total

    def _linear(self, stage: int, sub_batch: int) -> int:
        return self._ns.get(("linear", stage, sub_batch), 0)

    def _device(self, site: int, sub_batch: int) -> int:
        return self._ns.get(("device attention", site, sub_batch), 0)

    def _host(self, site: int, sub_batch: int) -> int:
        return self._ns.get(("host attention", site, sub_batch), 0)
