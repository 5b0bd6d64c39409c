"""Where measured cost tables are kept, and when they are refused.

A file is named after what the user chose (model, dtype, block size, threads, throttles) and holds a key with all that
the costs depend on besides (processor, kernels, versions). A file whose key differs is refused with the differences,
and the costs are measured again.

There are two kinds: a full profile (`neo profile`), and the quick tables that an engine measures at its first start. A
full profile supersedes the quick tables.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neo_compile.errors import ConfigError
from neo_compile.paths import cache_dir
from neo_compile.runtime.cost_tables import TableCostModel

logger = logging.getLogger(__name__)

KINDS = ("full", "quick")  # the best first
_CHOSEN = (
    "model",
    "cache_dtype",
    "block_size",
    "device",
    "device_threads",
    "host_threads",
    "swap_gbps",
    "host_slowdown",
)


def cost_path(key: Mapping[str, Any], kind: str) -> Path:
    """The file of these costs."""
    chosen = json.dumps([key[name] for name in _CHOSEN])
    digest = hashlib.sha256(chosen.encode()).hexdigest()[:8]
    threads = f"{key['device_threads']}+{key['host_threads']}"
    return cost_dir() / f"{key['model']}-{key['device']}-{threads}-{digest}.{kind}.json"


def cost_dir() -> Path:
    """The directory of all cost tables."""
    return cache_dir() / "costs"


def load_costs(key: Mapping[str, Any], kinds: tuple[str, ...] = KINDS) -> TableCostModel | None:
    """The best tables there are for `key`; None if there are none. What is refused is a warning with the reason."""
    for kind in kinds:
        path = cost_path(key, kind)
        try:
            costs = TableCostModel.from_json(path.read_text(), key=key)
        except FileNotFoundError:
            continue
        except (OSError, ConfigError, ValueError, KeyError, TypeError) as error:
            remedy = "run `neo profile` again" if kind == "full" else "measuring again"
            logger.warning("the %s cost tables at %s are refused: %s; %s", kind, path, error, remedy)
            continue
        costs.source = describe(path, kind)
        return costs
    return None


def store_costs(costs: TableCostModel, kind: str) -> None:
    """Write atomically; a cache directory that cannot be written is a warning, not an error."""
    path = cost_path(costs.key, kind)
    costs.source = describe(path, kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(costs.to_json())
        partial.replace(path)
    except OSError as error:
        costs.source = f"{kind} tables, not kept ({error})"
        logger.warning("cannot keep the measured costs at %s: %s", path, error)


def describe(path: Path, kind: str) -> str:
    """For `EngineStats.cost_tables`."""
    return f"{'full profile' if kind == 'full' else 'quick tables'} at {path}"
