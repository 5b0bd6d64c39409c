"""The command `neo simulate`: one load under several policies, or the paper's figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from neo_compile.app.bench.loads import add_load_options, describe_load, poisson_arrivals, read_load
from neo_compile.app.bench.systems import SYSTEMS_HELP, parse_systems
from neo_compile.app.options import add_settings_option, number_option, output_file, parse_settings
from neo_compile.app.progress import StatusLine
from neo_compile.app.simulate.figures import FIGURES, FULL, QUICK, Row
from neo_compile.app.simulate.load import metrics_of, simulate
from neo_compile.app.simulate.setups import SETUPS, Machine, find_setup, read_profile
from neo_compile.app.tables import format_table
from neo_compile.checks import COUNT, NOT_NEGATIVE, POSITIVE
from neo_compile.errors import ConfigError

DEFAULT_POLICIES = "device-only:swap,device-only:recompute,device-only:reserve,neo,host-only,symmetric"
DEFAULT_SETUP = "t4"
OVERRIDES = {
    "device_tokens": (COUNT, "size of the device cache, in tokens"),
    "host_tokens": (COUNT, "size of the host cache, in tokens"),
    "device_gbps": (POSITIVE, "at which the device's decode attention reads KV"),
    "host_gbps": (POSITIVE, "at which the host's does"),
    "link_gbps": (POSITIVE, "at which KV moves between the tiers"),
    "launch_ms": (NOT_NEGATIVE, "what a layer's host attention costs beside the attention"),
}
CACHE_SIZES = ("device_tokens", "host_tokens")

DESCRIPTION = """\
Serve a load on a virtual clock: the engine's own scheduler decides every iteration, a cost model says how long it
takes. No model is loaded, and thousands of requests take seconds. What is said here of a GPU is as good as the cost
model: a handful of effective rates (see --setup), no contention, no noise. --profile takes measured tables instead.

--figure draws the paper's figures beside what the paper published. Gains are over the best of device-only's three
answers to a full cache, which is more than the paper's own baseline on a T4 can do; they are of whole runs."""

EPILOG = """\
examples:
  neo simulate                                               a T4 with the OSC trace, all requests at once
  neo simulate --trace azure-code --setup a10g-16xlarge --request-rate 1.5
  neo simulate --input-len 1000 --output-len 200 --setup h100 --host-gbps 200
  neo simulate --profile ~/.cache/neo_compile/costs/NAME.full.json --device-tokens 864 --host-tokens 16000
  neo simulate --figure cpu-sensitivity                      a minute
  neo simulate --figure all --json figures.json && neo plot figures.json"""


def add_parser(subparsers: Any) -> None:
    """Add the command to the `neo` command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="the scheduler on a virtual clock, for machines that are not at hand",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--figure", choices=[*FIGURES, "all"], help="a figure of the paper, instead of one load")
    parser.add_argument(
        "--quick", action="store_true", help="figures from small loads: rougher, in a third of the time"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write config and rows to FILE")
    add_load_options(parser, num_requests=200)
    parser.add_argument(
        "--request-rate",
        type=number_option(POSITIVE),
        metavar="R",
        help="Poisson arrivals, R a second (default: all at once)",
    )
    parser.add_argument(
        "--policy", metavar="NAMES", help=f"{SYSTEMS_HELP} (not simulated). Default: {DEFAULT_POLICIES}"
    )
    setup = parser.add_argument_group(
        "machine and model", "One of the paper's, with any of its figures replaced; or one that was measured."
    )
    setup.add_argument("--setup", metavar="NAME", help=f"{', '.join(SETUPS)} (default: {DEFAULT_SETUP})")
    setup.add_argument(
        "--profile",
        metavar="FILE",
        help="cost tables of `neo profile` (`neo doctor` lists them), with --device-tokens and --host-tokens",
    )
    for name, (allowed, text) in OVERRIDES.items():
        setup.add_argument(f"--{name.replace('_', '-')}", type=number_option(allowed), metavar="N", help=text)
    add_settings_option(parser, ("scheduler",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    with StatusLine() as status:
        rows = _figure_rows(args, status) if args.figure else _load_rows(args, status)
    if args.json:
        config = {name: value for name, value in vars(args).items() if name not in ("run", "json")}
        document = {"benchmark": "simulate", "config": config, "rows": rows}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _figure_rows(args: argparse.Namespace, status: StatusLine) -> list[Row]:
    names = list(FIGURES) if args.figure == "all" else [args.figure]
    for name in ("trace", "input_len", "output_len", "request_rate", "policy", "setup", "profile", *OVERRIDES):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"a figure has its own loads, policies and machines: leave out --{name.replace('_', '-')}"
            )
    options = parse_settings(args.set, ("scheduler",))["scheduler"]
    study = replace(QUICK if args.quick else FULL, seed=args.seed, options=options)
    rows = []
    for name in names:
        own = list(FIGURES[name](study, status.update))
        status.clear()
        print(f"{_figure_table(own)}\n", flush=True)
        rows += own
    return rows


def _figure_table(rows: Sequence[Row]) -> str:
    headers = ["figure", "point", "policy", "gain", "published"]
    has_latency = any("published_seconds_per_token" in row for row in rows)
    cells = [
        [row["figure"], row["point"], row["policy"], _text(row.get("gain")), _text(row.get("published_gain"))]
        for row in rows
    ]
    if has_latency:
        headers += ["s per token", "published"]
        for line, row in zip(cells, rows, strict=True):
            line += [_text(row.get("seconds_per_token"), 3), _text(row.get("published_seconds_per_token"), 3)]
    return format_table(headers, cells)


def _text(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _load_rows(args: argparse.Namespace, status: StatusLine) -> list[Row]:
    systems, machine, lengths = parse_systems(args.policy or DEFAULT_POLICIES), _machine(args), read_load(args)
    arrivals = poisson_arrivals(len(lengths), args.request_rate, args.seed) if args.request_rate else None
    options = parse_settings(args.set, ("scheduler",))["scheduler"]
    rows = []
    for system in systems:
        status.announce(f"{system.name} on {machine.title}")
        rows.append({"policy": system.name, **metrics_of(simulate(machine, system, lengths, arrivals, **options))})
    status.clear()
    arriving = f"{args.request_rate:g} a second" if args.request_rate else "all at once"
    print(f"{machine.title}: {machine.device_tokens} device tokens, {machine.host_tokens} host tokens.")
    print(f"{len(lengths)} requests, {describe_load(args)}, {arriving}.\n")
    print(_load_table(rows))
    return rows


def _load_table(rows: Sequence[Row]) -> str:
    first = rows[0]
    headers = ("policy", "tokens/s", "requests/s", "s per token", "TTFT ms", "TPOT ms", f"x {first['policy']}")
    cells = [
        (
            row["policy"],
            row["output_throughput"],
            f"{row['request_throughput']:.2f}",
            f"{row['seconds_per_token']:.3f}",
            f"{row['mean_ttft_ms']:.0f}",
            row["mean_tpot_ms"],
            f"{row['output_throughput'] / first['output_throughput']:.2f}",
            row["num_swaps"],
            row["num_preemptions"],
            row["num_iterations"],
            row["num_pipelined_iterations"],
        )
        for row in rows
    ]
    return format_table((*headers, "swaps", "preempted", "iterations", "pipelined"), cells)


def _machine(args: argparse.Namespace) -> Machine:
    given = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name) is not None}
    if args.profile is None:
        return replace(find_setup(args.setup or DEFAULT_SETUP), **given)
    measured = [name for name in ("setup", *OVERRIDES) if name not in CACHE_SIZES and getattr(args, name) is not None]
    if measured:
        raise ConfigError(f"--profile has measured costs: leave out --{measured[0].replace('_', '-')}")
    if given.keys() != set(CACHE_SIZES):
        raise ConfigError("--profile says nothing of the caches: give --device-tokens and --host-tokens")
    return read_profile(Path(args.profile).expanduser(), **given)
