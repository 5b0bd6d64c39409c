"""The interface between the runtime and the machine it runs on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from neo_compile.errors import ConfigError
from neo_compile.host_attention import WorkerPool

DEVICE_KINDS = ("auto", "emulated")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """How the machine is divided between the device and the host.

    Attributes:
        kind: `emulated` gives some cores of a CPU-only machine the part of the GPU; `auto` picks the only kind that
            can run here.
        device_threads: cores of the emulated device (linear stages, prefill and device decode attention). `None`:
            half of the usable cores, or all of them when the engine has no host cache.
        host_threads: worker threads of host attention and of swaps. `None`: the usable cores that the device leaves.
        pin_threads: bind both sides to disjoint cores. Where binding is not allowed, a warning says so.
        swap_gbps: throttle of the copies between the tiers, GB/s, to play a link of that bandwidth. `None`: none.
    """

    kind: Literal["auto", "emulated"] = "auto"
    device_threads: int | None = None
    host_threads: int | None = None
    pin_threads: bool = True
    swap_gbps: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            raise ConfigError(f"unknown device kind {self.kind!r}: valid kinds are {', '.join(DEVICE_KINDS)}")
        for name in ("device_threads", "host_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"DeviceConfig.{name} must be at least 1, got {value}")
        if self.swap_gbps is not None and not self.swap_gbps > 0:
            raise ConfigError(f"DeviceConfig.swap_gbps must be positive, got {self.swap_gbps}")


class Device(Protocol):
    """One device beside its host.

    The *launching thread* is the one that calls `Engine.step`; while it is inside `launching()` it runs on the device's
    cores (emulated) or feeds the device's stream.
    """

    kind: str
    torch_device: torch.device
    device_threads: int
    host_threads: int
    attention_pool: WorkerPool
    """Runs device decode attention (work submitted here is finished when `wait` returns, computed by device cores)."""
    host_pool: WorkerPool
    """Runs host decode attention and the copies between the tiers, in submission order."""
    swap_gbps: float | None

    def launching(self) -> AbstractContextManager[None]:
        """Bind the calling thread to the device's cores, and restore it afterwards."""
        ...

    def close(self) -> None:
        """Stop the worker threads. Idempotent."""
        ...
