"""`neo plot`: pictures of what benchmarks wrote. `app/timeline_plot.py` draws iterations, `app/curves.py` the rest."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from neo_compile.errors import ConfigError

DESCRIPTION = """\
Draw a JSON file as a PNG: load-latency curves of `neo bench latency`, bars of `neo bench throughput`, gains of `neo
bench sweep`, figures of `neo simulate` beside the published values, or one iteration of a timeline (`neo bench
throughput --timeline`, `neo demo`). Needs matplotlib."""


def add_parser(subparsers: Any) -> None:
    """Add the command to the `neo` command line."""
    parser = subparsers.add_parser("plot", help="draw a benchmark's JSON file", description=DESCRIPTION)
    parser.add_argument("file", help="what a benchmark's --json, or --timeline, wrote")
    parser.add_argument("-o", "--output", metavar="FILE", help="the picture (default: FILE with .png)")
    parser.add_argument("--iteration", type=int, metavar="N", help="of a timeline (default: the one with most overlap)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    from neo_compile.app.curves import DRAWERS, draw

    source = Path(args.file)
    document = _read(source)
    target = Path(args.output) if args.output else source.with_suffix(".png")
    if target == source:
        raise ConfigError(f"{source} is the file to draw: give -o another one")
    if "traceEvents" in document:
        _draw_timeline(document, target, args.iteration)
    elif document.get("benchmark") in DRAWERS:
        draw(document, target)
    else:
        raise ConfigError(f"{source}: neither a timeline nor written by neo simulate or neo bench {_names(DRAWERS)}")
    print(target)
    return 0


def _names(drawers: dict[str, Any]) -> str:
    return ", ".join(name for name in drawers if name != "simulate")


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no report: it must be a JSON object")
    return document


def _draw_timeline(document: dict[str, Any], target: Path, iteration: int | None) -> None:
    from neo_compile.app.timeline_plot import choose_iteration, describe, plot_iteration
    from neo_compile.runtime.timeline import Timeline

    timeline = Timeline.from_chrome_trace(document)
    if iteration is None:
        iteration = choose_iteration(timeline)
        if iteration is None:
            raise ConfigError("no iteration had host attention: choose one with --iteration")
    events = timeline.of_iteration(iteration)
    if not events:
        raise ConfigError(f"--iteration {iteration} is not in the timeline ({_range(timeline.iterations())})")
    plot_iteration(events, target, title=f"iteration {iteration}: {describe(events)}")


def _range(iterations: list[int]) -> str:
    return f"{iterations[0]} to {iterations[-1]}" if iterations else "it is empty"
