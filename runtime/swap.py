"""Whole-request swaps between the tiers: block copies by the host pool, layer by layer.

    iteration i:   copies submitted | first linear stage (overlaps) | all copies done | first attention ...

A swapped request takes part in the iteration that swaps it, and blocks freed by a swap-out may be given to others in
the same iteration; so every copy ends before the first attention site begins (`wait_swaps`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from neo_compile.host_attention import Ticket, WorkerPool
from neo_compile.runtime.kv_cache import KVCache
from neo_compile.runtime.plan import Swap
from neo_compile.runtime.request import Tier


def start_swaps(
    swaps: Sequence[Swap], caches: dict[Tier, KVCache], pool: WorkerPool, max_gbps: float | None
) -> list[Ticket]:
    """Submit the copies of `swaps` and return their tickets, at once.

    All swaps of an iteration go in one direction (the scheduler sees to it), so one copy per layer moves them all.
    """
    if not swaps:
        return []
    source, target = swaps[0].src_tier, swaps[0].dst_tier
    assert all(s.src_tier is source and s.dst_tier is target for s in swaps), "swaps in both directions in one plan"
    pairs = np.array(
        [pair for swap in swaps for pair in zip(swap.src_block_ids, swap.dst_block_ids, strict=False)], dtype=np.int64
    ).reshape(-1, 2)
    layers = zip(caches[source].pools, caches[target].pools, strict=True)
    return [pool.submit_copy(src, dst, pairs, max_gbps=max_gbps) for src, dst in layers]


def wait_swaps(tickets: list[Ticket], pool: WorkerPool) -> None:
    """Block until all copies are done, and forget them."""
    for ticket in tickets:
        pool.wait(ticket)
    tickets.clear()
