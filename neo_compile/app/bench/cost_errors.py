"""How well the scheduler's cost model predicted the iterations of a benchmark (`--cost-errors`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from neo_compile.app.tables import format_table
from neo_compile.runtime.predictions import ErrorSummary, error_summaries

if TYPE_CHECKING:
    from neo_compile.runtime.engine import Engine

HELP = "also tell how far predicted and measured times of the iterations were apart, by strategy"


def cost_errors(engines: Mapping[str, Engine]) -> dict[str, dict[str, ErrorSummary]]:
    """By system and strategy, over the newest iterations of each engine, its warm-up included."""
    return {name: error_summaries(engine.stats().predictions) for name, engine in engines.items()}


def print_cost_errors(engines: Mapping[str, Engine]) -> None:
    """Which tables each engine has, and the distribution of its errors."""
    rows = [
        [name, strategy, each.num_iterations, *(f"{share:.1%}" for share in (each.p50, each.p90, each.p99, each.bias))]
        for name, summaries in cost_errors(engines).items()
        for strategy, each in summaries.items()
    ]
    headers = ("policy", "strategy", "iterations", "p50", "p90", "p99", "bias")
    print("\nabsolute errors of the predicted iteration times, as shares of the measured ones\n")
    print(format_table(headers, rows))
    for name, engine in engines.items():
        print(f"{name}: {engine.stats().cost_tables}")


def as_json(engines: Mapping[str, Engine]) -> dict[str, dict[str, dict[str, Any]]]:
    """`cost_errors` for a report."""
    return {
        name: {strategy: each._asdict() for strategy, each in summaries.items()}
        for name, summaries in cost_errors(engines).items()
    }
