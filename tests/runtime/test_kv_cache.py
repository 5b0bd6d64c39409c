"""Layout, swaps and sizes of the KV cache."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from neo_compile.attention import AttentionSite
from neo_compile.errors import ConfigError
from neo_compile.host_attention import WorkerPool
from neo_compile.runtime import kv_cache
from neo_compile.runtime.kv_cache import CacheConfig, KVCache, Slots, bytes_per_block, parse_bytes
from neo_compile.runtime.plan import Swap
from neo_compile.runtime.request import Request, Tier
from neo_compile.runtime.scheduler_config import SchedulerConfig
from neo_compile.runtime.swap import LayerCopies
from neo_compile.runtime.tier_sizes import tier_sizes


def make_site(index: int = 0, head_dim: int = 8, v_head_dim: int = 8) -> AttentionSite:
    return AttentionSite(
        index=index,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        scale=0.3,
        window=None,
        softcap=None,
        has_sinks=False,
        dtype=torch.float32,
    )


def make_cache(num_blocks: int = 6, block_size: int = 4, dtype: torch.dtype = torch.float32) -> KVCache:
    sites = [make_site(0), make_site(1, head_dim=12, v_head_dim=8)]
    cache = KVCache(sites, num_blocks, block_size, dtype, torch.device("cpu"))
    for pool in cache.pools:
        pool.fill_(float("nan"))
    return cache


def test_views_interleave_k_and_v_of_a_block():
    cache = make_cache()
    assert cache.k(1).shape == (6, 2, 4, 12)
    assert cache.v(1).shape == (6, 2, 4, 8)
    assert cache.k(1).data_ptr() == cache.pools[1].data_ptr()
    assert cache.v(1).data_ptr() == cache.pools[1].data_ptr() + 4 * 12 * 4
    assert cache.num_bytes == 6 * bytes_per_block([make_site(0), make_site(1, 12, 8)], 4, torch.float32)


@pytest.mark.parametrize(("nodes", "is_placed"), [({0: [0, 1]}, False), ({}, False), ({0: [0], 1: [1]}, True)])
def test_pages_are_placed_where_there_are_several_memory_nodes(monkeypatch, nodes, is_placed):
    monkeypatch.setattr(kv_cache, "numa_nodes", lambda: nodes)
    cache, touched = make_cache(), []
    with WorkerPool(1) as pool:
        submit = pool.submit_first_touch
        monkeypatch.setattr(pool, "submit_first_touch", lambda x: touched.append(x) or submit(x))
        assert cache.place(pool) is is_placed
    assert [x.data_ptr() for x in touched] == [x.data_ptr() for x in cache.pools if is_placed]


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 4), (0, 9), (3, 2), (4, 4), (5, 7), (11, 1)])
def test_write_then_gather(start, num_tokens):
    cache, block_ids = make_cache(), [5, 0, 3]
    k, v = torch.randn(12, 2, 12), torch.randn(12, 2, 8)
    cache.write(1, Slots.of(block_ids, 0, start, 4), k[:start], v[:start])
    span = slice(start, start + num_tokens)
    cache.write(1, Slots.of(block_ids, start, num_tokens, 4), k[span], v[span])
    k_HTD, v_HTD = cache.gather(1, torch.tensor(block_ids), start + num_tokens)
    assert torch.equal(k_HTD.transpose(0, 1), k[: start + num_tokens])
    assert torch.equal(v_HTD.transpose(0, 1), v[: start + num_tokens])
    assert torch.isnan(cache.pools[1][[1, 2, 4]]).all()
    assert torch.isnan(cache.pools[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("max_gbps", [None, 0.5])
def test_a_swap_round_trip_is_bitwise_exact(dtype, max_gbps):
    caches = {Tier.DEVICE: make_cache(6, dtype=dtype), Tier.HOST: make_cache(9, dtype=dtype)}
    originals = []
    for pool in caches[Tier.DEVICE].pools:
        bits = torch.randint(-(2**15), 2**15, (pool.numel() * pool.element_size() // 2,), dtype=torch.int16)
        pool.copy_(bits.view(dtype).view_as(pool))
        originals.append(pool.clone())
    request = Request("r", [1], 1)
    with WorkerPool(1) as pool:
        out = Swap(request, Tier.DEVICE, Tier.HOST, (4, 1, 2), (8, 0, 3))
        LayerCopies.of_swaps([out], caches, pool, max_gbps).finish()
        for tensor in caches[Tier.DEVICE].pools:
            tensor[[4, 1, 2]] = 0
        back = Swap(request, Tier.HOST, Tier.DEVICE, (8, 0, 3), (1, 2, 4))
        LayerCopies.of_swaps([back], caches, pool, max_gbps).finish()
    for tensor, original in zip(caches[Tier.DEVICE].pools, originals, strict=True):
        moved = tensor[[1, 2, 4]].contiguous().view(torch.int16)
        assert torch.equal(moved, original[[4, 1, 2]].contiguous().view(torch.int16))
        untouched = tensor[[0, 3, 5]].contiguous().view(torch.int16)
        assert torch.equal(untouched, original[[0, 3, 5]].contiguous().view(torch.int16))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("5", 5),
        ("2GiB", 2 * 2**30),
        ("512 MiB", 2**29),
        ("1.5GB", 1_500_000_000),
        ("1e6", 10**6),
        ("3kb", 3000),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "2 gibibytes", "-1", -1, "1..5GB", "1e400", 1.5, math.nan, math.inf, True, None, [3]]
)
def test_parse_bytes_refuses(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize("value", [1.5, 16.0, math.nan, math.inf, True, "8", [3], -1], ids=str)
@pytest.mark.parametrize(
    "option", ["block_size", "staging_blocks", "device_blocks", "device_tokens", "host_blocks", "host_tokens"]
)
def test_counts_are_whole_numbers(option, value):
    with pytest.raises(ConfigError, match=rf"CacheConfig.{option}=.*must be a whole number of at least \d"):
        CacheConfig(**{option: value})


@pytest.mark.parametrize("option", ["device_bytes", "host_bytes"])
def test_sizes_in_bytes_are_refused_by_name(option):
    with pytest.raises(ConfigError, match=f"CacheConfig.{option}=1.5, must be bytes"):
        CacheConfig(**{option: 1.5})


def test_the_dtype_is_one_of_torch():
    with pytest.raises(ConfigError, match=r"CacheConfig.dtype='float16', must be one of torch\.float32"):
        CacheConfig(dtype="float16")


def test_staging_blocks_take_memory_too():
    with pytest.raises(ConfigError, match="3 device, 3 host and 1099511627776 staging blocks"):
        sizes(device_blocks=3, host_blocks=3, staging_blocks=2**40)


def test_numpy_integers_are_integers():
    assert sizes(device_blocks=np.int64(3), host_tokens=np.int32(33)) == {Tier.DEVICE: 3, Tier.HOST: 2}


def sizes(**options):
    sites = [make_site(0), make_site(1)]
    return tier_sizes(CacheConfig(**options), SchedulerConfig(max_num_seqs=4), sites, torch.float32, 1024)


def test_sizes_follow_each_way_of_giving_them():
    block_bytes = bytes_per_block([make_site(0), make_site(1)], 16, torch.float32)
    assert sizes(device_blocks=3, host_blocks=7) == {Tier.DEVICE: 3, Tier.HOST: 7}
    assert sizes(device_tokens=50, host_tokens=33) == {Tier.DEVICE: 3, Tier.HOST: 2}
    assert sizes(device_bytes=block_bytes * 5, host_bytes=block_bytes * 6 - 1) == {Tier.DEVICE: 5, Tier.HOST: 5}


def test_without_a_budget_there_is_one_tier():
    assert sizes() == {Tier.DEVICE: 4 * 1024 // 16, Tier.HOST: 0}


def test_a_device_budget_brings_a_host_cache():
    assert sizes(device_blocks=3) == {Tier.DEVICE: 3, Tier.HOST: 4 * 1024 // 16}


def test_a_device_budget_of_less_than_a_block():
    with pytest.raises(ConfigError, match="takes 4096 bytes"):
        sizes(device_bytes=100)
