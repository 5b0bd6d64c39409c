"""The load of a benchmark: how long its requests are, when they arrive, and what their prompts are."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from neo_compile.app.bench.traces import TRACES, Lengths, read_lengths
from neo_compile.checks import POSITIVE
from neo_compile.errors import ConfigError


def add_load_options(parser: argparse.ArgumentParser, *, num_requests: int) -> None:
    """--trace, --input-len and --output-len, --num-requests, --seed."""
    group = parser.add_argument_group("load", "Lengths of a service's trace, or the same ones for all requests.")
    group.add_argument(
        "--trace", metavar="NAME", help=f"{', '.join(TRACES)}, or a .csv, .json or .jsonl file (default: osc)"
    )
    group.add_argument("--input-len", type=int, metavar="N", help="prompt tokens of every request, instead of a trace")
    group.add_argument("--output-len", type=int, metavar="N", help="output tokens of every request (with --input-len)")
    group.add_argument(
        "--num-requests", type=int, default=num_requests, metavar="N", help="how many (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths and prompts (default: 0)")


def read_load(args: argparse.Namespace) -> list[Lengths]:
    """The lengths that the options of `add_load_options` ask for.

    Raises:
        ConfigError: lengths given by halves or twice, not positive, or a trace that cannot be read.
    """
    if args.num_requests < 1:
        raise ConfigError(f"--num-requests {args.num_requests} must be at least 1")
    given = [name for name in ("input_len", "output_len") if getattr(args, name) is not None]
    if not given:
        return read_lengths(args.trace or "osc", args.num_requests, args.seed)
    if len(given) == 1 or args.trace is not None:
        raise ConfigError("give either --trace, or --input-len and --output-len")
    if args.input_len < 1 or args.output_len < 1:
        raise ConfigError(f"--input-len {args.input_len} and --output-len {args.output_len} must be at least 1")
    return [Lengths(args.input_len, args.output_len)] * args.num_requests


def describe_load(args: argparse.Namespace) -> str:
    """The load's name in a report."""
    if args.input_len is not None:
        return f"{args.input_len} prompt and {args.output_len} output tokens each"
    return f"lengths of {Path(args.trace).name if args.trace else 'osc'}"


def poisson_arrivals(num: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `num` requests arrive, `rate` a second on average, the first at 0.

    The same seed gives the same pattern at every rate, only faster or slower.
    """
    generator = random.Random(seed)
    arrivals = [0.0]
    while len(arrivals) < num:
        arrivals.append(arrivals[-1] + generator.expovariate(1.0))
    return [seconds / rate for seconds in arrivals[:num]]


def random_prompts(lengths: Sequence[Lengths], vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids of these lengths."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(each.prompt_tokens)] for each in lengths]


def parse_numbers(option: str, text: str, kind: type[int] | type[float]) -> list[float]:
    """Positive numbers with commas between them, as `option` was given. Raises ConfigError naming the option."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text}: not a list of numbers such as 1,2,4") from error
    if not all(number in POSITIVE for number in numbers):
        raise ConfigError(f"{option} {text}: each must be {POSITIVE}")
    return numbers
