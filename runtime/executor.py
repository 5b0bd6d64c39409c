"""Runs one `IterationPlan`: swaps, linear stages, attention in both tiers, two sub-batches interleaved.

A sub-batch is a coroutine that yields right after it has *begun* its attention and finishes it when resumed. Resuming
two of them in turn is the paper's pipeline (section 3.2):

    device | S1 b0 | ga b0 | S1 b1 | ...             S: linear stage, ga / ca: device / host attention
    host   |   ca b1 (site 0)  | ca b0 (site 1) |    b0, b1: the sub-batches

One coroutine alone is a sequential iteration; host attention then only overlaps the device attention of its own site.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from neo_compile.runtime.batch import BatchLayout, BatchTensors, Geometry, build_batch, sampling_requests
from neo_compile.runtime.device import Device, Ticket
from neo_compile.runtime.kv_cache import KVCache
from neo_compile.runtime.plan import IterationPlan, Swap
from neo_compile.runtime.request import Request, Tier
from neo_compile.runtime.staging import Staging
from neo_compile.runtime.sub_batch_attention import IterationContext, SubBatchAttention
from neo_compile.runtime.swap import LayerCopies
from neo_compile.runtime.timeline import Timeline
from neo_compile.staged import StagedModel

_SEEN_WAIT = 0.1  # a wait below this share of the host attention says nothing: it may have been done before


@dataclass(slots=True)
class IterationTimes:
    """Milliseconds of one iteration, over all layers, as measured on the launching thread and the host pool.

    Attributes:
        total_ms: from the first copy to the logits.
        device_attention_ms: of each sub-batch, its prefills (also apart, in `prefill_attention_ms`) included.
        wait_ms: the launching thread's waiting, for host attention and for copies (those also apart, in
            `copy_wait_ms`).
        sampling_ms: from the logits to the requests' tokens, after `total_ms`.
    """

    total_ms: float = 0.0
    device_attention_ms: list[float] = field(default_factory=list)
    prefill_attention_ms: list[float] = field(default_factory=list)
    host_attention_ms: list[float] = field(default_factory=list)
    wait_ms: float = 0.0
    copy_wait_ms: float = 0.0
    sampling_ms: float = 0.0

    def parts(self) -> dict[str, float]:
        """The parts that correct the cost model, by their names there, where this iteration shows them apart.

        "linear" is all that the launching thread did beside device attention and waiting.
        """
        device_ms, prefill_ms = sum(self.device_attention_ms), sum(self.prefill_attention_ms)
        parts = {
            "linear": self.total_ms - device_ms - self.wait_ms,
            "prefill_attention": prefill_ms,
            "device_attention": device_ms - prefill_ms,
            "host_attention": sum(self.host_attention_ms),
            "launch": self._launch_ms(),
            "sampling": self.sampling_ms,
        }
        return {part: part_ms for part, part_ms in parts.items() if part_ms > 0}

    def _launch_ms(self) -> float:
        """How much longer host attention took for the launching thread than by its tickets; 0 where it is not seen.

        It is seen where it was waited for, by a single sub-batch: the wait began after its device attention.
        """
        host_wait_ms = self.wait_ms - self.copy_wait_ms
        if len(self.host_attention_ms) != 1 or host_wait_ms <= _SEEN_WAIT * self.host_attention_ms[0]:
            return 0.0
        return host_wait_ms + self.device_attention_ms[0] - self.host_attention_ms[0]


@dataclass(frozen=True, slots=True)
class IterationResult:
    """Logits of the requests that sample in this iteration.

    Attributes:
        logits: [R, vocab] of each sub-batch; their rows, one after the other, belong to `requests`.
    """

    requests: tuple[Request, ...]
    logits: tuple[torch.Tensor, ...]
    times: IterationTimes


class Executor:
    """Owns the two caches and drives the staged model through them.

    Args:
        staged: the captured model.
        device: where linear stages and device attention run, with its host pool.
        caches: the memory of both tiers.
        staging_blocks: size of the ring through which KV of host-bound prefills leaves the device; None is the
            device's default, which is no ring where the host's memory is the device's own.
    """

    def __init__(
        self, staged: StagedModel, device: Device, caches: dict[Tier, KVCache], *, staging_blocks: int | None = None
    ) -> None:
        self.staged = staged
        self.device = device
        self.caches = caches
        num_staging = device.default_staging_blocks if staging_blocks is None else staging_blocks
        self.staging = Staging(staged.sites, num_staging, caches[Tier.HOST], device) if num_staging else None
        self.timeline: Timeline | None = None
        self.iteration = 0
        self.layout = BatchLayout(
            block_size=caches[Tier.DEVICE].block_size,
            num_threads={
                Tier.DEVICE: device.attention_pool.parallelism,
                Tier.HOST: device.host_pool.parallelism,
            },
            geometries=frozenset(Geometry.of(site) for site in staged.sites),
            staged_tiers=() if self.staging is None else (Tier.HOST,),
        )

    def execute(self, plan: IterationPlan) -> IterationResult:
        """Run `plan` and return the logits of the requests that sample. Call inside `device.launching()`."""
        start_ns = time.perf_counter_ns()
        copies = self._start_swaps((*plan.swap_outs, *plan.swap_ins))
        sub_batches = [sub_batch for sub_batch in plan.sub_batches if sub_batch.num_requests]
        requests = tuple(request for sub_batch in sub_batches for request in sampling_requests(sub_batch))
        try:
            batches = [build_batch(sub_batch, self.layout) for sub_batch in sub_batches]
        except BaseException:
            copies.finish()
            raise
        logits, times = self.run_batches(batches, copies, start_ns=start_ns)
        return IterationResult(requests, logits, times)

    def run_batches(
        self, batches: Sequence[BatchTensors], copies: LayerCopies | None = None, *, start_ns: int | None = None
    ) -> tuple[tuple[torch.Tensor, ...], IterationTimes]:
        """Run one or two sub-batches as one iteration. Call inside `device.launching()`.

        Args:
            copies: block copies that each layer's attention waits for; all are done when this returns.
            start_ns: when the iteration began, of `time.perf_counter_ns`; None is now.

        Returns:
            The wanted logits of each sub-batch, [R, vocabulary], and what the iteration took.
        """
        self.iteration += 1
        start_ns = time.perf_counter_ns() if start_ns is None else start_ns
        copies = self._start_swaps(()) if copies is None else copies
        context = IterationContext(self.device, self.caches, copies, self.staging, self.timeline, self.iteration)
        handlers = [SubBatchAttention(context, batch, index) for index, batch in enumerate(batches)]
        launched_ns = time.perf_counter_ns()
        try:
            logits = self._run(batches, handlers, copies)
        finally:
            computed_ns = time.perf_counter_ns()
            for handler in handlers:
                handler.drain()
            copies.finish()
            staged_copies = [] if self.staging is None else self.staging.finish()
        end_ns = time.perf_counter_ns()
        if self.timeline is not None:
            self._record_iteration(start_ns, launched_ns, computed_ns, end_ns)
            self._record_copies("swap", list(enumerate(copies.tickets)))
            self._record_copies("staging", staged_copies)
        times = _times(handlers, end_ns - start_ns)
        times.wait_ms += (end_ns - computed_ns) / 1e6
        times.copy_wait_ms += (end_ns - computed_ns) / 1e6
        return logits, times

    def _start_swaps(self, swaps: Sequence[Swap]) -> LayerCopies:
        return LayerCopies.of_swaps(
            swaps,
            self.caches,
            self.device.host_pool,
            self.device.swap_gbps,
            poisons_source=self.device.poisons_freed_blocks,
        )

    def _run(
        self, batches: Sequence[BatchTensors], handlers: list[SubBatchAttention], copies: LayerCopies
    ) -> tuple[torch.Tensor, ...]:
        """Drive the sub-batches' coroutines in turn until all have ended; the wanted logits of each, [R, vocab]."""
        loaded = self.staged.load()
        running = dict(enumerate(self._coroutine(b, h, loaded) for b, h in zip(batches, handlers, strict=True)))
        outputs: list[torch.Tensor] = [torch.empty(0)] * len(batches)
        try:
            while running:
                for index, coroutine in list(running.items()):
                    try:
                        next(coroutine)
                    except StopIteration as stop:
                        outputs[index] = stop.value[0][0, : batches[index].num_logits]
                        del running[index]
                copies.submit_next()  # all host attention of this layer is ahead of it in the queue
        finally:
            for coroutine in running.values():
                coroutine.close()
        return tuple(outputs)

    def _coroutine(
        self, batch: BatchTensors, handler: SubBatchAttention, loaded: Sequence[Any]
    ) -> Generator[None, None, tuple[torch.Tensor, ...]]:
        return self.staged.coroutine(
            handler,
            loaded=loaded,
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            logit_rows=batch.logit_rows,
            on_stage=handler.on_stage if self.timeline is not None else None,
        )

    def _record_iteration(self, start_ns: int, launched_ns: int, computed_ns: int, end_ns: int) -> None:
        """What the launching thread does before the first and after the last linear stage."""
        assert self.timeline is not None
        self.timeline.add("device", "other", start_ns, launched_ns, self.iteration, label="prepare")
        self.timeline.add("device", "other", computed_ns, end_ns, self.iteration, label="finish")

    def _record_copies(self, category: str, copies: Sequence[tuple[int, Ticket]]) -> None:
        assert self.timeline is not None
        for layer, ticket in copies:
            self.timeline.add("host", category, ticket.start_ns, ticket.end_ns, self.iteration, layer=layer)


def _times(handlers: list[SubBatchAttention], total_ns: int) -> IterationTimes:
    times = IterationTimes(total_ms=total_ns / 1e6)
    for handler in handlers:
        times.device_attention_ms.append(handler.device_attention_ns / 1e6)
        times.prefill_attention_ms.append(handler.prefill_attention_ns / 1e6)
        times.host_attention_ms.append(handler.host_attention_ns / 1e6)
        times.wait_ms += handler.wait_ns / 1e6
        times.copy_wait_ms += handler.copy_wait_ns / 1e6
    return times
