"""`neo bench`: measurements that anyone can repeat, one module per subject.

    kernel.py           the command `neo bench kernel`: options, the run, the table, the JSON file
    cases.py            one shape to measure; the cold memory its KV lies in; the check against `reference.py`
    peers.py            the implementations behind one small protocol; `ggml.py`, `onnx_gqa.py`: those of other packages
    measure.py          turns A B A B, so that a noisy neighbour hits all alike
    bandwidth.py        what the memory gives at best, measured in the same run
    throughput.py       the command `neo bench throughput`: whole loads, policies side by side
    latency.py          the command `neo bench latency`: random arrivals; `rate_search.py`: the highest rate allowed
    sweep.py            the command `neo bench sweep`: neo against device-only over lengths and device caches
    rival.py            the command `neo bench rival`: against transformers' own batching, in `rivals.py`
    systems.py          what is compared; `comparison.py`: engines in turn; `paired.py`: ratios of paired runs
    loads.py            options of a load, arrivals, prompts; `traces.py`: prompt and output lengths of services
    serving_metrics.py  throughput and latency under vLLM's names

Nothing here is imported by the rest of the package, and nothing loads torch before a benchmark runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from neo_compile.app.bench import kernel, latency, rival, sweep, throughput

DESCRIPTION = "Measure a part of neo_compile on this machine, beside what one would use instead."


def add_parser(subparsers: Any) -> None:
    """Add the command to the `neo` command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="measure the attention kernel, or whole loads, beside alternatives", description=DESCRIPTION
    )
    subparsers = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    kernel.add_parser(subparsers)
    throughput.add_parser(subparsers)
    latency.add_parser(subparsers)
    sweep.add_parser(subparsers)
    rival.add_parser(subparsers)
