"""Draws one iteration: who computed what when, and who waited.

    device | linear b0 | attention b0 | linear b1 | wait | ...
    host   |        attention b1           | attention b0  | ...

The upper part shows the whole iteration, the lower one a few layers of it. matplotlib is needed (extra `demo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neo_compile.errors import NeoError
from neo_compile.runtime.timeline import Timeline, TimelineEvent

COLOURS = {
    "linear": "#4878a8",
    "device attention": "#7cb26a",
    "host attention": "#d98b3a",
    "swap": "#9a6fb0",
    "staging": "#c8a2d6",
    "wait": "#c94f4f",
    "other": "#999999",
}
ZOOM_LAYERS = 4


def is_pipelined(events: Sequence[TimelineEvent]) -> bool:
    """Whether two sub-batches took turns: events of both b0 and b1."""
    return any(e.name.endswith(" b0") for e in events) and any(e.name.endswith(" b1") for e in events)


def choose_iteration(timeline: Timeline) -> int | None:
    """The iteration to show: the one with the largest share of host attention, pipelined if there are such.

    None if no iteration had host attention.
    """
    shares: dict[int, tuple[bool, float]] = {}
    for iteration in timeline.iterations():
        events = timeline.of_iteration(iteration)
        busy_ns = _busy_ns(events, "host attention")
        if busy_ns:
            shares[iteration] = (is_pipelined(events), busy_ns / _length_ns(events))
    return max(shares, key=shares.__getitem__, default=None)


def describe(events: Sequence[TimelineEvent]) -> str:
    """One sentence: the iteration's length, what the host computed, and how much of that the device waited for."""
    total = _length_ns(events) / 1e6
    host, waited = _busy_ns(events, "host attention") / 1e6, _busy_ns(events, "wait") / 1e6
    kind = "a pipelined" if is_pipelined(events) else "an unsplit"
    return (
        f"{kind} iteration of {total:.1f} ms, with {host:.1f} ms of host attention, "
        f"for which the device waited {waited:.1f} ms"
    )


def plot_iteration(events: Sequence[TimelineEvent], path: str | Path, *, title: str) -> None:
    """Write a PNG of one iteration's events. Raises NeoError without matplotlib or without events."""
    if not events:
        raise NeoError("no events to draw: the timeline recorded no iteration")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NeoError("drawing a timeline needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(14, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    whole, zoomed = figure.subplots(2, 1)
    _draw(whole, events, (min(e.start_ns for e in events), max(e.end_ns for e in events)))
    whole.set_title(title, fontsize=11)
    _draw(zoomed, events, _zoom_range(events), min_label_share=0.03)
    zoomed.set_title(f"{ZOOM_LAYERS} layers from the middle (layer, sub-batch; b1 is lighter)", fontsize=10)
    zoomed.set_xlabel("ms since the iteration began")
    _add_legend(figure, events)
    figure.savefig(path)


def _length_ns(events: Sequence[TimelineEvent]) -> int:
    return max(e.end_ns for e in events) - min(e.start_ns for e in events)


def _busy_ns(events: Sequence[TimelineEvent], category: str) -> int:
    return sum(e.end_ns - e.start_ns for e in events if e.category == category)


def _draw(axes: Any, events: Sequence[TimelineEvent], span_ns: tuple[int, int], min_label_share: float = 1.0) -> None:
    """One row per lane, the device on top, from span_ns[0] to span_ns[1]; the time axis counts from the first event.

    Events that fill at least `min_label_share` of the axis get a label.
    """
    origin_ns, (start_ns, end_ns) = min(e.start_ns for e in events), span_ns
    lanes = sorted({e.lane for e in events}, key=lambda lane: (lane != "device", lane), reverse=True)
    for event in events:
        if event.end_ns <= start_ns or event.start_ns >= end_ns:
            continue
        row, length_ns = lanes.index(event.lane), event.end_ns - event.start_ns
        left_ms, length_ms = (event.start_ns - origin_ns) / 1e6, length_ns / 1e6
        axes.barh(
            row,
            length_ms,
            left=left_ms,
            height=0.7,
            color=COLOURS.get(event.category, COLOURS["other"]),
            alpha=0.55 if event.name.endswith(" b1") else 1.0,
        )
        if length_ns >= min_label_share * (end_ns - start_ns):
            label = event.name.removeprefix(event.category).strip()
            axes.text(left_ms + length_ms / 2, row, label, ha="center", va="center", fontsize=8, clip_on=True)
    axes.set_xlim((start_ns - origin_ns) / 1e6, (end_ns - origin_ns) / 1e6)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.spines[["top", "right"]].set_visible(False)


def _zoom_range(events: Sequence[TimelineEvent]) -> tuple[int, int]:
    """Start and end of ZOOM_LAYERS consecutive linear stages of sub-batch 0 around the middle, ns."""
    linear = sorted((e for e in events if e.category == "linear" and e.name.endswith(" b0")), key=lambda e: e.start_ns)
    if len(linear) <= ZOOM_LAYERS:
        return min(e.start_ns for e in events), max(e.end_ns for e in events)
    first = (len(linear) - ZOOM_LAYERS) // 2
    return linear[first].start_ns, linear[first + ZOOM_LAYERS].start_ns


def _add_legend(figure: Any, events: Sequence[TimelineEvent]) -> None:
    from matplotlib.patches import Patch

    present = {e.category for e in events}
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
