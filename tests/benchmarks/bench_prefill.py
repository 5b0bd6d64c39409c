"""Prefill attention on a CPU device: `pytest tests/benchmarks/bench_prefill.py --benchmark-only`.

The paged kernels (what the runtime runs) and torch's SDPA over dense K and V, in turn on one thread. Ids are
dtype-heads-dim-start-tokens; the benchmark's time is that of a round of both. extra_info has GFLOP/s of each, counting
what a causal mask leaves, and the median ratio.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch

from neo_compile.attention import AttentionSite
from neo_compile.host_attention import LayerCache, WorkerPool
from neo_compile.runtime.batch import ChunkRow, Geometry, plan_chunks
from neo_compile.runtime.prefill import attend_chunk
from neo_compile.runtime.request import Tier
from tests.runtime.test_kv_cache import make_site

BLOCK_SIZE, ROUNDS = 16, 11
HEADS = [(9, 3, 64), (8, 8, 64), (32, 8, 128)]
CHUNKS = [(0, 155), (0, 512), (512, 192), (1536, 512)]  # tokens before the chunk, and in it


def site_of(heads: tuple[int, int, int], dtype: torch.dtype) -> AttentionSite:
    num_q_heads, num_kv_heads, dim = heads
    site = make_site(head_dim=dim, v_head_dim=dim)
    return replace(site, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, scale=dim**-0.5, dtype=dtype)


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: f"{chunk[0]}-{chunk[1]}")
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}/{heads[1]}-{heads[2]}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype).split(".")[1])
def test_chunk(benchmark, dtype, heads, chunk):
    start, num_tokens = chunk
    site, context_len = site_of(heads, dtype), start + num_tokens
    num_blocks = -(-context_len // BLOCK_SIZE)
    shape = (num_blocks, site.num_kv_heads, BLOCK_SIZE, site.head_dim)
    k_cache, v_cache = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    k, v = (cache.transpose(0, 1).flatten(1, 2)[:, :context_len] for cache in (k_cache, v_cache))
    q = torch.randn(num_tokens, site.num_q_heads, site.head_dim).to(dtype)
    row = ChunkRow(Tier.DEVICE, start, np.zeros(num_tokens, np.int64), list(range(num_blocks)), ())
    plan = plan_chunks([row], Geometry.of(site), block_size=BLOCK_SIZE, num_threads=1)
    layer, out = LayerCache(k_cache, v_cache), torch.empty_like(q)
    seconds: dict[str, list[float]] = {"paged": [], "sdpa": []}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with WorkerPool(0, participate=True) as pool:
            ways = {
                "paged": lambda: pool.submit_layer(plan, layer, q, out, scale=site.scale).wait(),
                "sdpa": lambda: attend_chunk(site, q, k, v, None),
            }
            ways["paged"]()
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out, ways["sdpa"](), atol=tolerance, rtol=tolerance)

            def run_round() -> None:
                for name, way in ways.items():
                    begin = time.perf_counter()
                    way()
                    seconds[name].append(time.perf_counter() - begin)

            benchmark.pedantic(run_round, rounds=ROUNDS, warmup_rounds=1)
    finally:
        torch.set_num_threads(num_threads)
    flops = 4 * site.num_q_heads * site.head_dim * num_tokens * (start + (num_tokens + 1) / 2)
    for name, times in seconds.items():
        benchmark.extra_info[f"{name}_gflops"] = round(flops / median(times) / 1e9, 1)
    ratios = [sdpa / paged for sdpa, paged in zip(seconds["sdpa"], seconds["paged"], strict=True)]
    benchmark.extra_info["paged_over_sdpa"] = round(median(ratios), 2)
