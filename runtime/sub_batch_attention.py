"""Attention of one sub-batch at its sites, in both tiers: the host part is begun first and awaited last."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from neo_compile.attention import AttentionSite
from neo_compile.host_attention import TokenRows
from neo_compile.runtime.batch import BatchTensors, Geometry, PlannedRows, StagedChunk
from neo_compile.runtime.device import Device, Ticket, Workers
from neo_compile.runtime.kv_cache import KVCache
from neo_compile.runtime.prefill import attend_chunk
from neo_compile.runtime.request import Tier
from neo_compile.runtime.staging import Staging
from neo_compile.runtime.swap import LayerCopies
from neo_compile.runtime.timeline import Timeline


@dataclass(frozen=True, slots=True)
class IterationContext:
    """What the sub-batches of one iteration share.

    Attributes:
        copies: block copies that each layer's attention waits for.
        staging: the way of host-bound KV off the device; None where the device writes to the host's memory.
        timeline: records the iteration's intervals; None: nothing is recorded.
        iteration: its number.
    """

    device: Device
    caches: dict[Tier, KVCache]
    copies: LayerCopies
    staging: Staging | None
    timeline: Timeline | None
    iteration: int


@dataclass(slots=True)
class _Begun:
    """Attention of one site, begun: the output (device rows are in it), and the host rows' ticket."""

    out: torch.Tensor
    host_ticket: Ticket | None
    site_index: int


class SubBatchAttention:
    """The attention handler of one sub-batch: begins host rows on the host pool, computes device rows, then waits."""

    def __init__(self, context: IterationContext, batch: BatchTensors, index: int) -> None:
        self._context = context
        self._batch = batch
        self._index = index
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}
        self.device_attention_ns = 0
        self.prefill_attention_ns = 0
        self.host_attention_ns = 0
        self.wait_ns = 0
        self.copy_wait_ns = 0
        self._in_flight: Ticket | None = None

    def begin(
        self,
        site: AttentionSite,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> _Begun:
        """Store this site's K and V, start the host rows' attention, and compute the device rows'."""
        batch = self._batch
        if not self._context.copies.is_done:
            self._wait_copies(site.index)
        out = self._output(site, q_THD)
        rows = TokenRows(q_THD, k_THD, v_THD, out)
        sinks = None if sinks is None else sinks.float()
        host_ticket = None
        if batch.host_decodes is not None:
            host_ticket = self._submit(self._context.device.host_pool, batch.host_decodes, site, rows, sinks)
            self._in_flight = host_ticket
        start_ns = time.perf_counter_ns()
        device_pool = self._context.device.attention_pool
        for planned in batch.prefills:
            self._submit(device_pool, planned, site, rows, sinks).wait()
        for chunk in batch.staged_prefills:
            self._prefill_staged(chunk, site, rows, sinks)
        has_prefills = bool(batch.prefills or batch.staged_prefills)
        if has_prefills:
            self.prefill_attention_ns += time.perf_counter_ns() - start_ns
        if batch.device_decodes is not None:
            self._submit(device_pool, batch.device_decodes, site, rows, sinks).wait()
        if has_prefills or batch.device_decodes is not None:
            end_ns = time.perf_counter_ns()
            self.device_attention_ns += end_ns - start_ns
            self._record("device", "device attention", site.index, start_ns, end_ns)
        return _Begun(out, host_ticket, site.index)

    def finish(self, begun: _Begun) -> torch.Tensor:
        """Wait for the host rows, if any; all rows of the site's output, [T, num_q_heads, v_head_dim]."""
        ticket = begun.host_ticket
        if ticket is not None:
            start_ns = time.perf_counter_ns()
            ticket.wait()
            self._in_flight = None
            end_ns = time.perf_counter_ns()
            self.wait_ns += end_ns - start_ns
            self.host_attention_ns += ticket.end_ns - ticket.start_ns
            self._record("device", "wait", begun.site_index, start_ns, end_ns)
            self._record("host", "host attention", begun.site_index, ticket.start_ns, ticket.end_ns)
        return begun.out

    def drain(self) -> None:
        """After a failure: wait for host attention that nobody will finish, while its tensors are alive."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None

    def _wait_copies(self, layer: int) -> None:
        """Wait for the block copies of `layer`: this layer's KV is read and written from here on."""
        start_ns = time.perf_counter_ns()
        self._context.copies.wait(layer)
        end_ns = time.perf_counter_ns()
        self.wait_ns += end_ns - start_ns
        self.copy_wait_ns += end_ns - start_ns
        self._record("device", "wait", layer, start_ns, end_ns, "wait for swap")

    def on_stage(self, stage: int, start_ns: int, end_ns: int) -> None:
        """Record one linear stage (called by the staged model when a timeline is attached)."""
        self._record("device", "linear", stage, start_ns, end_ns)

    def _output(self, site: AttentionSite, q_THD: torch.Tensor) -> torch.Tensor:
        """The output buffer of a site. A site's output is dead once the next stage has read it: one serves all."""
        key = (site.num_q_heads, site.v_head_dim)
        if key not in self._outputs:
            self._outputs[key] = torch.empty((q_THD.shape[0], *key), dtype=q_THD.dtype, device=q_THD.device)
        return self._outputs[key]

    def _submit(
        self, pool: Workers, planned: PlannedRows, site: AttentionSite, rows: TokenRows, sinks: torch.Tensor | None
    ) -> Ticket:
        """Start the attention of `planned` rows; it first writes their K and V to the cache of their tier."""
        plans = planned.plans
        plan = next(iter(plans.values())) if len(plans) == 1 else plans[Geometry.of(site)]
        return pool.submit_rows(
            plan,
            self._context.caches[planned.tier].layer(site.index),
            rows,
            planned.row,
            scale=site.scale,
            window=site.window,
            softcap=site.softcap,
            sinks=sinks,
        )

    def _prefill_staged(
        self, chunk: StagedChunk, site: AttentionSite, rows: TokenRows, sinks: torch.Tensor | None
    ) -> None:
        """Send a chunk's K and V on their way to the host, and compute its attention from the device's copy."""
        staging = self._context.staging
        assert staging is not None
        q, k, v, out = (tensor[chunk.row : chunk.row + chunk.num_tokens] for tensor in rows.tensors)
        k_HSD, v_HSD = staging.store(site.index, chunk, k, v)
        out.copy_(attend_chunk(site, q, k_HSD, v_HSD, sinks))

    def _record(
        self, lane: str, category: str, layer: int, start_ns: int, end_ns: int, label: str | None = None
    ) -> None:
        timeline, iteration = self._context.timeline, self._context.iteration
        if timeline is not None:
            timeline.add(lane, category, start_ns, end_ns, iteration, layer, self._index, label)
