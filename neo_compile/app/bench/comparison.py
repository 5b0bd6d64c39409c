"""Several systems serve the same load in turn: the part that the serving benchmarks share."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from neo_compile.app.bench.loads import random_prompts
from neo_compile.app.bench.machine import machine_facts
from neo_compile.app.bench.paired import Ratio, paired_ratio
from neo_compile.app.bench.serving_metrics import RequestTimes, serving_metrics
from neo_compile.app.bench.systems import DEVICE_ONLY_ANSWERS, ONE_TIER, UNLIMITED, System
from neo_compile.app.bench.traces import Lengths
from neo_compile.app.options import open_engine
from neo_compile.app.serving import ServedRun, serve
from neo_compile.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:  # `neo --help` does not wait for torch
    from neo_compile.runtime.engine import Engine

logger = logging.getLogger(__name__)

Row = dict[str, Any]
_WARM_UP = Lengths(prompt_tokens=24, output_tokens=3)


@contextmanager
def open_systems(
    model: Any, args: argparse.Namespace, systems: Sequence[System], lengths: Sequence[Lengths], status: Any
) -> Iterator[dict[str, Engine]]:
    """An engine for each system, warmed up, by its name. `lengths` are what an unlimited device cache must hold."""
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for system in systems:
            status.announce(f"preparing the engine for {system.name} (compiling takes a minute or two the first time)")
            engine = stack.enter_context(open_engine(model, None, args, **_overrides(args, system, lengths)))
            measure(engine, [_WARM_UP] * 2, seed=0)
            engines[system.name] = engine
        yield engines


def _overrides(args: argparse.Namespace, system: System, lengths: Sequence[Lengths]) -> dict[str, Any]:
    """What an engine for `system` has instead of the command line's options."""
    from neo_compile import _native

    overrides: dict[str, Any] = {"policy": system.policy, "full_cache": system.full_cache}
    if not system.is_unlimited:
        return overrides
    num_cpus = len(_native.usable_cpus())
    # A block more each, as admission wants room for every request to grow. A host cache of one block, never used, keeps
    # the device on its own cores, as beside a real host cache.
    num_blocks = sum(-(-sum(each) // args.block_size) + 1 for each in lengths)
    overrides |= {"device_tokens": num_blocks * args.block_size, "host_tokens": None}
    overrides["host_blocks"] = 0 if system.has_all_cores else 1
    overrides["device_threads"] = num_cpus if system.has_all_cores else args.device_threads or max(1, num_cpus // 2)
    overrides["host_threads"] = 1 if system.has_all_cores else args.host_threads
    return overrides


def measure(
    engine: Engine,
    lengths: Sequence[Lengths],
    seed: int,
    *,
    arrivals_s: Sequence[float] | None = None,
    on_progress: Callable[[object], None] | None = None,
) -> Row:
    """Serve random prompts of these lengths, every output to its full length; metrics and the engine's counters."""
    params = [SamplingParams(max_tokens=each.output_tokens, temperature=0.0, ignore_eos=True) for each in lengths]
    prompts = random_prompts(lengths, engine.vocab_size, seed)
    served = serve(engine, prompts, params, arrivals_s=arrivals_s, on_progress=on_progress)
    return metrics_of(served)


def metrics_of(served: ServedRun) -> Row:
    """`serving_metrics` of a run, what the engine's counters rose by, and how many requests failed."""
    failed = [output for output in served.outputs if output.finish_reason not in ("length", "stop")]
    if failed:
        logger.warning(
            "%d of %d requests did not finish: %s", len(failed), len(served.outputs), failed[0].error or "cache full"
        )
    times = [
        RequestTimes(num_prompt_tokens=len(output.prompt_token_ids), arrival_s=arrival, token_times_s=token_times)
        for output, arrival, token_times in zip(served.outputs, served.arrivals_s, served.token_times_s, strict=True)
    ]
    strategies = {f"num_{name}_iterations": count for name, count in served.strategies.items()}
    return {**serving_metrics(times, served.seconds), "num_failed": len(failed), **served.counters, **strategies}


def column(rows: Sequence[Row], policy: str, name: str) -> list[float]:
    """A field of one policy's rows, in the order of the runs; 0 where a row lacks it."""
    return [row.get(name, 0) for row in rows if row["policy"] == policy]


def best_device_only(rows: Sequence[Row]) -> str | None:
    """The device-only system with the highest median throughput, of those with a limited cache; None without any."""
    names = {row["policy"] for row in rows} & {*DEVICE_ONLY_ANSWERS, "device-only"}
    return max(sorted(names), key=lambda name: median(column(rows, name, "output_throughput")), default=None)


def ratios_of(rows: Sequence[Row], field: str = "output_throughput") -> dict[str, Ratio]:
    """neo against the best of device-only's answers, an unlimited device cache, and one tier, as far as measured."""
    policies = {row["policy"] for row in rows}
    if "neo" not in policies:
        return {}
    others = [best_device_only(rows), *(name for name in (UNLIMITED, ONE_TIER) if name in policies)]
    own = column(rows, "neo", field)
    return {f"neo : {name}": paired_ratio(own, column(rows, name, field)) for name in others if name is not None}


def write_report(path: str, benchmark: str, args: argparse.Namespace, rows: Sequence[Row], **more: Any) -> None:
    """{"benchmark", "config", "machine", "rows", ...}: what `neo plot` reads."""
    config = {name: value for name, value in vars(args).items() if name not in ("run", "json")}
    document = {"benchmark": benchmark, "config": config, "machine": machine_facts(), "rows": rows, **more}
    Path(path).write_text(json.dumps(document, indent=1, default=asdict) + "\n", encoding="utf-8")


def print_ratios(ratios: Mapping[str, Ratio]) -> None:
    """One line each."""
    for name, ratio in ratios.items():
        pairs = f"{ratio.num_runs} paired runs, 95 % bounds" if ratio.num_runs > 1 else "a single run"
        print(f"{name} = {ratio} in tokens/s ({pairs})")
