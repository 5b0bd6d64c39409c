"""A CPU-only machine that plays a device and its host on disjoint cores.

    cores   0 .. D-1                              D .. D+H-1
            launching thread (+ torch's and       host pool: decode attention of offloaded
            the attention pool's threads):        requests, copies between the tiers
            linear stages, prefill and device
            decode attention

Nothing is simulated: the same scheduler, executor and kernels run as beside a GPU, only the proportions differ (device
and host attention have the same bandwidth per core here; beside a real GPU the device is 3-6 times faster, which
`host_slowdown` plays).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from neo_compile import _native
from neo_compile.errors import ConfigError
from neo_compile.host_attention import WorkerPool
from neo_compile.runtime.device.adversarial import AdversarialDevice
from neo_compile.runtime.device.base import Device, DeviceConfig, Workers

logger = logging.getLogger(__name__)


class EmulatedDevice:
    """See the module's docstring.

    Args:
        device_threads: cores that play the device, the launching thread's own included.
        host_threads: cores of the host pool.
        cpus: the cores to divide, device first. With fewer cores than threads both sides share, unpinned.
        swap_gbps: throttle of the copies between the tiers, GB/s.
        host_slowdown: how many times as long as it would host attention takes.
    """

    kind = "emulated"
    default_staging_blocks = 0
    poisons_freed_blocks = False

    def __init__(
        self,
        *,
        device_threads: int,
        host_threads: int,
        cpus: list[int],
        pin_threads: bool = True,
        swap_gbps: float | None = None,
        host_slowdown: float = 1.0,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.device_threads = device_threads
        self.host_threads = host_threads
        self.swap_gbps = swap_gbps
        self.host_slowdown = host_slowdown
        self._device_cpus: set[int] | None = None
        host_cpus: list[int] | None = None
        if pin_threads and device_threads + host_threads <= len(cpus):
            self._device_cpus = set(cpus[:device_threads])
            host_cpus = cpus[device_threads : device_threads + host_threads]
        elif pin_threads:
            logger.warning(
                "%d device and %d host threads share %d cores: nothing is pinned and overlap is limited",
                device_threads,
                host_threads,
                len(cpus),
            )
        device_pool_cpus = cpus[1:device_threads] if self._device_cpus is not None and device_threads > 1 else None
        self.attention_pool: Workers = WorkerPool(device_threads - 1, cpus=device_pool_cpus, participate=True)
        self.host_pool: Workers = WorkerPool(host_threads, cpus=host_cpus, slowdown=host_slowdown)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Bind the calling thread, and torch's thread count, to the device's cores; restore both afterwards."""
        num_threads = torch.get_num_threads()
        affinity = os.sched_getaffinity(0) if self._device_cpus is not None else None
        try:
            if affinity is not None and self._device_cpus is not None:
                self._set_affinity(self._device_cpus)
            if num_threads != self.device_threads:
                torch.set_num_threads(self.device_threads)
            yield
        finally:
            if num_threads != self.device_threads:
                torch.set_num_threads(num_threads)
            if affinity is not None:
                self._set_affinity(affinity)

    def _set_affinity(self, cpus: set[int]) -> None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            logger.warning("cannot bind the launching thread to cores %s: %s", sorted(cpus), error)
            self._device_cpus = None

    def close(self) -> None:
        """Stop the worker threads. Idempotent."""
        self.attention_pool.close()
        self.host_pool.close()


def open_device(config: DeviceConfig, *, has_host_cache: bool) -> Device:
    """Open the device that `config` describes.

    Args:
        has_host_cache: whether any request can live on the host. Without one, the default is a device of all cores.

    Raises:
        ConfigError: more threads than usable cores.
    """
    cpus = _native.usable_cpus()
    num_device = config.device_threads
    num_host = config.host_threads
    if num_device is None:
        spare = max(1, len(cpus) - num_host) if num_host is not None else max(1, len(cpus) // 2)
        num_device = spare if has_host_cache else len(cpus)
    if num_host is None:
        num_host = max(1, len(cpus) - num_device)
    for name, value in (("device_threads", num_device), ("host_threads", num_host)):
        if value > len(cpus):
            raise ConfigError(
                f"DeviceConfig.{name} is {value}, but this process may use {len(cpus)} cores "
                "(affinity and cgroup quota)"
            )
    device = EmulatedDevice(
        device_threads=num_device,
        host_threads=num_host,
        cpus=cpus,
        pin_threads=config.pin_threads and has_host_cache,
        swap_gbps=config.swap_gbps,
        host_slowdown=config.host_slowdown,
    )
    return AdversarialDevice(device, config.seed) if config.kind == "adversarial" else device
