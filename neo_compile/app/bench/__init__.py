"""`neo bench`: measurements that anyone can repeat, one module per subject.

    kernel.py           the command `neo bench kernel`; `kernel_options.py`, `session.py`, `report.py`: its parts
    cases.py            one shape to measure; the cold memory its KV lies in
    peers.py            the implementations behind one small protocol; `ggml.py`, `onnx_gqa.py`: those of other packages
    measure.py          turns A B A B, so that a noisy neighbour hits all alike
    bandwidth.py        what the memory gives at best, measured in the same run

Nothing here is imported by the rest of the package, and nothing loads torch before a benchmark runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from neo_compile.app.bench import kernel

DESCRIPTION = "Measure a part of neo_compile on this machine, beside what one would use instead."


def add_parser(subparsers: Any) -> None:
    """Add the command to the `neo` command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="measure the host attention kernel beside its peers", description=DESCRIPTION
    )
    kernel.add_parser(parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True))
