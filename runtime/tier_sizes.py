"""How many blocks each tier gets: the user's budget, or a default that fits the memory at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neo_compile.attention import AttentionSite
from neo_compile.errors import ConfigError
from neo_compile.runtime.kv_cache import CacheConfig, available_memory_bytes, bytes_per_block
from neo_compile.runtime.request import Tier
from neo_compile.runtime.scheduler_config import SchedulerConfig

DEFAULT_MEMORY_SHARE = 0.25


def tier_sizes(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    sites: Sequence[AttentionSite],
    dtype: torch.dtype,
    max_model_len: int,
) -> dict[Tier, int]:
    """Blocks of each tier (see `CacheConfig`).

    Raises:
        ConfigError: a budget of no whole block, or more memory than there is (both numbers named).
    """
    block_bytes = bytes_per_block(sites, cache.block_size, dtype)
    available = available_memory_bytes()
    needed = scheduler.max_num_seqs * -(-max_model_len // cache.block_size)
    default = min(needed, int(available * DEFAULT_MEMORY_SHARE) // block_bytes)
    device, host = cache.num_blocks("device", block_bytes), cache.num_blocks("host", block_bytes)
    if device == 0:
        raise ConfigError(
            f"the device cache's budget holds no block: one block of {cache.block_size} tokens takes {block_bytes} "
            "bytes; raise CacheConfig.device_bytes (or device_blocks, device_tokens)"
        )
    if host is None:
        host = 0 if device is None else default
    sizes = {Tier.DEVICE: default if device is None else device, Tier.HOST: host}
    staging = cache.staging_blocks or 0
    total = (sum(sizes.values()) + staging) * block_bytes
    if total > available:
        raise ConfigError(
            f"the KV cache would take {total / 2**30:.1f} GiB ({sizes[Tier.DEVICE]} device, {sizes[Tier.HOST]} host "
            f"and {staging} staging blocks of {block_bytes} bytes), but only {available / 2**30:.1f} GiB of memory is "
            "available: lower CacheConfig.host_bytes or device_bytes (or blocks or tokens), or staging_blocks"
        )
    return sizes
