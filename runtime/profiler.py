"""The cost tables of a model on this machine: its full profile, or quick tables measured at an engine's first start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import neo_compile
from neo_compile import _native
from neo_compile.errors import ConfigError
from neo_compile.runtime.cost_files import KINDS, cost_dir, cost_path, load_costs, store_costs
from neo_compile.runtime.cost_grid import QUICK, Grid, full_grid
from neo_compile.runtime.cost_tables import TableCostModel
from neo_compile.runtime.executor import Executor
from neo_compile.runtime.measurements import OnProgress, measure_tables
from neo_compile.runtime.model_info import ModelInfo
from neo_compile.runtime.request import Tier

logger = logging.getLogger(__name__)


def load_or_measure_costs(executor: Executor, info: ModelInfo) -> TableCostModel:
    """The cost tables for this model on this machine, from the user's cache directory or measured now, quickly.

    Call inside `device.launching()`.
    """
    key = cost_key(executor, info)
    costs = load_costs(key)
    if costs is not None:
        return costs
    logger.info("measuring the costs of %s (once; kept at %s)", info.fingerprint, cost_path(key, "quick"))
    return _measure(executor, key, QUICK, "quick", None)


def profile(
    executor: Executor,
    info: ModelInfo,
    *,
    max_num_batched_tokens: int,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> TableCostModel:
    """The full profile, from the user's cache directory (unless `force`) or measured now, a minute or two.

    Call inside `device.launching()`, while no request holds KV.
    """
    key = cost_key(executor, info)
    costs = None if force else load_costs(key, KINDS[:1])
    if costs is not None:
        return costs
    return _measure(executor, key, full_grid(max_num_batched_tokens, info.max_model_len), "full", on_progress)


def cost_key(executor: Executor, info: ModelInfo) -> dict[str, Any]:
    """All that the costs depend on."""
    device, cache = executor.device, executor.caches[Tier.DEVICE]
    return {
        "model": info.fingerprint,
        "cache_dtype": str(cache.dtype),
        "block_size": cache.block_size,
        "device": device.kind,
        "device_threads": device.device_threads,
        "host_threads": device.host_threads,
        "swap_gbps": device.swap_gbps,
        "host_slowdown": device.host_slowdown,
        "stages": f"{executor.staged.num_artifacts} {executor.staged.stage_kind}",
        **_environment(),
    }


def survey_costs() -> list[str]:
    """A line for every kept file: its model and layout, and whether it would serve in this process."""
    here = _environment()
    lines = []
    for path in sorted(cost_dir().glob("*.json")):
        try:
            lines.append(_survey(path, here))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # any file may be there
            lines.append(f"{path.name}: unusable ({error})")
    return lines


def _survey(path: Path, here: Mapping[str, Any]) -> str:
    kind = Path(path.stem).suffix.removeprefix(".")
    if kind not in KINDS:
        raise ConfigError(f"an old name: files of this version end in .{'.json or .'.join(KINDS)}.json")
    key = TableCostModel.from_json(path.read_text()).key
    differing = [f"{name} {key.get(name)!r}, here {value!r}" for name, value in here.items() if key.get(name) != value]
    verdict = f"refused ({'; '.join(differing)})" if differing else "serves"
    slowed = f", host slowed {key['host_slowdown']:g} times" if key["host_slowdown"] != 1 else ""
    return (
        f"{key['model']}, {key['cache_dtype'].removeprefix('torch.')}, {key['device_threads']} device and "
        f"{key['host_threads']} host threads{slowed}: {kind}, {verdict}"
    )


def _environment() -> dict[str, Any]:
    """What no option chooses."""
    return {
        "isa": _native.isa(),
        "cpu": _native.cpu_name(),
        "torch": torch.__version__,
        "neo_compile": neo_compile.__version__,
    }


def _measure(
    executor: Executor, key: dict[str, Any], grid: Grid, kind: str, on_progress: OnProgress | None
) -> TableCostModel:
    tables = measure_tables(executor, grid, on_progress)
    costs = TableCostModel(tables, num_layers=len(executor.staged.sites), key=key)
    store_costs(costs, kind)
    return costs
