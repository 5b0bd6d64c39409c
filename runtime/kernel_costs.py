"""Times attention and block copies by themselves, one layer, on a cache of its own that is too large to be warm."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from neo_compile.attention import AttentionSite
from neo_compile.host_attention import AttentionPlan, plan_decode
from neo_compile.runtime.batch import ChunkRow, Geometry, plan_chunks
from neo_compile.runtime.cost_grid import Grid
from neo_compile.runtime.device import Ticket, Workers
from neo_compile.runtime.kv_cache import KVCache
from neo_compile.runtime.request import Tier
from neo_compile.runtime.timing import increasing, typical_ms

Report = Callable[[float], None]
"""Called with the share of a table that is measured (0 to 1)."""

_COLD_BYTES = 192 * 2**20  # well above the last-level cache


class KernelBench:
    """Times attention and block copies on a cache of its own, one layer large enough to be cold."""

    def __init__(self, site: AttentionSite, block_size: int, dtype: torch.dtype, grid: Grid) -> None:
        self._site, self._block_size, self._grid = site, block_size, grid
        block_bytes = site.num_kv_heads * (site.head_dim + site.v_head_dim) * block_size * dtype.itemsize
        most_tokens = max(grid.decode_kv_tokens[-1], grid.prefill_tokens[-1] + grid.prefill_starts[-1])
        largest = most_tokens // block_size + grid.decode_requests[-1]
        num_blocks = max(_COLD_BYTES // block_bytes, 2 * largest, 2 * grid.swap_blocks[-1])
        self._cache = KVCache([site], num_blocks, block_size, dtype, torch.device("cpu"))
        self._cache.pools[0].zero_()
        self._random = random.Random(0)

    def prefill_table(self, report: Report, pool: Workers) -> dict[str, Any]:
        """Prefill attention by (tokens of the chunk, tokens before it), on `pool`."""
        tokens, starts = self._grid.prefill_tokens, self._grid.prefill_starts
        rows = _rows(tokens, starts, lambda num, start: self._prefill_ms(pool, num, start), report)
        return {"tokens": list(tokens), "starts": list(starts), "ms": rows}

    def decode_table(self, report: Report, pool: Workers, *, is_host: bool) -> dict[str, Any]:
        """Decode attention by (requests, KV tokens in all), on `pool`.

        Host attention is timed by its ticket, device attention as the launching thread sees it.
        """
        requests, kv_tokens = self._grid.decode_requests, self._grid.decode_kv_tokens
        rows = _rows(requests, kv_tokens, lambda num, kv: self._decode_ms(pool, num, kv, is_host), report)
        return {"requests": list(requests), "kv_tokens": list(kv_tokens), "ms": rows}

    def swap_table(self, report: Report, pool: Workers, max_gbps: float | None) -> dict[str, Any]:
        """Block copies of one layer by number of blocks, one block beside its neighbour."""
        layer, times = self._cache.pools[0], []
        for done, num_blocks in enumerate(self._grid.swap_blocks):
            report(done / len(self._grid.swap_blocks))

            def copy(n: int = num_blocks) -> Ticket:
                start = self._random.randrange(self._cache.num_blocks - 2 * n + 1)
                pairs = np.stack([np.arange(start, start + n), np.arange(start + n, start + 2 * n)], axis=1)
                ticket = pool.submit_copy(layer, layer, pairs.astype(np.int64), max_gbps=max_gbps)
                ticket.wait()
                return ticket

            times.append(typical_ms(copy, self._grid.num_repeats))
        return {"blocks": list(self._grid.swap_blocks), "ms": increasing(times)}

    def _prefill_ms(self, pool: Workers, num_tokens: int, start: int) -> float:
        site, size = self._site, self._block_size
        q = torch.randn(num_tokens, site.num_q_heads, site.head_dim).to(site.dtype)
        k = torch.randn(num_tokens, site.num_kv_heads, site.head_dim).to(site.dtype)
        v = torch.randn(num_tokens, site.num_kv_heads, site.v_head_dim).to(site.dtype)
        sinks = torch.zeros(site.num_q_heads) if site.has_sinks else None
        out = torch.empty(num_tokens, site.num_q_heads, site.v_head_dim, dtype=site.dtype)

        def plan() -> AttentionPlan:
            blocks = self._random.sample(range(self._cache.num_blocks), -(-(start + num_tokens) // size))
            chunk = ChunkRow(Tier.DEVICE, start, np.zeros(num_tokens, dtype=np.int64), blocks, ())
            return plan_chunks([chunk], Geometry.of(site), block_size=size, num_threads=pool.parallelism)

        def run(prefill_plan: AttentionPlan) -> None:
            layer = self._cache.layer(0)
            options = {"scale": site.scale, "window": site.window, "softcap": site.softcap, "sinks": sinks}
            pool.submit_layer(prefill_plan, layer, q, out, **options, k_new=k, v_new=v).wait()  # type: ignore[arg-type]

        return typical_ms(run, self._grid.num_repeats, setup=plan)

    def _decode_ms(self, pool: Workers, num_requests: int, kv_tokens: int, is_host: bool) -> float:
        site = self._site
        context_len = max(1, kv_tokens // num_requests)
        blocks_each = -(-context_len // self._block_size)
        q = torch.randn(num_requests, site.num_q_heads, site.head_dim).to(site.dtype)
        out = torch.empty(num_requests, site.num_q_heads, site.v_head_dim, dtype=site.dtype)

        def plan() -> Any:
            chosen = self._random.sample(range(self._cache.num_blocks), num_requests * blocks_each)
            return plan_decode(
                np.array(chosen, dtype=np.int32).reshape(num_requests, blocks_each),
                np.full(num_requests, context_len, dtype=np.int32),
                num_q_heads=site.num_q_heads,
                num_kv_heads=site.num_kv_heads,
                head_dim=site.head_dim,
                v_head_dim=site.v_head_dim,
                block_size=self._block_size,
                num_threads=pool.parallelism,
            )

        def run(decode_plan: Any) -> Ticket | None:
            layer = self._cache.layer(0)
            ticket = pool.submit_layer(decode_plan, layer, q, out, scale=site.scale, window=site.window)
            ticket.wait()
            return ticket if is_host else None

        return typical_ms(run, self._grid.num_repeats, setup=plan)


def _rows(
    first: tuple[int, ...], second: tuple[int, ...], measure: Callable[[int, int], float], report: Report
) -> list[list[float]]:
    """`measure` at all pairs, a row per point of the first axis; no row falls."""
    rows: list[list[float]] = []
    for number, x in enumerate(first):
        row = []
        for place, y in enumerate(second):
            report((number + place / len(second)) / len(first))
            row.append(measure(x, y))
        rows.append(increasing(row))
    return rows
