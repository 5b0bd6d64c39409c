"""`neo bench latency`: requests that arrive at random, under several systems and rates."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from neo_compile.app.bench.loads import parse_numbers, poisson_arrivals
from neo_compile.app.bench.rate_search import find_highest_rate
from neo_compile.app.bench.systems import parse_systems
from neo_compile.app.bench.throughput import (
    DEFAULT_POLICIES,
    TABLES,
    add_serving_options,
    apply_table,
    load_model_and_lengths,
    print_setting,
)
from neo_compile.app.bench.traces import Lengths
from neo_compile.app.options import number_option
from neo_compile.checks import POSITIVE, Numbers
from neo_compile.errors import ConfigError

if TYPE_CHECKING:
    from neo_compile.app.bench.comparison import Row
    from neo_compile.runtime.engine import Engine

DESCRIPTION = """\
Online latency: requests arrive at random (Poisson), the same ones at the same moments for every policy. Latency counts
from the arrival. seconds_per_token is the paper's latency, (finish - arrival) / output tokens.

--bisect finds the highest rate at which the median of seconds_per_token is at most --max-slowdown times that of the
first policy's requests alone, one after the other. A queue needs time to grow: let --duration be many times the
latency of a request, or rates look sustainable that are not. The requests are the first ones of the load that arrive
in that time, so --num-requests must be enough for the highest rate."""

EPILOG = """\
examples:
  neo bench latency --request-rate 0.5,1,2 --device-tokens 864 --dtype bfloat16
  neo bench latency --table osc --bisect --policy device-only:swap,neo,one-tier --dtype bfloat16 --json latency.json
  neo plot latency.json"""


def add_parser(subparsers: Any) -> None:
    """Add the command to `neo bench`."""
    parser = subparsers.add_parser(
        "latency",
        help="latency of requests that arrive at random, policies side by side",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", choices=tuple(TABLES), help="trace, cache sizes and policies of a known table")
    add_serving_options(parser, num_requests=1000)
    parser.add_argument("--request-rate", default="1", metavar="LIST", help="requests a second (default: %(default)s)")
    parser.add_argument(
        "--duration", type=number_option(POSITIVE), default=60.0, metavar="S", help="of the arrivals (default: 60 s)"
    )
    parser.add_argument(
        "--bisect", action="store_true", help="look for the highest rate, from the first --request-rate"
    )
    parser.add_argument(
        "--max-slowdown",
        type=number_option(Numbers(above=1)),
        default=3.0,
        metavar="X",
        help="of --bisect (default: %(default)s)",
    )
    parser.add_argument(
        "--num-unloaded", type=int, default=16, metavar="N", help="requests served alone (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    from neo_compile.app.bench.comparison import open_systems
    from neo_compile.app.progress import StatusLine

    rates = parse_numbers("--request-rate", args.request_rate, float)
    if args.num_unloaded < 1:
        raise ConfigError(f"--num-unloaded {args.num_unloaded} must be at least 1")
    apply_table(args)
    systems = parse_systems(args.policy or DEFAULT_POLICIES)
    with StatusLine() as status:
        model, lengths, num_left_out = load_model_and_lengths(args, status)
        load = OnlineLoad(lengths, args.duration, args.seed)
        for rate in rates[:1] if args.bisect else rates:
            load.arrivals(rate)  # too few requests are refused before engines are made
        residents = sorted(lengths, key=sum)[-args.max_num_seqs :]
        with open_systems(model, args, systems, residents, status) as engines:
            first = next(iter(engines.values()))
            unloaded = load.measure_alone(first, args.num_unloaded, status)
            runner = _Runner(load, engines, unloaded * args.max_slowdown, status)
            save = partial(_save, args, runner.rows, unloaded)
            highest: dict[str, Row] = {}
            for name in engines if args.bisect else ():
                highest[name] = runner.bisect(name, rates[0])
                save(highest)
            for rate, name in () if args.bisect else product(rates, engines):
                runner.measure(name, rate)
                save(highest)
        status.clear()
    print_setting(args, lengths[: max(row["completed"] for row in runner.rows)], num_left_out)
    print(
        f"Arrivals for {args.duration:g} s. Alone, a request of {systems[0].name} takes {unloaded:.4f} s per token.\n"
    )
    print(_table(runner.rows, unloaded))
    if highest:
        print(f"\n{_highest_table(highest, runner.limit)}")
    return 0


def _save(args: argparse.Namespace, rows: Sequence[Row], unloaded: float, highest: Mapping[str, Row]) -> None:
    """As soon as something is measured, so that what takes long is never lost."""
    from neo_compile.app.bench.comparison import write_report

    if args.json:
        more = {"unloaded_seconds_per_token": unloaded, "highest_rates": highest}
        write_report(args.json, "latency", args, rows, **more)


@dataclass(frozen=True)
class OnlineLoad:
    """Requests of these lengths, in this order, for as long as arrivals go on."""

    lengths: Sequence[Lengths]
    duration_s: float
    seed: int

    def arrivals(self, rate: float) -> list[float]:
        """Seconds, of the requests that arrive in time, at least two. Raises ConfigError if there are too few."""
        arrivals = poisson_arrivals(len(self.lengths) + 1, rate, self.seed)
        num = max(2, sum(seconds <= self.duration_s for seconds in arrivals))
        if num > len(self.lengths):
            raise ConfigError(
                f"{rate:.3g} requests a second for {self.duration_s:g} s are more than the {len(self.lengths)} there "
                "are: raise --num-requests or shorten --duration"
            )
        return arrivals[:num]

    def measure(self, engine: Engine, rate: float, on_progress: Any = None) -> Row:
        """Metrics at a rate."""
        from neo_compile.app.bench.comparison import measure

        arrivals = self.arrivals(rate)
        lengths = self.lengths[: len(arrivals)]
        return measure(engine, lengths, self.seed, arrivals_s=arrivals, on_progress=on_progress)

    def measure_alone(self, engine: Engine, num: int, status: Any) -> float:
        """Median seconds per token of the first `num` requests, one after the other."""
        from neo_compile.app.bench.comparison import measure
        from neo_compile.app.bench.serving_metrics import percentile

        latencies = []
        for index, each in enumerate(self.lengths[:num]):
            status.update(f"request {index + 1} of {num} alone")
            latencies.append(measure(engine, [each], self.seed + index)["seconds_per_token"])
        return percentile(latencies, 50)


class _Runner:
    """Measures systems at rates and collects rows."""

    def __init__(self, load: OnlineLoad, engines: Mapping[str, Engine], limit: float, status: Any) -> None:
        self.limit = limit
        self.rows: list[Row] = []
        self._load = load
        self._engines = engines
        self._status = status

    def measure(self, name: str, rate: float) -> Row:
        """One row."""
        label = f"{name} at {rate:.3g}/s: "
        self._status.announce(f"{label}arrivals go on for {self._load.duration_s:g} s")
        metrics = self._load.measure(self._engines[name], rate, partial(self._status.update_from, label=label))
        self.rows.append({"policy": name, "request_rate": rate, **metrics})
        return self.rows[-1]

    def bisect(self, name: str, start_rate: float) -> Row:
        """The row of the highest rate within the limit."""
        search = find_highest_rate(
            lambda rate: float(self.measure(name, rate)["median_seconds_per_token"]), self.limit, start_rate
        )
        return next(row for row in self.rows if row["policy"] == name and row["request_rate"] == search.rate)


def _table(rows: Sequence[Row], unloaded: float) -> str:
    from neo_compile.app.tables import format_table

    headers = ("policy", "rate", "requests", "s/token", "median", "p99", "x alone", "TTFT ms", "TPOT ms", "tokens/s")
    cells = [
        [
            row["policy"],
            f"{row['request_rate']:.3g}",
            row["completed"],
            *(f"{row[f'{kind}seconds_per_token']:.4f}" for kind in ("", "median_", "p99_")),
            f"{row['median_seconds_per_token'] / unloaded:.2f}",
            f"{row['median_ttft_ms']:.0f}",
            f"{row['median_tpot_ms']:.1f}",
            row["output_throughput"],
        ]
        for row in sorted(rows, key=lambda row: (row["policy"], row["request_rate"]))
    ]
    return format_table(headers, cells)


def _highest_table(highest: Mapping[str, Row], limit: float) -> str:
    from neo_compile.app.tables import format_table

    names = list(highest)
    headers = (f"median <= {limit:.4f} s per token", "rate", "tokens/s", *(f"x {name}" for name in names))
    cells = [
        [
            name,
            f"{row['request_rate']:.3g}",
            row["output_throughput"],
            *(f"{row['request_rate'] / highest[other]['request_rate']:.2f}" for other in names),
        ]
        for name, row in highest.items()
    ]
    return format_table(headers, cells)
