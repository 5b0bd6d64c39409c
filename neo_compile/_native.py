"""Loads the native module, picks the kernels for this CPU, and counts the CPUs we may use.

Kernel sets ("ISAs") are named `ispc-avx512-bf16`, `ispc-avx512`, `ispc-avx2`, `ispc-neon`, the same with `cpp-`, and
`scalar`; which of them exist depends on how the package was built and on this CPU. `NEO_ISA` forces one, by its full
name or by the instruction set alone (`NEO_ISA=avx2` takes the best available set for AVX2). A forced set never falls
back silently.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch  # noqa: F401 - brings the OpenMP library that the native module needs

try:
    from neo_compile import _C
except ImportError as error:  # a source tree on the path without a build
    raise ImportError(
        "neo_compile's native module is missing or does not load; build it with `pip install -e .` in the source tree"
    ) from error

__all__ = ["available_isas", "built_isas", "cpu_name", "cpu_quota", "has_ispc", "isa", "resolve_isa", "usable_cpus"]


def built_isas() -> list[str]:
    """Kernel sets compiled into this build, best first, whether or not this CPU runs them."""
    return [name for name, _ in _C.kernel_sets()]


def available_isas() -> list[str]:
    """Kernel sets of this build that this CPU runs, best first. "scalar" is always the last."""
    return [name for name, is_supported in _C.kernel_sets() if is_supported]


def has_ispc() -> bool:
    """Was this build made with ISPC kernels?"""
    return any(name.startswith("ispc-") for name in built_isas())


def resolve_isa(name: str) -> str:
    """The kernel set meant by a full name or an instruction set alone; ValueError lists what is available."""
    available = available_isas()
    for candidate in available:
        if name and name in (candidate, candidate.partition("-")[2]):
            return candidate
    known = name in built_isas() or any(name == built.partition("-")[2] for built in built_isas())
    reason = "this CPU does not run it" if known else "this build has no such kernels"
    raise ValueError(f"NEO_ISA / isa {name!r}: {reason}; available: {', '.join(available)}")


def isa() -> str:
    """The kernel set in use by default: the one forced by NEO_ISA, otherwise the best available."""
    forced = os.environ.get("NEO_ISA")
    return resolve_isa(forced) if forced else available_isas()[0]


def cpu_name() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def usable_cpus() -> list[int]:
    """CPU ids this process may keep busy: its affinity mask, cut to the cgroup's CPU quota (at least one)."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = cpu_quota()
    if quota is not None:
        cpus = cpus[: max(1, int(quota))]
    return cpus


def cpu_quota(proc_cgroup: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> float | None:
    """The tightest quota of our cgroup and its parents in CPUs (v2 cpu.max, v1 cpu.cfs_quota_us); None: no limit."""
    try:
        lines = Path(proc_cgroup).read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, read = Path(mount), _quota_v2
        elif "cpu" in controllers.split(","):
            root, read = _v1_root(Path(mount), controllers), _quota_v1
        else:
            continue
        # In a container the path may be the host's and absent here: the mount's own root is then ours.
        relative = Path(path.lstrip("/"))
        for folder in [root / relative, *(root / parent for parent in relative.parents), root]:
            quota = read(folder)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _v1_root(mount: Path, controllers: str) -> Path:
    for name in (controllers, "cpu"):
        if (mount / name).is_dir():
            return mount / name
    return mount / "cpu"


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
