"""`neo bench rival`: neo against transformers' own serving, on the same cores with the same KV budget."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from neo_compile.app.bench.loads import random_prompts
from neo_compile.app.bench.throughput import (
    TABLES,
    add_serving_options,
    apply_table,
    load_model_and_lengths,
    print_setting,
)
from neo_compile.app.bench.traces import Lengths
from neo_compile.errors import ConfigError

if TYPE_CHECKING:
    from neo_compile.app.bench.comparison import Row
    from neo_compile.app.bench.paired import Ratio

DESCRIPTION = """\
The same requests, greedy, to their full lengths: neo, transformers' continuous batching (generate_batch) with as many
KV blocks as neo's device cache, and batched generate() in waves that fit the same budget. transformers has all cores
that neo divides between device and host. All take turns; neo is compared with the better of the two.

neo has a host cache besides: memory that the others cannot use."""

EPILOG = """\
examples:
  neo bench rival --table osc --num-requests 16 --dtype bfloat16
  neo bench rival --input-len 128 --output-len 32 --num-requests 8 --device-tokens 864 --runs 1"""


def add_parser(subparsers: Any) -> None:
    """Add the command to `neo bench`."""
    parser = subparsers.add_parser(
        "rival",
        help="whole loads under neo and under transformers' own batching",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", choices=tuple(TABLES), help="trace and cache sizes of a known table")
    add_serving_options(parser, num_requests=16, default_policy="neo")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    from neo_compile.app.bench.comparison import measure, open_systems, print_ratios, write_report
    from neo_compile.app.bench.rivals import RIVALS
    from neo_compile.app.bench.systems import parse_systems
    from neo_compile.app.progress import StatusLine

    if args.runs < 1:
        raise ConfigError(f"--runs {args.runs} must be at least 1")
    args.policy = args.policy or "neo"
    apply_table(args)
    if not args.device_tokens:
        raise ConfigError("give --device-tokens: the KV budget of all")
    systems = parse_systems(args.policy)
    with StatusLine() as status:
        model, lengths, num_left_out = load_model_and_lengths(args, status)
        rows: list[Row] = []
        with open_systems(model, args, systems, lengths, status) as engines:
            for number in range(args.runs):
                for name, engine in engines.items():
                    status.announce(f"run {number + 1} of {args.runs}: {name}")
                    metrics = measure(engine, lengths, args.seed + number, on_progress=status.update_from)
                    rows.append({"policy": name, "run": number, **metrics})
                for name in RIVALS:
                    status.announce(f"run {number + 1} of {args.runs}: {name}")
                    rows.append({"policy": name, "run": number, **_measure_rival(name, model, lengths, args, number)})
                if args.json:
                    write_report(args.json, "rival", args, rows)
        status.clear()
    print_setting(args, lengths, num_left_out)
    print(_table(rows) + "\n")
    print_ratios(_ratios(rows, [system.name for system in systems], list(RIVALS)))
    return 0


def _measure_rival(name: str, model: Any, lengths: Sequence[Lengths], args: argparse.Namespace, number: int) -> Row:
    """One run; the requests are those of the engines' run of the same number."""
    from neo_compile import _native
    from neo_compile.app.bench.rivals import RIVALS, all_cores

    prompts = random_prompts(lengths, model.get_input_embeddings().weight.shape[0], args.seed + number)
    with all_cores(len(_native.usable_cpus())):
        start = time.perf_counter()
        outputs = RIVALS[name](model, prompts, [each.output_tokens for each in lengths], args.device_tokens)
        seconds = time.perf_counter() - start
    num_tokens = sum(map(len, outputs))
    return {
        "duration": seconds,
        "completed": len(outputs),
        "total_output_tokens": num_tokens,
        "output_throughput": num_tokens / seconds,
        "request_throughput": len(outputs) / seconds,
    }


def _ratios(rows: Sequence[Row], systems: Sequence[str], rivals: Sequence[str]) -> dict[str, Ratio]:
    """Each of our systems against the rival with the highest median throughput."""
    from neo_compile.app.bench.comparison import column
    from neo_compile.app.bench.paired import paired_ratio

    best = max(rivals, key=lambda name: median(column(rows, name, "output_throughput")))
    rates = column(rows, best, "output_throughput")
    return {f"{name} : {best}": paired_ratio(column(rows, name, "output_throughput"), rates) for name in systems}


def _table(rows: Sequence[Row]) -> str:
    from neo_compile.app.bench.comparison import column
    from neo_compile.app.tables import format_table

    fields = ("output_throughput", "request_throughput", "duration", "total_output_tokens")
    cells = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        values = [median(column(rows, name, field)) for field in fields]
        cells.append([name, f"{values[0]:.1f}", f"{values[1]:.2f}", f"{values[2]:.1f}", int(values[3])])
    return format_table(("served by", "tokens/s", "requests/s", "seconds", "output tokens"), cells)
