"""Decode attention on the host beside its peers: `pytest tests/benchmarks/bench_kernel.py --benchmark-only`.

Ids are impl-dtype-batch-len-heads; `-k "ispc and bfloat16"` picks. extra_info has GB/s of keys and values, and their
share of the sequential read bandwidth, the best pass just before. `neo bench kernel` takes turns instead, and any
shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from neo_compile import _native
from neo_compile.app.bench.bandwidth import BandwidthMeter, last_level_cache_bytes
from neo_compile.app.bench.cases import KernelCase, KVArena
from neo_compile.app.bench.peers import DEFAULT_NAMES, UnavailableError
from neo_compile.app.bench.session import open_checked
from neo_compile.host_attention import WorkerPool

NUM_THREADS = len(_native.usable_cpus())
COLD_BYTES = 6 * last_level_cache_bytes()

# (batch, context_len): the usual one first, then one of the two changed. float32 is measured on the usual one only.
USUAL = (8, 1024)
SHAPES = [USUAL, (1, 1024), (32, 1024), (8, 128), (8, 4096)]
CASES = [
    KernelCase(dtype=dtype, batch=batch, context_len=length, num_q_heads=num_q_heads, num_kv_heads=8, head_dim=128)
    for dtype, shapes in (("bfloat16", SHAPES), ("float16", SHAPES), ("float32", [USUAL]))
    for batch, length in shapes
    for num_q_heads in (8, 32, 64)
]
# flex_attention compiles half a minute for each shape: the usual one is enough.
PAIRS = [
    (impl, case)
    for case in CASES
    for impl in DEFAULT_NAMES
    if impl != "flex" or (case.batch, case.context_len) == USUAL
]


def pair_id(impl: str, case: KernelCase) -> str:
    """impl-dtype-batch-len-heads."""
    return f"{impl}-{case.dtype}-{case.batch}-{case.context_len}-{case.num_q_heads}/{case.num_kv_heads}"


@pytest.fixture(scope="module")
def meter() -> Iterator[BandwidthMeter]:
    """Reads with as many threads as the kernels have."""
    with WorkerPool(NUM_THREADS - 1, participate=True) as pool:
        yield BandwidthMeter(pool, 2 * COLD_BYTES)


@pytest.fixture(scope="module")
def arena(request: pytest.FixtureRequest) -> KVArena:
    """The KV of a case, shared by its implementations."""
    return KVArena(request.param, COLD_BYTES)


@pytest.mark.parametrize(("impl", "arena"), PAIRS, ids=[pair_id(*pair) for pair in PAIRS], indirect=["arena"])
def test_decode_attention(benchmark, arena, meter, impl):
    try:
        runner = open_checked(impl, arena, NUM_THREADS)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    slots = count()
    bandwidth = meter.measure(passes=5)
    try:
        benchmark.pedantic(lambda: runner(next(slots) % arena.num_slots), rounds=30, warmup_rounds=5)
    finally:
        runner.close()
    if benchmark.stats is not None:  # None when benchmarks are switched off
        gbps = arena.case.gbps(benchmark.stats.stats.median * 1e6)
        benchmark.extra_info.update(
            gbps=round(gbps, 2), bandwidth_share=round(gbps / bandwidth, 3), bandwidth_streams=meter.streams
        )
