"""What is compared: policies, and what each has of the machine. One spelling for all benchmarks and `neo simulate`."""

from __future__ import annotations

from dataclasses import dataclass

from neo_compile.errors import ConfigError
from neo_compile.runtime.scheduler_config import FULL_CACHE_ANSWERS, POLICIES

DEVICE_ONLY_ANSWERS = tuple(f"device-only:{answer}" for answer in FULL_CACHE_ANSWERS)
UNLIMITED, ONE_TIER = "device-only:unlimited", "one-tier"
SYSTEMS = (*POLICIES, *DEVICE_ONLY_ANSWERS, UNLIMITED, ONE_TIER)

SYSTEMS_HELP = (
    f"several, with commas: {', '.join(POLICIES)}. device-only:swap, :recompute, :reserve are device-only's answers to "
    f"a full device cache (device-only alone is :swap), {UNLIMITED} has a device cache that never fills, {ONE_TIER} "
    "has all cores besides"
)


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to serve a load.

    Attributes:
        name: as asked for.
        policy, full_cache: of `SchedulerConfig`.
        is_unlimited: the device cache holds all requests at once, and there is no host cache.
        has_all_cores: the device has the host's cores too.
    """

    name: str
    policy: str
    full_cache: str = "swap"
    is_unlimited: bool = False
    has_all_cores: bool = False


def parse_systems(text: str) -> list[System]:
    """Names with commas between them. Raises ConfigError for an unknown one, or one named twice."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SYSTEMS:
            raise ConfigError(f"unknown policy {name!r}; valid: {', '.join(SYSTEMS)}")
        if names.count(name) > 1:
            raise ConfigError(f"policy {name!r} is named twice")
    return [_system(name) for name in names]


def _system(name: str) -> System:
    if name in (UNLIMITED, ONE_TIER):
        return System(name=name, policy="device-only", is_unlimited=True, has_all_cores=name == ONE_TIER)
    policy, _, full_cache = name.partition(":")
    return System(name=name, policy=policy, full_cache=full_cache or "swap")
