"""What `neo bench kernel` prints and writes: one table, the reasons for what is missing, the machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neo_compile.app.bench.bandwidth import last_level_cache_bytes
from neo_compile.app.bench.cases import KernelCase
from neo_compile.app.bench.machine import machine_facts
from neo_compile.app.bench.peers import UnavailableError, resolve_kernels
from neo_compile.app.bench.session import KernelBench, Row
from neo_compile.app.tables import format_table

HEADERS = ("impl", "dtype", "batch", "tokens", "heads", "dim", "median us", "GB/s", "of bandwidth")
PACKAGES = ("neo-compile", "torch", "onnxruntime", "libggml-python", "llama-cpp-python")


def print_report(bench: KernelBench) -> None:
    """The table, then what is missing and why, then what the figures rest on."""
    rows: list[list[object]] = [_cells(row) for row in bench.rows]
    print(format_table(HEADERS, rows))
    for name, reason, cases in _grouped_reasons(bench):
        where = "" if len(cases) == len(bench.settings.cases) else f" ({'; '.join(map(str, cases))})"
        print(f"{name}: not measured{where}: {reason}")
    machine = describe_machine(bench)
    best = f"{bench.bandwidth.gbps:.1f} GB/s in its best pass, {bench.bandwidth.streams} stream(s) a thread"
    print(f"\n{machine['cpu']}, {machine['threads']} thread(s); sequential read {best}")
    print("Shares are of the sequential read just before each turn; medians over the turns")
    arena, cache = bench.settings.arena_bytes // 2**20, machine["last_level_cache_bytes"] // 2**20
    print(f"KV is cold: calls walk over at least {arena} MiB, the last-level cache has {cache}")
    load = machine["load_average"]
    if load > 0.5:
        print(f"The machine was busy (load average {load:.1f} at the start): do not trust these figures.")


def _cells(row: Row) -> list[object]:
    heads = f"{row.num_q_heads}/{row.num_kv_heads}"
    share = f"{100 * row.bandwidth_share:.0f} %"
    return [row.impl, row.dtype, row.batch, row.context_len, heads, row.head_dim, row.median_us, row.gbps, share]


def _grouped_reasons(bench: KernelBench) -> list[tuple[str, str, list[KernelCase]]]:
    grouped: dict[tuple[str, str], list[KernelCase]] = {}
    for skipped in bench.skipped:
        grouped.setdefault((skipped.impl, skipped.reason), []).append(skipped.case)
    return [(name, reason, cases) for (name, reason), cases in grouped.items()]


def describe_machine(bench: KernelBench) -> dict[str, Any]:
    """Where the figures come from."""
    return {
        **machine_facts(PACKAGES),
        "threads": bench.settings.threads,
        "bandwidth_gbps": round(bench.bandwidth.gbps, 2),
        "bandwidth_streams": bench.bandwidth.streams,
        "last_level_cache_bytes": last_level_cache_bytes(),
        "kernels": _picked_kernels(),
        "load_average": bench.load_average,
    }


def write_json(path: Path, bench: KernelBench) -> None:
    """{"config", "machine", "rows", "skipped"}: a row has the fields of `Row`; skipped ones have a reason instead."""
    settings = bench.settings
    report = {
        "config": {
            "impls": settings.impls,
            "cases": [asdict(case) for case in settings.cases],
            "threads": settings.threads,
            "effort": asdict(settings.effort),
            "arena_bytes": settings.arena_bytes,
        },
        "machine": describe_machine(bench),
        "rows": [asdict(row) for row in bench.rows],
        "skipped": [asdict(skipped) for skipped in bench.skipped],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _picked_kernels() -> dict[str, str]:
    picked = {}
    for family in ("ispc", "cpp"):
        try:
            picked[family] = resolve_kernels(family)
        except UnavailableError:
            continue  # the report says so where it was asked for
    return picked
