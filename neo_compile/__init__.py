"""neo_compile: serve more requests from a device whose memory is full.

Three ways in: `torch.compile(model, backend="neo")`, the serving `Engine`, and `explain` to see what was done.
The runtime is imported on first use, so that the compiler backend alone stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neo_compile.explain import explain as explain
    from neo_compile.runtime.device import DeviceConfig as DeviceConfig
    from neo_compile.runtime.engine import Engine as Engine
    from neo_compile.runtime.kv_cache import CacheConfig as CacheConfig
    from neo_compile.runtime.outputs import RequestOutput as RequestOutput
    from neo_compile.runtime.sampling_params import SamplingParams as SamplingParams
    from neo_compile.runtime.scheduler_config import SchedulerConfig as SchedulerConfig

__version__ = "0.1.0"

_EXPORTS = {
    "CacheConfig": "neo_compile.runtime.kv_cache",
    "CapacityError": "neo_compile.errors",
    "ConfigError": "neo_compile.errors",
    "DeviceConfig": "neo_compile.runtime.device",
    "Engine": "neo_compile.runtime.engine",
    "NeoError": "neo_compile.errors",
    "RequestOutput": "neo_compile.runtime.outputs",
    "SamplingParams": "neo_compile.runtime.sampling_params",
    "SchedulerConfig": "neo_compile.runtime.scheduler_config",
    "UnsupportedModelError": "neo_compile.errors",
    "explain": "neo_compile.explain",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
