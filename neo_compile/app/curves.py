"""Draws the reports of `neo bench` and `neo simulate`. matplotlib is needed (extra `demo`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from neo_compile.errors import ConfigError, NeoError

Document = dict[str, Any]
Row = dict[str, Any]
COLOURS = ("#4878a8", "#d98b3a", "#7cb26a", "#9a6fb0", "#c94f4f", "#777777", "#3aa6a6")
PUBLISHED = {"linestyle": "none", "marker": "x", "markersize": 8}


def draw(document: Document, target: Path) -> None:
    """Write the PNG of a report. Raises NeoError without matplotlib or rows."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NeoError("drawing needs matplotlib: pip install matplotlib") from error
    if not document.get("rows"):
        raise ConfigError("the report has no rows to draw")
    panels = DRAWERS[document["benchmark"]](document)
    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(6 * num_columns, 4.5 * num_rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel(axes)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(target)


Panel = Callable[[Any], None]


def _by(rows: Sequence[Row], field: str) -> dict[Any, list[Row]]:
    """Rows by a field's value, in the order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[field], []).append(row)
    return groups


def _plot_curve(axes: Any, rows: Sequence[Row], x: str, y: str, label: str, colour: str, published: str = "") -> None:
    """A policy's curve, and the published values as crosses of its colour."""
    ordered = sorted(rows, key=lambda row: float(row[x]))
    axes.plot([row[x] for row in ordered], [row[y] for row in ordered], "o-", color=colour, label=label, markersize=4)
    known = [row for row in ordered if row.get(published) is not None]
    if known:
        values = [row[published] for row in known]
        axes.plot([row[x] for row in known], values, color=colour, label=f"{label}, published", **PUBLISHED)


def _latency_panels(document: Document) -> list[Panel]:
    """Median seconds per token by request rate, and the limit of --bisect."""
    limit = document["unloaded_seconds_per_token"] * document["config"]["max_slowdown"]

    def panel(axes: Any) -> None:
        for colour, (policy, rows) in zip(COLOURS, _by(document["rows"], "policy").items(), strict=False):
            _plot_curve(axes, rows, "request_rate", "median_seconds_per_token", policy, colour)
        axes.axhline(limit, color="#777777", linestyle=":", linewidth=1)
        text = f"{document['config']['max_slowdown']:g} x unloaded"
        axes.text(0, limit, text, color="#777777", fontsize=8, va="bottom", transform=axes.get_yaxis_transform())
        axes.set_ylim(0, 4 * limit)
        axes.set_xlim(0)
        axes.set(xlabel="requests a second", ylabel="median seconds per token", title="load and latency")
        axes.legend(frameon=False)

    return [panel]


def _throughput_panels(document: Document) -> list[Panel]:
    """Median tokens a second, with every run as a dot."""

    def panel(axes: Any) -> None:
        policies = _by(document["rows"], "policy")
        for index, (policy, rows) in enumerate(policies.items()):
            values = [row["output_throughput"] for row in rows]
            colour = COLOURS[1] if policy == "neo" else COLOURS[0]
            axes.barh(index, median(values), color=colour, height=0.6)
            axes.plot(values, [index] * len(values), ".", color="#333333", markersize=4)
        axes.set_yticks(range(len(policies)), list(policies))
        axes.invert_yaxis()
        axes.set(xlabel="output tokens a second", title="throughput")

    return [panel]


def _sweep_panels(document: Document) -> list[Panel]:
    """One panel per device cache: gain by output length, a curve per prompt length, with 95 % bounds."""

    def make(device_tokens: int, rows: list[Row]) -> Panel:
        def panel(axes: Any) -> None:
            for colour, (prompt, own) in zip(COLOURS, sorted(_by(rows, "input_len").items()), strict=False):
                own = sorted(own, key=lambda row: int(row["output_len"]))
                x, y = [row["output_len"] for row in own], [row["gain"] for row in own]
                below = [row["gain"] - row["low"] for row in own]
                above = [row["high"] - row["gain"] for row in own]
                axes.errorbar(x, y, (below, above), fmt="o-", color=colour, capsize=3, label=f"prompt {prompt}")
            _finish_gains(axes, f"{device_tokens} device tokens", "output tokens")

        return panel

    return [make(tokens, rows) for tokens, rows in sorted(_by(document["rows"], "device_tokens").items())]


def _finish_gains(axes: Any, title: str, xlabel: str) -> None:
    axes.axhline(1, color="#777777", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set(xlabel=xlabel, ylabel="throughput over device-only", title=title)
    axes.legend(frameon=False, fontsize=8)


def _simulate_panels(document: Document) -> list[Panel]:
    """A panel per set-up of each figure, or bars of a single load."""
    if "figure" not in document["rows"][0]:
        return _throughput_panels(document)
    return [
        _simulated_latency(setup, own) if figure == "load-latency" else _simulated_gain(figure, setup, own)
        for figure, rows in _by(document["rows"], "figure").items()
        for setup, own in _by(rows, "setup").items()
    ]


def _simulated_latency(setup: str, rows: list[Row]) -> Panel:
    def panel(axes: Any) -> None:
        curves = [row for row in rows if "x" in row]
        for colour, (policy, own) in zip(COLOURS, _by(curves, "policy").items(), strict=False):
            _plot_curve(axes, own, "x", "seconds_per_token", policy, colour, "published_seconds_per_token")
        axes.set(xlabel="requests a second", ylabel="seconds per token", title=f"load-latency, {setup} (simulated)")
        axes.set_ylim(0)
        axes.legend(frameon=False, fontsize=8)

    return panel


def _simulated_gain(figure: str, setup: str, rows: list[Row]) -> Panel:
    def panel(axes: Any) -> None:
        for colour, (policy, own) in zip(COLOURS, _by(rows, "policy").items(), strict=False):
            _plot_curve(axes, own, "x", "gain", policy, colour, "published_gain")
        xlabel = "device tokens" if figure == "kv-budget" else "output tokens"
        _finish_gains(axes, f"{figure}, {setup} (simulated)", xlabel)

    return panel


DRAWERS: dict[str, Callable[[Document], list[Panel]]] = {
    "latency": _latency_panels,
    "throughput": _throughput_panels,
    "rival": _throughput_panels,
    "sweep": _sweep_panels,
    "simulate": _simulate_panels,
}
