"""`neo bench throughput`: a trace's requests, all at once, under several policies in turn."""

from __future__ import annotations

import argparse
import random
import time
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Any

from neo_compile.app.bench.traces import TRACES, Lengths, read_lengths
from neo_compile.app.options import add_engine_options, add_model_options, open_engine
from neo_compile.errors import ConfigError

if TYPE_CHECKING:
    from neo_compile.app.serving import ServedRun
    from neo_compile.runtime.engine import Engine

DESCRIPTION = """\
Offline throughput: requests with a real service's prompt and output lengths, all there from the start. Prompts are
random tokens, outputs run to their full length. Policies take turns (A B A B ...); the table has medians.

On a machine without a GPU the device is emulated: a core of either side reads memory equally fast, while a GPU
outruns its host 3 to 6 times. Figures tell what offloading costs and brings here, not on a GPU."""

EPILOG = """\
examples:
  neo bench throughput --device-tokens 864 --dtype bfloat16
  neo bench throughput --trace azure-code --num-requests 20 --policy device-only:recompute,neo --runs 3
  neo bench throughput --device-tokens 864 --json throughput.json"""


def add_parser(subparsers: Any) -> None:
    """Add the command to `neo bench`."""
    parser = subparsers.add_parser(
        "throughput",
        help="tokens per second of whole loads, policies side by side",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    add_engine_options(parser)
    parser.add_argument("--trace", default="osc", metavar="NAME", help=f"{', '.join(TRACES)}, or a file (default: osc)")
    parser.add_argument("--num-requests", type=int, default=40, metavar="N", help="of the trace (default: 40)")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="leave out longer requests (default: the model's)"
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each policy (default: 3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths and prompts (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="also write config, machine and rows to FILE")
    parser.set_defaults(run=run, policy="device-only,neo")
    for action in parser._actions:
        if action.dest == "policy":
            action.help = "several, with commas; device-only:swap, :recompute, :reserve are its answers to a full cache"


def run(args: argparse.Namespace) -> int:
    """The command."""
    from neo_compile.app.models import load_model, parse_dtype
    from neo_compile.app.progress import StatusLine

    if args.runs < 1 or args.num_requests < 1:
        raise ConfigError(f"--runs {args.runs} and --num-requests {args.num_requests} must be at least 1")
    policies = args.policy.split(",")
    with StatusLine() as status, ExitStack() as stack:
        status.announce(f"loading {args.model}")
        model, _ = load_model(args.model, parse_dtype(args.dtype))
        max_len = args.max_model_len or model.config.max_position_embeddings
        lengths = read_lengths(args.trace, args.num_requests, args.seed)
        kept = [each for each in lengths if sum(each) <= max_len]
        if not kept:
            raise ConfigError(f"all {len(lengths)} requests are longer than --max-model-len {max_len}")
        engines: dict[str, Engine] = {}
        for policy in policies:
            status.announce(f"preparing the engine for {policy} (compiling takes half a minute the first time)")
            name, _, full_cache = policy.partition(":")
            engine = open_engine(model, None, args, policy=name, full_cache=full_cache or "swap")
            engines[policy] = stack.enter_context(engine)
        rows = []
        for number in range(args.runs):
            for policy, engine in engines.items():
                status.announce(f"run {number + 1} of {args.runs}: {policy}")
                rows.append({"policy": policy, "run": number, **_measure(engine, kept, args.seed + number, status)})
    print_report(rows, policies, kept, len(lengths) - len(kept), args)
    if args.json:
        _write_json(args, rows)
    return 0


def _measure(engine: Engine, lengths: list[Lengths], seed: int, status: Any) -> dict[str, float]:
    """One run: metrics and what the engine's counters rose by."""
    from neo_compile.app.bench.serving_metrics import TokenTimes, serving_metrics
    from neo_compile.app.serving import serve
    from neo_compile.runtime.sampling_params import SamplingParams

    generator = random.Random(seed)
    vocab_size = engine.vocab_size
    prompts = [[generator.randrange(vocab_size) for _ in range(each.prompt_tokens)] for each in lengths]
    params = [SamplingParams(max_tokens=each.output_tokens, temperature=0.0, ignore_eos=True) for each in lengths]
    token_times = TokenTimes()
    served: ServedRun = serve(
        engine,
        prompts,
        params,
        on_output=lambda index, output: token_times.add(index, time.perf_counter(), len(output.token_ids)),
        on_progress=status.update_from,
    )
    return {**serving_metrics(served, token_times), **served.counters}


def print_report(
    rows: list[dict[str, Any]], policies: list[str], lengths: list[Lengths], num_left_out: int, args: argparse.Namespace
) -> None:
    """Medians over the runs, and each policy's ratio to the first one, run by run."""
    from neo_compile.app.tables import format_table

    num_prompt, num_output = (sum(column) for column in zip(*lengths, strict=True))
    print(
        f"\n{len(lengths)} requests of {args.trace}, {num_prompt} prompt and {num_output} output tokens, "
        f"{num_left_out} left out as too long; {args.dtype}, device cache "
        f"{args.device_tokens or 'without a budget'}{' tokens' if args.device_tokens else ''}. The device is emulated."
    )
    columns = ("output_throughput", "request_throughput", "seconds_per_token", "mean_ttft_ms", "mean_tpot_ms")
    counters = ("num_host_requests", "num_swap_outs", "num_preemptions", "num_iterations")
    table = []
    for policy in policies:
        own = [row for row in rows if row["policy"] == policy]
        first = [row for row in rows if row["policy"] == policies[0]]
        ratios = [a["output_throughput"] / b["output_throughput"] for a, b in zip(own, first, strict=True)]
        values = [median(row[name] for row in own) for name in columns]
        cells = [f"{values[0]:.1f}", f"{values[1]:.2f}", f"{values[2]:.3f}", f"{values[3]:.0f}", f"{values[4]:.1f}"]
        table.append([policy, *cells, f"{median(ratios):.2f}", *(int(median(row[n] for row in own)) for n in counters)])
    headers = ("policy", "tokens/s", "requests/s", "s per token", "TTFT ms", "TPOT ms", f"x {policies[0]}")
    print("\n" + format_table((*headers, "on host", "swap-outs", "preempted", "iterations"), table))


def _write_json(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    import json
    from pathlib import Path

    from neo_compile.app.bench.machine import machine_facts

    config = {name: value for name, value in vars(args).items() if name not in ("run", "json")}
    document = {"config": config, "machine": machine_facts(), "rows": rows}
    Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
