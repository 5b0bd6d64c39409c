"""The interface between the runtime and the machine it runs on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from neo_compile._host_checks import IntArray
from neo_compile.checks import ANY_INTEGER, COUNT, POSITIVE, Numbers, check_choice, check_flags, check_numbers
from neo_compile.host_attention import AttentionPlan, BlockPairs, LayerCache, TokenRows

DEVICE_KINDS = ("auto", "emulated", "adversarial")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """How the machine is divided between the device and the host.

    Attributes:
        kind: `emulated` gives some cores of a CPU-only machine the part of the GPU; `auto` picks the only kind that
            can run here for work. `adversarial`, for tests, is an emulated one that delays and reorders all that it
            may, and has memory of its own.
        device_threads: cores of the emulated device (linear stages, prefill and device decode attention). `None`:
            half of the usable cores, or all of them when the engine has no host cache.
        host_threads: worker threads of host attention and of swaps. `None`: the usable cores that the device leaves.
        pin_threads: bind both sides to disjoint cores. Where binding is not allowed, a warning says so.
        swap_gbps: throttle of the copies between the tiers, GB/s, to play a link of that bandwidth. `None`: none.
        host_slowdown: host attention takes this many times as long as it would: 4 plays the ratio of a GPU's memory
            bandwidth to its host's.
        seed: of the adversarial device's choices; other devices make none.
    """

    kind: Literal["auto", "emulated", "adversarial"] = "auto"
    device_threads: int | None = None
    host_threads: int | None = None
    pin_threads: bool = True
    swap_gbps: float | None = None
    host_slowdown: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("DeviceConfig.kind", self.kind, DEVICE_KINDS)
        check_numbers(self, COUNT, "device_threads", "host_threads", or_none=True)
        check_flags(self, "pin_threads")
        check_numbers(self, POSITIVE, "swap_gbps", or_none=True)
        check_numbers(self, Numbers(at_least=1), "host_slowdown")
        check_numbers(self, ANY_INTEGER, "seed")


class Ticket(Protocol):
    """Work under way. Its results, and the times, are there once `wait` has returned."""

    @property
    def start_ns(self) -> int:
        """When it began, on the clock of `time.perf_counter_ns`."""
        ...

    @property
    def end_ns(self) -> int:
        """When it ended."""
        ...

    def wait(self) -> None:
        """Block until the work is done."""
        ...


class Workers(Protocol):
    """Threads that attend and copy; `host_attention.WorkerPool` is one.

    The executor relies on no order between submissions: whatever depends on an earlier one waits for its ticket first.
    Arguments are those of `WorkerPool`'s methods of the same names.
    """

    @property
    def parallelism(self) -> int:
        """Threads that share one submission."""
        ...

    def submit_layer(
        self,
        plan: AttentionPlan,
        layer: LayerCache,
        q: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        k_new: torch.Tensor | None = None,
        v_new: torch.Tensor | None = None,
    ) -> Ticket:
        """Start one layer's attention, which first appends k_new and v_new to the cache."""
        ...

    def submit_rows(
        self,
        plan: AttentionPlan,
        layer: LayerCache,
        rows: TokenRows,
        first_row: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Ticket:
        """Start one layer's attention for the plan's tokens from `first_row` of `rows` on."""
        ...

    def submit_copy(
        self, src: torch.Tensor, dst: torch.Tensor, pairs: IntArray | BlockPairs, max_gbps: float | None = None
    ) -> Ticket:
        """Start block copies dst[pairs[i, 1]] = src[pairs[i, 0]]."""
        ...

    def submit_first_touch(self, buffer: torch.Tensor) -> Ticket:
        """Start touching a fresh buffer, so that its memory lies near these threads."""
        ...

    def close(self) -> None:
        """Finish what is under way, then end the threads. Idempotent."""
        ...


class Device(Protocol):
    """One device beside its host.

    The *launching thread* is the one that calls `Engine.step`; while it is inside `launching()` it runs on the device's
    cores (emulated) or feeds the device's stream.
    """

    kind: str
    torch_device: torch.device
    device_threads: int
    host_threads: int
    attention_pool: Workers
    """Runs the device's attention, prefills and decodes, on the device's cores."""
    host_pool: Workers
    """Runs host decode attention and the copies between the tiers."""
    swap_gbps: float | None
    host_slowdown: float
    default_staging_blocks: int
    """Ring of blocks through which KV of host-bound prefills leaves; 0 where the device writes to the host's memory."""
    poisons_freed_blocks: bool
    """Whether blocks are filled with NaN once they are free, so that a late read shows (tests)."""

    def launching(self) -> AbstractContextManager[None]:
        """Bind the calling thread to the device's cores, and restore it afterwards."""
        ...

    def close(self) -> None:
        """Stop the worker threads. Idempotent."""
        ...
