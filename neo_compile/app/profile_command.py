"""`neo profile`: measures what a model's parts cost on this machine, so that the scheduler need not guess."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neo_compile.app.models import SMOLLM2
from neo_compile.app.options import (
    MODEL_HELP,
    add_dtype_option,
    add_settings_option,
    number_option,
    open_engine,
    output_file,
    parse_settings,
)
from neo_compile.checks import Numbers

BAR_WIDTH = 24
CONFIGS = ("device", "cache")  # what the costs depend on; they serve every scheduler

DESCRIPTION = """\
Measure what the parts of an iteration cost on this machine: the linear stages by tokens, logits and sampling by rows,
attention of prompts, decode attention on either side, copies between the tiers, launches. The tables are kept in the
cache directory and used by every engine with the same model, dtype and threads; without them an engine measures a
coarse version at its first start. Run it while the machine has nothing else to do."""


def add_parser(subparsers: Any) -> None:
    """Add the command to the `neo` command line."""
    parser = subparsers.add_parser(
        "profile",
        help="measure a model's costs for the scheduler, in a minute or two",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default=SMOLLM2, help=MODEL_HELP)
    add_dtype_option(parser)
    parser.add_argument("--device-threads", type=int, metavar="N", help="cores that play the device (default: half)")
    parser.add_argument("--host-threads", type=int, metavar="N", help="cores of the host side (default: the others)")
    parser.add_argument(
        "--host-slowdown",
        type=number_option(Numbers(at_least=1)),
        default=1.0,
        metavar="X",
        help="see `neo generate -h`",
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block (default: 16)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="the largest iteration")
    parser.add_argument(
        "--stages", default="inductor", choices=["inductor", "eager"], help="as the engines will have it"
    )
    add_settings_option(parser, CONFIGS)
    parser.add_argument("--force", action="store_true", help="measure again although there is a profile")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write config, machine and rows to FILE")
    # Any two tiers will do: the costs do not depend on their sizes.
    parser.set_defaults(run=run, device_tokens=256, host_tokens=256)


def run(args: argparse.Namespace) -> int:
    """The command. Returns the exit code."""
    from neo_compile.app.models import load_model, parse_dtype
    from neo_compile.app.progress import StatusLine

    parse_settings(args.set, CONFIGS)
    with StatusLine() as status:
        status.announce(f"loading {args.model}")
        model, _ = load_model(args.model, parse_dtype(args.dtype))
        status.announce("preparing the engine (compiling takes a minute or two the first time)")
        with open_engine(model, None, args) as engine:
            start = time.perf_counter()
            costs = engine.profile(
                force=args.force, on_progress=lambda share, what: status.update(progress_text(share, what))
            )
            seconds = time.perf_counter() - start
    print(f"{costs.source} ({seconds:.0f} s)")
    print_report(costs.tables)
    if args.json:
        _write_json(args, costs.tables)
    return 0


def progress_text(share: float, what: str) -> str:
    """A bar and what is measured now."""
    filled = int(share * BAR_WIDTH)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {share:4.0%} {what}"


def print_report(tables: Mapping[str, Any]) -> None:
    """The ends and the middle of each table, milliseconds (of a layer, or of an iteration)."""
    from neo_compile.app.tables import format_table

    rows = []
    for name, points in _by_table(tables).items():
        picked = [points[0], points[len(points) // 2], points[-1]]
        cells = [", ".join(f"{axis} {value}" for axis, value in point.items() if axis != "ms") for point in picked]
        values = [f"{point['ms']:.3f} ms" for point in picked]
        rows.append([name.replace("_", " "), *(cell for pair in zip(cells, values, strict=True) for cell in pair)])
    print("\n" + format_table(("table", "first", "", "middle", "", "last", ""), rows))
    print(
        f"\nbeside that: {tables.get('launch_ms', 0.0):.3f} ms for each launch of host attention, "
        f"{tables.get('overhead_ms', 0.0):.2f} ms for each sub-batch"
    )


def table_rows(tables: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every measured point: its table, its place on each axis, and `ms`."""
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            yield {"table": name, "ms": table}
            continue
        axes = {axis: points for axis, points in table.items() if axis != "ms"}
        (first, outer), *rest = axes.items() if len(axes) == 1 else _outer_first(name, axes)
        for x, row in zip(outer, table["ms"], strict=True):
            if not rest:
                yield {"table": name, first: x, "ms": row}
                continue
            ((second, inner),) = rest
            for y, ms in zip(inner, row, strict=True):
                yield {"table": name, first: x, second: y, "ms": ms}


def _outer_first(name: str, axes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A table's rows belong to its first axis; JSON objects do not promise an order."""
    outer = "tokens" if name == "prefill_attention" else "requests"
    return sorted(axes.items(), key=lambda axis: axis[0] != outer)


def _by_table(tables: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    points: dict[str, list[dict[str, Any]]] = {}
    for row in table_rows(tables):
        name = row.pop("table")
        if len(row) > 1:
            points.setdefault(name, []).append(row)
    return points


def _write_json(args: argparse.Namespace, tables: Mapping[str, Any]) -> None:
    from neo_compile.app.bench.machine import machine_facts

    config = {name: value for name, value in vars(args).items() if name not in ("run", "json")}
    document = {"config": config, "machine": machine_facts(), "rows": list(table_rows(tables))}
    Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
