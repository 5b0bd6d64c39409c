"""Random paged attention problems in which everything that must not be read is NaN or an absurd block id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from neo_compile.host_attention import AttentionPlan, Ticket, WorkerPool, plan_decode, plan_varlen
from neo_compile.reference import paged_decode_reference, paged_varlen_reference

FORBIDDEN_BLOCK = 2**30
# fp32 accumulation, about a thousand terms of order one; the output dtype's rounding comes on top.
ABSOLUTE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Where q, K and V are all bf16 a kernel may round the softmax's weights to bf16: parts of the largest |v|.
BF16_WEIGHTS = 2.0**-8


@dataclass
class DecodeCase:
    """One problem. Pools are [num_blocks, Hkv, 2, block_size, D] when interleaved (K and V views of one allocation)."""

    context_lens: Sequence[int]
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int = 16
    kv_dtype: torch.dtype = torch.float32
    q_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32
    interleaved: bool = True
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    seed: int = 0
    q: Tensor = field(init=False)
    k_cache: Tensor = field(init=False)
    v_cache: Tensor = field(init=False)
    block_tables: Tensor = field(init=False)
    sinks: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.seed)
        v_dim = self.v_head_dim or self.head_dim
        needed = [-(-length // self.block_size) for length in self.context_lens]
        num_blocks = sum(needed) + 3
        if self.interleaved and v_dim == self.head_dim:
            shape = (num_blocks, self.num_kv_heads, 2, self.block_size, self.head_dim)
            pool = torch.full(shape, float("nan"), dtype=self.kv_dtype)
            self.k_cache, self.v_cache = pool[:, :, 0], pool[:, :, 1]
        else:
            shape = (num_blocks, self.num_kv_heads, self.block_size)
            self.k_cache = torch.full((*shape, self.head_dim), float("nan"), dtype=self.kv_dtype)
            self.v_cache = torch.full((*shape, v_dim), float("nan"), dtype=self.kv_dtype)
        batch = len(self.context_lens)
        width = max([1, *needed]) + 1
        self.block_tables = torch.full((batch, width), FORBIDDEN_BLOCK, dtype=torch.int32)
        free = torch.randperm(num_blocks, generator=rng).int()
        for b, count in enumerate(needed):
            self.block_tables[b, :count], free = free[:count], free[count:]
            tokens = torch.arange(self.first_visible(b), self.context_lens[b])
            blocks, rows = self.block_tables[b, tokens // self.block_size].long(), tokens % self.block_size
            for cache in (self.k_cache, self.v_cache):
                values = torch.randn(len(tokens), self.num_kv_heads, cache.shape[3], generator=rng)
                cache[blocks, :, rows] = values.to(self.kv_dtype)
        self.q = torch.randn(self.num_rows, self.num_q_heads, self.head_dim, generator=rng).to(self.q_dtype)
        if self.has_sinks:
            self.sinks = torch.randn(self.num_q_heads, generator=rng)

    @property
    def num_rows(self) -> int:
        """Query tokens of all requests."""
        return len(self.context_lens)

    def first_visible(self, request: int) -> int:
        """The first position that a query token of the request sees."""
        return max(0, self.context_lens[request] - self.window) if self.window else 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def options(self) -> dict[str, Any]:
        return {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}

    @property
    def lens(self) -> Tensor:
        return torch.tensor(self.context_lens, dtype=torch.int32)

    def make_plan(self, **sizes: Any) -> AttentionPlan:
        return plan_decode(self.block_tables, self.lens, **sizes)

    def plan(self, num_threads: int = 3) -> AttentionPlan:
        plan = self.make_plan(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            block_size=self.block_size,
            num_threads=num_threads,
            min_share_bytes=1,
        )
        plan.tasks(self.window)  # allocates the workspace
        plan.native.poison_workspace()
        return plan

    def new_out(self) -> Tensor:
        shape = (self.num_rows, self.num_q_heads, self.v_head_dim or self.head_dim)
        return torch.full(shape, float("nan"), dtype=self.out_dtype)

    def submit(self, pool: WorkerPool, out: Tensor, num_threads: int = 3, **more: Any) -> Ticket:
        plan = self.plan(num_threads)
        return pool.submit(plan, self.q, self.k_cache, self.v_cache, out, scale=self.scale, **self.options, **more)

    def run(self, pool: WorkerPool, num_threads: int = 3) -> Tensor:
        out = self.new_out()
        self.submit(pool, out, num_threads).wait()
        return out

    def reference(self) -> Tensor:
        caches = self.q, self.k_cache, self.v_cache
        return paged_decode_reference(*caches, self.block_tables, self.context_lens, self.scale, **self.options)

    @property
    def largest_v(self) -> float:
        """The largest finite |v| in the cache."""
        return self.v_cache.float().nan_to_num(0.0, 0.0, 0.0).abs().max().item()

    def check(self, out: Tensor) -> None:
        limit = ABSOLUTE[self.out_dtype]
        may_round = self.q_dtype == self.kv_dtype == torch.bfloat16
        absolute = limit + (BF16_WEIGHTS * self.largest_v if may_round else 0.0)
        torch.testing.assert_close(out.double(), self.reference(), atol=absolute, rtol=limit)


@dataclass
class VarlenCase(DecodeCase):
    """The same with several query tokens per request, the last query_lens[b] of its context."""

    query_lens: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return sum(self.query_lens)

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.query_lens], dtype=torch.int32).cumsum(0)

    def first_visible(self, request: int) -> int:
        length, queries = self.context_lens[request], self.query_lens[request]
        if queries == 0:
            return length
        return max(0, length - queries + 1 - self.window) if self.window else 0

    def make_plan(self, **sizes: Any) -> AttentionPlan:
        return plan_varlen(self.block_tables, self.lens, self.cu_seqlens, **sizes)

    def reference(self) -> Tensor:
        return paged_varlen_reference(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.context_lens,
            self.cu_seqlens,
            self.scale,
            **self.options,
        )
