"""`neo bench throughput`: a load's requests, all at once, under several systems in turn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from neo_compile.app.bench.cost_errors import HELP as COST_ERRORS_HELP
from neo_compile.app.bench.cost_errors import as_json, print_cost_errors
from neo_compile.app.bench.loads import add_load_options, describe_load, read_load
from neo_compile.app.bench.systems import DEVICE_ONLY_ANSWERS, ONE_TIER, SYSTEMS_HELP, UNLIMITED, parse_systems
from neo_compile.app.bench.traces import Lengths
from neo_compile.app.options import add_engine_options, add_model_options, output_file
from neo_compile.errors import ConfigError

if TYPE_CHECKING:
    from neo_compile.runtime.engine import Engine

DEFAULT_POLICIES = "device-only,neo"
# What --table NAME stands for, where the command line says nothing else.
TABLES = {
    "osc": {
        "trace": "osc",
        "device_tokens": 864,
        "host_tokens": 16_000,
        "policy": ",".join((*DEVICE_ONLY_ANSWERS, "neo", UNLIMITED, ONE_TIER)),
    }
}

DESCRIPTION = """\
Offline throughput: requests with a real service's prompt and output lengths, all there from the start. Prompts are
random tokens, outputs run to their full length. Policies take turns (A B A B ...); the table has medians, ratios are
of runs in pairs, with 95 % bounds where there are several.

On a machine without a GPU the device is emulated: a core of either side reads memory equally fast, while a GPU
outruns its host 3 to 6 times. Figures tell what offloading costs and brings here, not on a GPU."""

EPILOG = """\
examples:
  neo bench throughput --table osc --dtype bfloat16 --json osc.json
  neo bench throughput --trace azure-code --num-requests 20 --policy device-only:recompute,neo --runs 3
  neo bench throughput --input-len 256 --output-len 64 --device-tokens 864 --timeline timeline.json

--table osc: the trace of the paper's T4 figures with 864 device tokens: (a) device-only with each of its answers to a
full cache, (b) neo, (c) device-only with an unlimited cache, (d) one tier, all cores, unlimited; b/a, b/c, b/d."""


def add_parser(subparsers: Any) -> None:
    """Add the command to `neo bench`."""
    parser = subparsers.add_parser(
        "throughput",
        help="tokens per second of whole loads, policies side by side",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", choices=tuple(TABLES), help="trace, cache sizes and policies of a known table")
    add_serving_options(parser, num_requests=40)
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each policy (default: %(default)s)")
    parser.add_argument("--cost-errors", action="store_true", help=COST_ERRORS_HELP)
    parser.add_argument(
        "--timeline", type=output_file, metavar="FILE", help="afterwards one run more of neo, as a trace for Perfetto"
    )
    parser.set_defaults(run=run)


def add_serving_options(
    parser: argparse.ArgumentParser, *, num_requests: int, default_policy: str = DEFAULT_POLICIES
) -> None:
    """What the serving benchmarks have in common: model, load, engine, --policy for several, --json."""
    add_model_options(parser)
    add_load_options(parser, num_requests=num_requests)
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="leave out longer requests (default: the model's context)"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write config, machine and rows to FILE, for `neo plot`"
    )
    add_engine_options(parser, policy_help=f"{SYSTEMS_HELP} (default: {default_policy})", default_policy=None)


def run(args: argparse.Namespace) -> int:
    """The command."""
    from neo_compile.app.bench.comparison import Row, measure, open_systems, print_ratios, ratios_of, write_report
    from neo_compile.app.progress import StatusLine

    if args.runs < 1:
        raise ConfigError(f"--runs {args.runs} must be at least 1")
    apply_table(args)
    systems = parse_systems(args.policy or DEFAULT_POLICIES)
    if args.timeline and "neo" not in {system.name for system in systems}:
        raise ConfigError("--timeline records neo: add it to --policy")
    with StatusLine() as status:
        model, lengths, num_left_out = load_model_and_lengths(args, status)
        rows: list[Row] = []
        with open_systems(model, args, systems, lengths, status) as engines:
            for number in range(args.runs):
                for name, engine in engines.items():
                    status.announce(f"run {number + 1} of {args.runs}: {name}")
                    metrics = measure(engine, lengths, args.seed + number, on_progress=status.update_from)
                    rows.append({"policy": name, "run": number, **metrics})
                if args.json:  # after every round, so that what takes long is never lost
                    more = {"cost_errors": as_json(engines)} if args.cost_errors else {}
                    write_report(args.json, "throughput", args, rows, ratios=ratios_of(rows), **more)
            if args.timeline:
                _record_timeline(engines["neo"], lengths, args, status)
            status.clear()
            print_setting(args, lengths, num_left_out)
            print(_table(rows) + "\n")
            print_ratios(ratios_of(rows))
            if args.cost_errors:
                print_cost_errors(engines)
    return 0


def apply_table(args: argparse.Namespace) -> None:
    """Fill in what --table stands for and the command line leaves open."""
    if args.table is None:
        return
    has_lengths = args.input_len is not None
    for name, value in TABLES[args.table].items():
        if getattr(args, name) is None and not (name == "trace" and has_lengths):
            setattr(args, name, value)


def load_model_and_lengths(args: argparse.Namespace, status: Any) -> tuple[Any, list[Lengths], int]:
    """The model, the lengths that fit its context, and how many do not. Raises ConfigError if none fits."""
    from neo_compile.app.models import load_model, parse_dtype

    lengths = read_load(args)
    status.announce(f"loading {args.model}")
    model, _ = load_model(args.model, parse_dtype(args.dtype))
    max_len = args.max_model_len or model.config.max_position_embeddings
    kept = [each for each in lengths if sum(each) <= max_len]
    if not kept:
        raise ConfigError(f"all {len(lengths)} requests are longer than --max-model-len {max_len}")
    return model, kept, len(lengths) - len(kept)


def _record_timeline(engine: Engine, lengths: Sequence[Lengths], args: argparse.Namespace, status: Any) -> None:
    from neo_compile.app.bench.comparison import measure

    status.announce("one more run of neo, recorded")
    engine.start_timeline()
    measure(engine, lengths, args.seed, on_progress=status.update_from)
    engine.stop_timeline().write_chrome_trace(args.timeline)


def print_setting(args: argparse.Namespace, lengths: Sequence[Lengths], num_left_out: int) -> None:
    """What was served, on what."""
    num_prompt, num_output = (sum(tokens) for tokens in zip(*lengths, strict=True))
    budget = f"{args.device_tokens} tokens" if args.device_tokens else "without a budget"
    print(
        f"\n{len(lengths)} requests, {describe_load(args)}: {num_prompt} prompt and {num_output} output tokens, "
        f"{num_left_out} left out as too long; {args.dtype}, device cache {budget}. The device is emulated.\n"
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over the runs, and each policy's ratio to the first one."""
    from neo_compile.app.bench.comparison import column
    from neo_compile.app.bench.paired import paired_ratio
    from neo_compile.app.tables import format_table

    policies = list(dict.fromkeys(row["policy"] for row in rows))
    first = column(rows, policies[0], "output_throughput")
    counters = ("num_host_requests", "num_swap_outs", "num_preemptions", "num_iterations", "num_pipelined_iterations")
    cells = []
    for policy in policies:

        def mid(name: str, policy: str = policy) -> float:
            return median(column(rows, policy, name))

        ratio = paired_ratio(column(rows, policy, "output_throughput"), first)
        own = [f"{mid('output_throughput'):.1f}", f"{mid('request_throughput'):.2f}", f"{mid('seconds_per_token'):.3f}"]
        own += [f"{mid('mean_ttft_ms'):.0f}", f"{mid('mean_tpot_ms'):.1f}", str(ratio)]
        cells.append([policy, *own, *(int(mid(name)) for name in counters)])
    headers = ("policy", "tokens/s", "requests/s", "s per token", "TTFT ms", "TPOT ms", f"x {policies[0]}")
    return format_table((*headers, "on host", "swap-outs", "preempted", "iterations", "pipelined"), cells)
