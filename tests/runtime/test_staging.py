"""KV of host-bound prefills leaves the device through a ring: right blocks, nothing overwritten, bounded."""

from __future__ import annotations

from random import Random

import pytest
import torch

from neo_compile.errors import ConfigError
from neo_compile.host_attention import WorkerPool
from neo_compile.runtime.batch import StagedChunk
from neo_compile.runtime.device.adversarial import DelayingWorkers
from neo_compile.runtime.kv_cache import CacheConfig, KVCache, Slots
from neo_compile.runtime.staging import Staging
from tests.helpers.engines import greedy, hf_greedy, make_engine, random_prompts, tiny_llama
from tests.runtime.test_kv_cache import make_site

BLOCK_SIZE = 4
SITES = (make_site(0), make_site(1, head_dim=12, v_head_dim=8), make_site(2))


class StubDevice:
    """What a ring needs of a device."""

    torch_device = torch.device("cpu")
    swap_gbps = None
    poisons_freed_blocks = True

    def __init__(self, host_pool) -> None:
        self.host_pool = host_pool


@pytest.fixture(scope="module")
def model():
    return tiny_llama(2)


@pytest.fixture(params=["plain", "delayed"])
def device(request):
    with WorkerPool(1) as pool:
        yield StubDevice(pool if request.param == "plain" else DelayingWorkers(pool, Random(0)))


def make_cache_of(sites) -> KVCache:
    cache = KVCache(sites, 10, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    for pool in cache.pools:
        pool.fill_(float("nan"))
    return cache


def make_chunk(start: int, num_tokens: int, block_ids: list[int]) -> StagedChunk:
    return StagedChunk(0, start, num_tokens, torch.tensor(block_ids))


def write_directly(cache: KVCache, layer: int, chunk: StagedChunk, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the whole context, once the chunk's are in its blocks."""
    slots = Slots.of(chunk.block_ids.tolist(), chunk.start, chunk.num_tokens, BLOCK_SIZE)
    cache.write(layer, slots, k, v)
    return cache.gather(layer, chunk.block_ids, chunk.start + chunk.num_tokens)


def random_kv(site, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_tokens, 2, site.head_dim), torch.randn(num_tokens, 2, site.v_head_dim)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 8])
@pytest.mark.parametrize("cuts", [(21,), (8, 21), (5, 21), (1, 2, 3, 14, 21), (6, 7, 20, 21)])
def test_the_host_cache_holds_what_direct_writes_give(device, num_blocks, cuts):
    torch.manual_seed(0)
    through_ring, direct = (make_cache_of(SITES) for _ in range(2))
    staging = Staging(SITES, num_blocks, through_ring, device)
    block_ids = [7, 2, 5, 0, 9, 4]
    start = 0
    for end in cuts:
        chunk = make_chunk(start, end - start, block_ids)
        for layer, site in enumerate(SITES):
            k, v = random_kv(site, end - start)
            got = staging.store(layer, chunk, k, v)
            wanted = write_directly(direct, layer, chunk, k, v)
            assert all(map(torch.equal, got, wanted))
        assert {layer for layer, _ in staging.finish()} == {0, 1, 2}
        start = end
    for layer in range(len(SITES)):
        got = through_ring.gather(layer, torch.tensor(block_ids), cuts[-1])
        assert all(map(torch.equal, got, direct.gather(layer, torch.tensor(block_ids), cuts[-1])))
        others = [1, 3, 6, 8]
        assert torch.isnan(through_ring.pools[layer][others]).all()


@pytest.mark.parametrize(("num_blocks", "most_leaving"), [(1, 1), (2, 2), (5, 4), (40, 12)])
def test_blocks_under_way_are_bounded(num_blocks, most_leaving):
    """By the ring, in halves; nothing but a full ring makes the launching thread wait."""
    with WorkerPool(1) as pool:
        workers = DelayingWorkers(pool, Random(0))
        sites = [make_site(0), make_site(1)]
        staging = Staging(sites, num_blocks, make_cache_of(sites), StubDevice(workers))
        chunk = make_chunk(0, 6 * BLOCK_SIZE, [3, 1, 0, 2, 5, 4])
        most = 0
        for layer in range(2):
            staging.store(layer, chunk, *random_kv(make_site(), 6 * BLOCK_SIZE))
            (ring,) = staging._rings
            most = max(most, sum(len(slots) for _, slots in ring._leaving))
            assert len(ring._free) + sum(len(slots) for _, slots in ring._leaving) == num_blocks
        assert most == most_leaving
        staging.finish()
        assert sorted(ring._free) == list(range(num_blocks))


@pytest.mark.parametrize("staging_blocks", [1, 3, 64])
def test_an_engine_with_a_ring(model, staging_blocks):
    """On the emulated device the ring is there when asked for; tokens are the same, and copies show in the timeline."""
    prompts = random_prompts([30, 33, 47, 16, 5, 61])
    expected = [hf_greedy(model, prompt, 6) for prompt in prompts]
    with make_engine(model, policy="host-only", staging_blocks=staging_blocks, max_num_batched_tokens=40) as engine:
        engine.start_timeline()
        outputs = engine.generate(prompts, greedy(6))
        timeline = engine.stop_timeline()
    assert [output.token_ids for output in outputs] == expected
    staged = [event for event in timeline.events if event.category == "staging"]
    assert {event.name for event in staged} == {"staging 0", "staging 1"}
    assert all(event.lane == "host" and event.start_ns < event.end_ns for event in staged)


def test_no_ring_where_the_memory_is_shared(model):
    with make_engine(model) as engine:
        assert engine._core.executor.staging is None
    with make_engine(model, kind="adversarial") as engine:
        assert engine._core.executor.staging is not None


def test_an_empty_ring_is_refused():
    with pytest.raises(ConfigError, match=r"CacheConfig.staging_blocks=0, must be a whole number of at least 1"):
        CacheConfig(staging_blocks=0)
