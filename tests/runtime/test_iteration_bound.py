"""The formula on hand-made timelines."""

from __future__ import annotations

import pytest

from neo_compile.runtime.iteration_bound import bound_of
from neo_compile.runtime.timeline import Timeline

MS = 1_000_000


class Drawing:
    """A timeline drawn event by event; each lane's events follow each other unless a start is given. Times in ms."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._ends = {"device": 0, "host": 0}

    def add(self, lane: str, category: str, length: int, layer=None, sub_batch=None, start=None) -> None:
        begin = self._ends[lane] if start is None else start
        self._ends[lane] = begin + length
        self.timeline.add(lane, category, begin * MS, self._ends[lane] * MS, 1, layer=layer, sub_batch=sub_batch)

    def bound(self):
        return bound_of(self.timeline.of_iteration(1))


def test_pipelined():
    drawing = Drawing()
    drawing.add("device", "other", 1)
    drawing.add("device", "linear", 10, 0, 0)
    drawing.add("device", "device attention", 3, 0, 0)
    drawing.add("device", "linear", 4, 0, 1)
    drawing.add("device", "wait", 2, 0, 0)
    drawing.add("device", "linear", 11, 1, 0)
    drawing.add("device", "wait", 5, 0, 1)
    drawing.add("device", "linear", 6, 1, 1)
    drawing.add("host", "host attention", 9, 0, 0, start=11)
    drawing.add("host", "host attention", 16, 0, 1, start=20)
    bound = drawing.bound()
    assert bound.bound_ms == 10 + max(3 + 4, 9) + max(0 + 11, 16) + 6
    assert bound.actual_ms == 42
    assert bound.ratio == pytest.approx(42 / 41)
    assert bound.unaccounted_ms == 0
    assert bound.parts_ms == {"other": 1, "linear": 31, "device attention": 3, "wait": 7, "host attention": 25}


def test_one_sub_batch_hides_host_attention_under_device_attention_only():
    drawing = Drawing()
    drawing.add("device", "linear", 10, 0, 0)
    drawing.add("host", "host attention", 9, 0, 0, start=10)
    drawing.add("device", "device attention", 3, 0, 0)
    drawing.add("device", "wait", 6, 0, 0)
    drawing.add("device", "linear", 10, 1, 0, start=21)
    drawing.add("device", "device attention", 4, 1, 0)
    drawing.add("device", "linear", 2, 2, 0)
    bound = drawing.bound()
    assert bound.bound_ms == 10 + 9 + 10 + 4 + 2
    assert bound.actual_ms == 37
    assert bound.unaccounted_ms == 2


def test_an_iteration_without_tokens_has_no_bound():
    drawing = Drawing()
    drawing.add("host", "swap", 5, 0)
    with pytest.raises(ValueError, match="no linear stages"):
        drawing.bound()
