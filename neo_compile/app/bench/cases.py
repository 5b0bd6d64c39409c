"""One shape to measure, the memory its keys and values lie in, and the check that comes before any timing.

    arena   | slot 0 | slot 1 | slot 2 | ...      one buffer of random values, several times the last-level cache
            each slot holds the KV of one call; calls walk over the slots, so no call finds its KV in a cache

An implementation reads a slot as blocks or as one dense tensor. Both are views of the same bytes: nothing is copied,
and peers are measured in the layout that suits them. All requests of a case are equally long, so that padded peers
waste nothing. Legend: B requests, S tokens, Hq / Hkv query / KV heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_compile import reference
from neo_compile.app.bench.bandwidth import huge_page_buffer

# Largest error allowed, in parts of the largest value of the right result. Half-precision peers round the softmax's
# weights, and some accumulate in half precision.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 3e-2}
# Random values are made once and repeated; an odd length, so that no two blocks or rows hold the same.
_PATTERN_LENGTH = 3 * 2**20 + 12_347


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One decode step of one layer: B requests of S tokens each, the current one included."""

    dtype: str
    batch: int
    context_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    is_scattered: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of q, K, V and the output."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def scale(self) -> float:
        """The usual 1 / sqrt(D)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def blocks_per_request(self) -> int:
        """Blocks that S tokens take."""
        return -(-self.context_len // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read."""
        return 2 * self.batch * self.context_len * self.num_kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: the same in whole blocks, in whole pages of 4 KiB."""
        padded = self.kv_bytes // self.context_len * self.blocks_per_request * self.block_size
        return -(-padded // 4096) * 4096

    def gbps(self, microseconds: float) -> float:
        """Bytes of keys and values per time, in GB/s."""
        return self.kv_bytes / microseconds / 1e3

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads}"
        return f"{self.dtype} batch {self.batch} x {self.context_len} tokens, heads {heads} x {self.head_dim}"


class KVArena:
    """Random KV for calls of one case, on huge pages, and the queries.

    Args:
        case: the shape.
        min_bytes: how much memory the calls shall walk over; at least one slot is made.
    """

    def __init__(self, case: KernelCase, min_bytes: int) -> None:
        self.case = case
        self.num_slots = max(1, -(-min_bytes // case.slot_bytes))
        self._memory = huge_page_buffer(self.num_slots * case.slot_bytes)
        generator = torch.Generator().manual_seed(0)
        pattern = torch.randn(_PATTERN_LENGTH, generator=generator).to(case.torch_dtype)
        values = self._memory.view(case.torch_dtype)
        for start in range(0, values.numel(), _PATTERN_LENGTH):
            values[start : start + _PATTERN_LENGTH] = pattern[: values.numel() - start]
        self.q_BHD = torch.randn(case.batch, case.num_q_heads, case.head_dim, generator=generator).to(case.torch_dtype)
        self.block_tables = self._make_block_tables(generator)
        self.context_lens = torch.full((case.batch,), case.context_len, dtype=torch.int32)

    def _make_block_tables(self, generator: torch.Generator) -> Tensor:
        num_blocks = self.case.batch * self.case.blocks_per_request
        ids = torch.randperm(num_blocks, generator=generator) if self.case.is_scattered else torch.arange(num_blocks)
        return ids.to(torch.int32).view(self.case.batch, -1)

    def _values(self, slot: int) -> Tensor:
        num_bytes = self.case.slot_bytes
        return self._memory[slot * num_bytes : (slot + 1) * num_bytes].view(self.case.torch_dtype)

    def paged(self, slot: int) -> tuple[Tensor, Tensor]:
        """K and V of a slot as blocks, [num_blocks, Hkv, block_size, D] each; K and V of a block side by side."""
        case = self.case
        shape = (case.batch * case.blocks_per_request, case.num_kv_heads, 2, case.block_size, case.head_dim)
        pool = self._values(slot)[: math.prod(shape)].view(shape)
        return pool[:, :, 0], pool[:, :, 1]

    def dense(self, slot: int) -> tuple[Tensor, Tensor]:
        """K and V of a slot as [B, Hkv, S, D] each, contiguous."""
        case = self.case
        shape = (2, case.batch, case.num_kv_heads, case.context_len, case.head_dim)
        k, v = self._values(slot)[: math.prod(shape)].view(shape)
        return k, v

    def expected(self, layout: str, slot: int) -> Tensor:
        """The right result of a call on a slot read as "paged" or "dense", float64 [B, Hq, D]."""
        case = self.case
        if layout == "paged":
            tables, lens = self.block_tables, self.context_lens
            return reference.paged_decode_reference(self.q_BHD, *self.paged(slot), tables, lens, case.scale)
        k_BHSD, v_BHSD = self.dense(slot)
        rows = [
            reference.attend(q_HD.unsqueeze(1), k_HSD, v_HSD, case.scale)[:, 0]
            for q_HD, k_HSD, v_HSD in zip(self.q_BHD, k_BHSD, v_BHSD, strict=True)
        ]
        return torch.stack(rows)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The largest difference in parts of the largest expected value; NaN counts as infinite."""
    error = ((result.double() - expected).abs().max() / expected.abs().max()).item()
    return math.inf if math.isnan(error) else error
