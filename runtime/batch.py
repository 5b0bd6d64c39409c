"""Turns rows of tokens into tensors: what the linear stages read and where attention finds its KV.

A *row* is one sequence with a block table: a request of the scheduler, or a row of `generate`'s batch. `assemble` takes
plain rows; `build_batch` makes them from the scheduler's `SubBatch`. Tokens lie in this order (T = all of them):

    | prefill chunk | prefill chunk | ... | device decodes | host decodes |

Neighbouring chunks of one tier share a plan and are attended together, as the decodes of a tier are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from neo_compile.attention import AttentionSite
from neo_compile.host_attention import AttentionPlan, plan_decode, plan_varlen
from neo_compile.runtime.plan import SubBatch
from neo_compile.runtime.request import Request, Tier

_DECODE_ORDER = (Tier.DEVICE, Tier.HOST)
_PREFILL_SHARE_BYTES = 1 << 14  # a prompt's KV is small beside the arithmetic on it: threads share it sooner


class ChunkRow(NamedTuple):
    """Tokens [start, start + len(token_ids)) of one row, computed together.

    Attributes:
        block_ids: the row's block table, at least up to the chunk's end.
        logit_rows: tokens of the chunk whose logits are wanted, counted from its beginning.
        positions: position ids where they are not start, start + 1, ...
    """

    tier: Tier
    start: int
    token_ids: Sequence[int] | NDArray[np.int64]
    block_ids: Sequence[int] | NDArray[np.int32]
    logit_rows: Sequence[int] | NDArray[np.int64]
    positions: NDArray[np.int64] | None = None


class DecodeTable(NamedTuple):
    """One new token of each of n rows of a tier; logits of all are wanted.

    Attributes:
        token_ids: int64 [n].
        context_lens: int32 [n], the new token included.
        block_tables: int32 [n, max_blocks]; entries past a row's length are never read.
        positions: int64 [n] where the position ids are not context_lens - 1.
    """

    token_ids: NDArray[np.int64]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    positions: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """A prefill chunk whose KV reaches its tier through the staging ring.

    Rows [row, row + num_tokens) of the sub-batch, tokens [start, ...) of its request, whose block table is `block_ids`.
    """

    row: int
    start: int
    num_tokens: int
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
class PlannedRows:
    """Rows [row, row + num_tokens) with KV in one tier, and the partition of their attention over the threads."""

    tier: Tier
    row: int
    num_tokens: int
    plans: dict[Geometry, AttentionPlan]


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """A sub-batch ready to run.

    Attributes:
        input_ids, position_ids: int64 [1, T].
        logit_rows: int64 [R], rows whose logits are computed, in the order of the rows; at least one, so row 0 stands
            in when no logits are wanted.
        num_logits: how many of `logit_rows` are wanted.
        prefills: runs of neighbouring chunks of one tier.
        staged_prefills: the chunks of the layout's `staged_tiers`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    num_logits: int
    prefills: tuple[PlannedRows, ...]
    staged_prefills: tuple[StagedChunk, ...]
    device_decodes: PlannedRows | None
    host_decodes: PlannedRows | None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """What all batches of one executor share.

    Attributes:
        num_threads: how many threads share the decode attention of each tier; the device's share prefills too.
        geometries: of the model's attention sites, each of which needs a partition of its own.
        staged_tiers: tiers that the device cannot address: KV of prefills goes there through the staging ring.
    """

    block_size: int
    num_threads: Mapping[Tier, int]
    geometries: Collection[Geometry]
    staged_tiers: Collection[Tier] = ()


def assemble(chunks: Sequence[ChunkRow], decodes: Mapping[Tier, DecodeTable], layout: BatchLayout) -> BatchTensors:
    """Tensors of prefill chunks and decodes; block tables are copied."""
    token_ids: list[Any] = []
    positions: list[Any] = []
    logit_rows: list[Any] = []
    first_rows: list[int] = []
    num_tokens = 0
    for chunk in chunks:
        first_rows.append(num_tokens)
        length = len(chunk.token_ids)
        token_ids.append(chunk.token_ids)
        contiguous = chunk.positions is None
        positions.append(np.arange(chunk.start, chunk.start + length) if contiguous else chunk.positions)
        if len(chunk.logit_rows):
            logit_rows.append(np.asarray(chunk.logit_rows) + num_tokens)
        num_tokens += length
    rows: dict[Tier, PlannedRows] = {}
    for tier in _DECODE_ORDER:
        table = decodes.get(tier)
        if table is None or not len(table.token_ids):
            continue
        num_rows = len(table.token_ids)
        token_ids.append(table.token_ids)
        positions.append(table.context_lens - 1 if table.positions is None else table.positions)
        logit_rows.append(np.arange(num_tokens, num_tokens + num_rows))
        rows[tier] = PlannedRows(tier, num_tokens, num_rows, _plan_decodes(table, tier, layout))
        num_tokens += num_rows
    wanted = _concatenate(logit_rows)
    prefills, staged_prefills = _place_chunks(chunks, first_rows, layout)
    return BatchTensors(
        input_ids=torch.from_numpy(_concatenate(token_ids)).unsqueeze(0),
        position_ids=torch.from_numpy(_concatenate(positions)).unsqueeze(0),
        logit_rows=torch.from_numpy(wanted if len(wanted) else np.zeros(1, dtype=np.int64)),
        num_logits=len(wanted),
        prefills=prefills,
        staged_prefills=staged_prefills,
        device_decodes=rows.get(Tier.DEVICE),
        host_decodes=rows.get(Tier.HOST),
    )


def build_batch(sub_batch: SubBatch, layout: BatchLayout) -> BatchTensors:
    """Tensors of a sub-batch of the scheduler; block tables are read now, as it left them."""
    chunks = []
    for scheduled in sub_batch.prefills:
        request, start, end = scheduled.request, scheduled.start, scheduled.start + scheduled.num_tokens
        logit_rows = [scheduled.num_tokens - 1] if scheduled.samples else []
        token_ids = request.all_token_ids[start:end]
        chunks.append(ChunkRow(scheduled.tier, start, token_ids, request.block_ids, logit_rows))
    decodes = {
        tier: _decode_table(requests)
        for tier, requests in ((Tier.DEVICE, sub_batch.device_decodes), (Tier.HOST, sub_batch.host_decodes))
        if requests
    }
    return assemble(chunks, decodes, layout)


def sampling_requests(sub_batch: SubBatch) -> tuple[Request, ...]:
    """The requests that the logits of `build_batch(sub_batch)` belong to, in order."""
    prefilled = (scheduled.request for scheduled in sub_batch.prefills if scheduled.samples)
    return (*prefilled, *sub_batch.device_decodes, *sub_batch.host_decodes)


def _decode_table(requests: Sequence[Request]) -> DecodeTable:
    """The newest token of each request (contexts include it)."""
    return DecodeTable(
        np.array([request.output_token_ids[-1] for request in requests], dtype=np.int64),
        np.array([request.num_tokens for request in requests], dtype=np.int32),
        _block_tables([request.block_ids for request in requests]),
    )


def _block_tables(tables: Sequence[Sequence[int] | NDArray[np.int32]]) -> NDArray[np.int32]:
    """int32 [n, the longest]; entries past a table's end are 0."""
    block_tables = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    return block_tables


def _place_chunks(
    chunks: Sequence[ChunkRow], first_rows: Sequence[int], layout: BatchLayout
) -> tuple[tuple[PlannedRows, ...], tuple[StagedChunk, ...]]:
    """A plan for each run of chunks in the same tier; chunks of staged tiers each by itself."""
    planned, staged = [], []
    for tier, run in groupby(zip(chunks, first_rows, strict=True), key=lambda placed: placed[0].tier):
        members = list(run)
        if tier in layout.staged_tiers:
            for chunk, row in members:
                block_ids = torch.as_tensor(chunk.block_ids, dtype=torch.int64)
                staged.append(StagedChunk(row, chunk.start, len(chunk.token_ids), block_ids))
            continue
        of_tier = [chunk for chunk, _ in members]
        num_threads = layout.num_threads[Tier.DEVICE]  # which computes all prefills
        plans = {
            geometry: plan_chunks(of_tier, geometry, block_size=layout.block_size, num_threads=num_threads)
            for geometry in layout.geometries
        }
        planned.append(PlannedRows(tier, members[0][1], sum(len(chunk.token_ids) for chunk in of_tier), plans))
    return tuple(planned), tuple(staged)


def plan_chunks(chunks: Sequence[ChunkRow], geometry: Geometry, *, block_size: int, num_threads: int) -> AttentionPlan:
    """Partition the attention of chunks, one after the other in q, over the device's threads."""
    num_tokens = [len(chunk.token_ids) for chunk in chunks]
    return plan_varlen(
        _block_tables([chunk.block_ids for chunk in chunks]),
        np.array([chunk.start + num for chunk, num in zip(chunks, num_tokens, strict=True)], dtype=np.int32),
        np.cumsum([0, *num_tokens], dtype=np.int32),
        block_size=block_size,
        num_threads=num_threads,
        min_share_bytes=_PREFILL_SHARE_BYTES,
        **geometry._asdict(),
    )


def _plan_decodes(table: DecodeTable, tier: Tier, layout: BatchLayout) -> dict[Geometry, AttentionPlan]:
    """Partition the decode attention of a tier's rows over its threads."""
    return {
        geometry: plan_decode(
            table.block_tables,
            table.context_lens,
            block_size=layout.block_size,
            num_threads=layout.num_threads[tier],
            **geometry._asdict(),
        )
        for geometry in layout.geometries
    }


def _concatenate(parts: Sequence[Any]) -> NDArray[np.int64]:
    """One int64 vector, a copy (what is given may be the caller's, and not writable)."""
    if not parts:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate(parts, dtype=np.int64, casting="same_kind")
