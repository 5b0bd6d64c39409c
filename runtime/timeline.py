"""Records who computed what when, and who waited: the executor's evidence that device and host overlap.

    device | prepare | linear 0 b0 | device attention 0 b0 | linear 0 b1 | wait 0 b0 | ... | finish |
    host   |  swap 0, swap 1       |  host attention 0 b0  |    staging 0   | host attention 0 b1 | ...

An event costs one list append; with no timeline attached the executor takes no time stamps at all beyond those that
the online cost model needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class TimelineEvent(NamedTuple):
    """One interval on one lane.

    Attributes:
        lane: `device` (the launching thread) or `host` (the host pool).
        category: `linear`, `device attention`, `host attention`, `swap`, `staging`, `wait` or `other`.
        start_ns, end_ns: on the clock of `time.perf_counter_ns`.
        iteration: number of the engine's iteration.
        layer: linear stage or attention site; None where there is none.
        sub_batch: 0 or 1; None for what belongs to the whole iteration.
        label: what ran, where the category does not tell.
    """

    lane: str
    category: str
    start_ns: int
    end_ns: int
    iteration: int
    layer: int | None = None
    sub_batch: int | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        """What ran, e.g. `linear 3 b0`, `host attention 3 b1`, `wait 3 b0`."""
        layer = "" if self.layer is None else f" {self.layer}"
        sub_batch = "" if self.sub_batch is None else f" b{self.sub_batch}"
        return f"{self.label or self.category}{layer}{sub_batch}"


class Timeline:
    """A growing list of events."""

    def __init__(self) -> None:
        self.events: list[TimelineEvent] = []

    def add(
        self,
        lane: str,
        category: str,
        start_ns: int,
        end_ns: int,
        iteration: int,
        layer: int | None = None,
        sub_batch: int | None = None,
        label: str | None = None,
    ) -> None:
        """Append one event."""
        self.events.append(TimelineEvent(lane, category, start_ns, end_ns, iteration, layer, sub_batch, label))

    def iterations(self) -> list[int]:
        """Numbers of the recorded iterations, ascending."""
        return sorted({event.iteration for event in self.events})

    def of_iteration(self, iteration: int) -> list[TimelineEvent]:
        """The events of one iteration, by start."""
        return sorted((e for e in self.events if e.iteration == iteration), key=lambda e: e.start_ns)

    def write_chrome_trace(self, path: str | Path) -> None:
        """Write the JSON that chrome://tracing and Perfetto open (times in microseconds)."""
        Path(path).write_text(json.dumps({"traceEvents": list(_chrome_events(self.events))}))

    @classmethod
    def from_chrome_trace(cls, document: dict[str, Any]) -> Timeline:
        """What `write_chrome_trace` wrote, read back; times count from the first event."""
        lanes = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
        timeline = cls()
        for event in document["traceEvents"]:
            if event["ph"] == "X":
                start_ns, end_ns = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
                args = event["args"]
                told = TimelineEvent(
                    lanes[event["tid"]],
                    event["cat"],
                    start_ns,
                    end_ns,
                    args["iteration"],
                    args["layer"],
                    args["sub_batch"],
                    args.get("label"),
                )
                timeline.events.append(told if told.name == event["name"] else _relabelled(told, event["name"]))
        return timeline


def _relabelled(event: TimelineEvent, name: str) -> TimelineEvent:
    """`event` of a file without labels, with what is left of its name once layer and sub-batch are taken off."""
    return event._replace(label=name.removesuffix(event._replace(label="", category="").name))


def _chrome_events(events: list[TimelineEvent]) -> Iterable[dict[str, object]]:
    origin = min((event.start_ns for event in events), default=0)
    lanes = {lane: tid for tid, lane in enumerate(sorted({event.lane for event in events}))}
    for lane, tid in lanes.items():
        yield {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": lane}}
    for event in events:
        yield {
            "name": event.name,
            "cat": event.category,
            "ph": "X",
            "pid": 0,
            "tid": lanes[event.lane],
            "ts": (event.start_ns - origin) / 1e3,
            "dur": (event.end_ns - event.start_ns) / 1e3,
            "args": {
                "iteration": event.iteration,
                "layer": event.layer,
                "sub_batch": event.sub_batch,
                "label": event.label,
            },
        }
