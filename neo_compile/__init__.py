"""neo_compile: serve more requests from a device whose memory is full.

Three ways in: `torch.compile(model, backend="neo")`, `enable(model)` for Hugging Face's `generate`, and the serving
`Engine`; `explain` shows what was done.
The runtime is imported on first use, so that the compiler backend alone stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neo_compile.explanation import explain as explain
    from neo_compile.runtime.device import DeviceConfig as DeviceConfig
    from neo_compile.runtime.engine import Engine as Engine
    from neo_compile.runtime.generate import GenerateStats as GenerateStats
    from neo_compile.runtime.generate import disable as disable
    from neo_compile.runtime.generate import enable as enable
    from neo_compile.runtime.generate import generate as generate
    from neo_compile.runtime.generate import stats as stats
    from neo_compile.runtime.generate import to_dynamic_cache as to_dynamic_cache
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
    "GenerateStats": "neo_compile.runtime.generate",
    "disable": "neo_compile.runtime.generate",
    "enable": "neo_compile.runtime.generate",
    "explain": "neo_compile.explanation",
    "generate": "neo_compile.runtime.generate",
    "stats": "neo_compile.runtime.generate",
    "to_dynamic_cache": "neo_compile.runtime.generate",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
