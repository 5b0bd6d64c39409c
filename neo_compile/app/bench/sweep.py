"""`neo bench sweep`: neo against device-only over prompt lengths x output lengths x device caches, with bounds."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from neo_compile.app.bench.loads import parse_numbers
from neo_compile.app.bench.systems import SYSTEMS, System, parse_systems
from neo_compile.app.bench.traces import Lengths
from neo_compile.app.options import add_engine_options, add_model_options, output_file
from neo_compile.errors import ConfigError

DEFAULTS = {
    "input_len": "64,256,768",
    "output_len": "4,32,128",
    "device_tokens": "1024,2048,8192",
    "runs": 7,
    "load_tokens": 6000,
}
QUICK = {"input_len": "64,256", "output_len": "4,48", "device_tokens": "1024,4096", "runs": 3, "load_tokens": 1500}
DEFAULT_POLICIES = "neo,device-only:swap"

DESCRIPTION = """\
Is neo ever slower than device-only? At every point of prompt length x output length x device cache, both serve the
same requests in turn (A B A B ...); the ratio of throughputs is given with its 95 % bounds over the paired runs.
Lengths vary by 30 % around the point's. A point has as many requests as make --load-tokens tokens, at least 4.

With --json every point is written as soon as it is measured, and a sweep that was interrupted goes on where it was
(the same FILE and options)."""

EPILOG = """\
examples:
  neo bench sweep --quick --dtype bfloat16
  neo bench sweep --dtype bfloat16 --json sweep.json && neo plot sweep.json
  neo bench sweep --host-slowdown 4 --dtype bfloat16 --json throttled.json"""


class Point(NamedTuple):
    """One point of the sweep."""

    input_len: int
    output_len: int
    device_tokens: int


def add_parser(subparsers: Any) -> None:
    """Add the command to `neo bench`."""
    parser = subparsers.add_parser(
        "sweep",
        help="neo against device-only over lengths and device caches",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--quick", action="store_true", help="fewer points, runs and tokens: a few minutes")
    for flag, text in (("--input-len", "prompt tokens"), ("--output-len", "output tokens")):
        default = DEFAULTS[flag[2:].replace("-", "_")]
        parser.add_argument(flag, metavar="LIST", help=f"{text}, with commas (default: {default})")
    parser.add_argument("--runs", type=int, metavar="N", help="pairs of each point (default: 7)")
    parser.add_argument(
        "--load-tokens", type=int, metavar="N", help="prompt and output tokens of a run (default: 6000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths and prompts (default: 0)")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write points to FILE, and go on with those already there"
    )
    add_engine_options(
        parser,
        policy_help=f"two, the first against the second (default: {DEFAULT_POLICIES}): {', '.join(SYSTEMS)}",
        default_policy=DEFAULT_POLICIES,
        device_tokens_list=str(DEFAULTS["device_tokens"]),
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    from neo_compile.app.bench.comparison import Row
    from neo_compile.app.models import load_model, parse_dtype
    from neo_compile.app.progress import StatusLine

    for name, value in (QUICK if args.quick else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.runs < 2 or args.load_tokens < 1:
        raise ConfigError(f"--runs {args.runs} must be at least 2, and --load-tokens {args.load_tokens} at least 1")
    systems = parse_systems(args.policy)
    if len(systems) != 2:
        raise ConfigError(f"--policy {args.policy} must name two systems")
    points = _points(args)
    rows: list[Row] = _read_rows(args)
    done = {Point(*(row[name] for name in Point._fields)) for row in rows}
    with StatusLine() as status:
        status.announce(f"loading {args.model}")
        model, _ = load_model(args.model, parse_dtype(args.dtype))
        for number, point in enumerate(points):
            if point not in done:
                rows.append(_measure_point(model, args, systems, point, f"point {number + 1} of {len(points)}", status))
                _write_rows(args, rows)
                status.clear()
                print(_line(rows[-1]), flush=True)
        status.clear()
    print(f"\n{_table(rows)}")
    worst = min(rows, key=lambda row: float(row["low"]))
    print(
        f"\nThe lowest lower bound of {systems[0].name} : {systems[1].name} is {worst['low']:.3f}, at {_name(worst)}."
    )
    return 0


def _points(args: argparse.Namespace) -> list[Point]:
    """Those whose requests fit the device cache, so that every policy can serve them."""
    axes = [
        [int(value) for value in parse_numbers(f"--{name.replace('_', '-')}", str(getattr(args, name)), int)]
        for name in Point._fields
    ]
    points = [Point(*values) for values in product(*axes)]
    kept = [point for point in points if 1.3 * (point.input_len + point.output_len) < point.device_tokens]
    if not kept:
        raise ConfigError(f"no point's requests fit its device cache: raise --device-tokens {args.device_tokens}")
    return kept


def _measure_point(
    model: Any, args: argparse.Namespace, systems: Sequence[System], point: Point, label: str, status: Any
) -> dict[str, Any]:
    """Both systems in turn; throughputs, their ratio and its bounds."""
    from neo_compile.app.bench.comparison import measure, open_systems
    from neo_compile.app.bench.paired import paired_ratio
    from neo_compile.app.simulate.load import lengths_around

    num_requests = max(4, math.ceil(args.load_tokens / (point.input_len + point.output_len)))
    lengths: Sequence[Lengths] = lengths_around(point.input_len, point.output_len, num_requests, seed=args.seed)
    own_args = argparse.Namespace(**{**vars(args), "device_tokens": point.device_tokens})
    throughputs: dict[str, list[float]] = {system.name: [] for system in systems}
    with open_systems(model, own_args, systems, lengths, status) as engines:
        for engine in engines.values():  # the cost model's corrections settle
            measure(engine, lengths, args.seed)
        for number in range(args.runs):
            for name, engine in engines.items():
                status.update(f"{label}, run {number + 1} of {args.runs}: {name}, {point}")
                throughputs[name].append(measure(engine, lengths, args.seed + number)["output_throughput"])
    ratio = paired_ratio(*throughputs.values())
    bounds = {"gain": ratio.value, "low": ratio.low, "high": ratio.high}
    return {**point._asdict(), "num_requests": num_requests, **bounds, "output_throughput": throughputs}


def _read_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The points of an earlier run. Raises ConfigError if it had other options."""
    if not args.json or not Path(args.json).exists():
        return []
    try:
        document = json.loads(Path(args.json).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"cannot go on with {args.json}: {error}; give --json another file") from error
    if not isinstance(document, dict) or document.get("benchmark") != "sweep":
        raise ConfigError(f"{args.json} is no sweep: give --json another file")
    ignored = {"run", "json", "verbose", *Point._fields}
    own = json.loads(json.dumps({name: value for name, value in vars(args).items() if name not in ignored}))
    other = {name: document["config"].get(name) for name in own}
    if own != other:
        different = [name for name in own if own[name] != other[name]]
        raise ConfigError(f"{args.json} was measured with another {', '.join(different)}: give --json another file")
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def _write_rows(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """By rename, so that an interruption leaves the earlier points."""
    from neo_compile.app.bench.comparison import write_report

    if args.json:
        partial = f"{args.json}.partial"
        write_report(partial, "sweep", args, rows)
        os.replace(partial, args.json)


def _name(row: dict[str, Any]) -> str:
    return f"prompt {row['input_len']}, output {row['output_len']}, {row['device_tokens']} device tokens"


def _line(row: dict[str, Any]) -> str:
    return f"{_name(row)}: {row['gain']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    from statistics import median

    from neo_compile.app.tables import format_table

    names = list(rows[0]["output_throughput"])
    headers = ("prompt", "output", "device tokens", "requests", *(f"{name} tokens/s" for name in names), "gain", "95 %")
    cells = [
        [
            *(row[name] for name in (*Point._fields, "num_requests")),
            *(median(row["output_throughput"][name]) for name in names),
            f"{row['gain']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
        ]
        for row in rows
    ]
    return format_table(headers, cells)
