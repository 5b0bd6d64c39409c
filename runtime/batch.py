"""Turns the scheduler's `SubBatch` into tensors: what the linear stages read and where attention finds its KV.

Tokens of a sub-batch lie in this order (T = all of them):

    | prefill chunk | prefill chunk | ... | device decodes | host decodes |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from neo_compile.attention import AttentionSite
from neo_compile.host_attention import DecodePlan, plan_decode
from neo_compile.runtime.kv_cache import Slots
from neo_compile.runtime.plan import ScheduledPrefill, SubBatch
from neo_compile.runtime.request import Request, Tier


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One prefill chunk: rows [row, row + num_tokens) of the sub-batch, tokens [start, ...) of its request."""

    tier: Tier
    row: int
    start: int
    num_tokens: int
    slots: Slots
    block_ids: torch.Tensor


class Geometry(NamedTuple):
    """What the partition of decode attention depends on in a site. Most models have one for all layers."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, site: AttentionSite) -> Geometry:
        """The geometry of a site."""
        return cls(site.num_q_heads, site.num_kv_heads, site.head_dim, site.v_head_dim)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode tokens of one tier: rows [row, row + num_requests), with the partition of their KV over the threads."""

    row: int
    num_requests: int
    plans: dict[Geometry, DecodePlan]


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """A sub-batch ready to run.

    Attributes:
        input_ids, position_ids: int64 [1, T].
        logit_rows: int64 [R], rows whose logits are computed; at least one, so row 0 stands in when no request of the
            sub-batch samples.
        sampling: the requests that the first `len(sampling)` logit rows belong to.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    sampling: tuple[Request, ...]
    prefills: tuple[PrefillChunk, ...]
    device_decodes: DecodeRows | None
    host_decodes: DecodeRows | None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[1]


def build_batch(
    sub_batch: SubBatch, *, block_size: int, num_threads: dict[Tier, int], geometries: Collection[Geometry]
) -> BatchTensors:
    """Tensors of `sub_batch`; block tables are read now, as the scheduler left them.

    Args:
        num_threads: how many threads share the decode attention of each tier.
        geometries: of the model's attention sites, each of which needs a partition of its own.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    sampling: list[Request] = []
    prefills: list[PrefillChunk] = []
    for scheduled in sub_batch.prefills:
        row, end = len(input_ids), scheduled.start + scheduled.num_tokens
        prefills.append(_prefill_chunk(scheduled, row, block_size))
        input_ids += scheduled.request.all_token_ids[scheduled.start : end]
        positions += range(scheduled.start, end)
        if scheduled.samples:
            logit_rows.append(len(input_ids) - 1)
            sampling.append(scheduled.request)
    decodes: dict[Tier, DecodeRows] = {}
    for tier, requests in ((Tier.DEVICE, sub_batch.device_decodes), (Tier.HOST, sub_batch.host_decodes)):
        if not requests:
            continue
        row = len(input_ids)
        for request in requests:
            logit_rows.append(len(input_ids))
            input_ids.append(request.output_token_ids[-1])
            positions.append(request.num_tokens - 1)
        sampling += requests
        plans = _plan_decodes(requests, block_size, num_threads[tier], geometries)
        decodes[tier] = DecodeRows(row, len(requests), plans)
    return BatchTensors(
        input_ids=torch.tensor([input_ids], dtype=torch.int64),
        position_ids=torch.tensor([positions], dtype=torch.int64),
        logit_rows=torch.tensor(logit_rows or [0], dtype=torch.int64),
        sampling=tuple(sampling),
        prefills=tuple(prefills),
        device_decodes=decodes.get(Tier.DEVICE),
        host_decodes=decodes.get(Tier.HOST),
    )


def _prefill_chunk(scheduled: ScheduledPrefill, row: int, block_size: int) -> PrefillChunk:
    block_ids = scheduled.request.block_ids
    return PrefillChunk(
        tier=scheduled.tier,
        row=row,
        start=scheduled.start,
        num_tokens=scheduled.num_tokens,
        slots=Slots.of(block_ids, scheduled.start, scheduled.num_tokens, block_size),
        block_ids=torch.tensor(block_ids, dtype=torch.int64),
    )


def _plan_decodes(
    requests: Sequence[Request], block_size: int, num_threads: int, geometries: Collection[Geometry]
) -> dict[Geometry, DecodePlan]:
    """Partition the decode attention of `requests` (contexts include their newest token) over `num_threads`."""
    context_lens = np.array([request.num_tokens for request in requests], dtype=np.int32)
    tables = [request.block_ids for request in requests]
    block_tables = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    return {
        geometry: plan_decode(
            block_tables, context_lens, block_size=block_size, num_threads=num_threads, **geometry._asdict()
        )
        for geometry in geometries
    }
