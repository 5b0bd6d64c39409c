"""The memory of one tier: per layer, a pool of blocks that hold K and V side by side.

Layout of a layer, the fastest measured and one memcpy per block in a swap:

    [num_blocks, num_kv_heads, K: block_size * head_dim | V: block_size * v_head_dim]

so that `k(layer)` and `v(layer)` are strided views [num_blocks, num_kv_heads, block_size, head_dim]. Both tiers have
the same block geometry. Which block belongs to whom is `BlockPool`'s business, not this file's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from neo_compile.attention import AttentionSite
from neo_compile.checks import COUNT, NOT_NEGATIVE_INTEGER, check_choice, check_numbers
from neo_compile.config import parse_bytes
from neo_compile.errors import ConfigError
from neo_compile.host_attention import LayerCache
from neo_compile.numa import numa_nodes
from neo_compile.runtime.device.base import Workers

CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Sizes of the two tiers. For each tier give at most one of blocks, tokens or bytes.

    Attributes:
        block_size: tokens of a block.
        device_blocks, device_tokens, device_bytes: hard budget of the device cache. All `None`: one tier, sized to
            serve `max_num_seqs` requests of the model's context length within a quarter of the free memory.
        host_blocks, host_tokens, host_bytes: size of the host cache. All `None`: none if the device cache has no
            budget either, otherwise a quarter of the free memory (at most what `max_num_seqs` requests can use).
        dtype: of K and V; `None`: the model's own.
        staging_blocks: ring of device blocks through which the KV of host-bound prefills leaves the device, layer by
            layer. `None`: none where the device's memory is the host's (the KV is written where it belongs), else the
            device's default.
    Byte sizes are integers or strings such as "2GiB".
    """

    block_size: int = 16
    device_blocks: int | None = None
    device_tokens: int | None = None
    device_bytes: int | str | None = None
    host_blocks: int | None = None
    host_tokens: int | None = None
    host_bytes: int | str | None = None
    dtype: torch.dtype | None = None
    staging_blocks: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, COUNT, "block_size")
        check_numbers(self, COUNT, "staging_blocks", or_none=True)
        if self.dtype is not None:
            check_choice("CacheConfig.dtype", self.dtype, CACHE_DTYPES)
        for tier in ("device", "host"):
            names_given = [n for n in ("blocks", "tokens", "bytes") if getattr(self, f"{tier}_{n}") is not None]
            if len(names_given) > 1:
                raise ConfigError(f"CacheConfig: give only one of {', '.join(f'{tier}_{n}' for n in names_given)}")
            check_numbers(self, NOT_NEGATIVE_INTEGER, f"{tier}_blocks", f"{tier}_tokens", or_none=True)
            self.num_blocks(tier, 1)
        if self.num_blocks("device", 1) == 0:
            raise ConfigError(
                f"the device cache has a budget of 0 blocks of {self.block_size} tokens: raise CacheConfig."
                "device_blocks (or device_tokens, device_bytes) to at least one block; the policy 'host-only' keeps "
                "all KV on the host"
            )

    def num_blocks(self, tier: str, bytes_per_block: int) -> int | None:
        """Whole blocks of `tier` ("device" or "host") that fit its budget; `None` when no budget is given."""
        blocks = getattr(self, f"{tier}_blocks")
        tokens = getattr(self, f"{tier}_tokens")
        num_bytes = getattr(self, f"{tier}_bytes")
        if blocks is not None:
            return int(blocks)
        if tokens is not None:
            return int(tokens) // self.block_size
        if num_bytes is not None:
            return parse_bytes(num_bytes, f"CacheConfig.{tier}_bytes") // bytes_per_block
        return None


def bytes_per_block(sites: Iterable[AttentionSite], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of `block_size` tokens takes over all layers, K and V."""
    values_per_token = sum(site.num_kv_heads * (site.head_dim + site.v_head_dim) for site in sites)
    return values_per_token * block_size * dtype.itemsize


def available_memory_bytes() -> int:
    """Memory that this process may still take: the machine's available memory, bounded by the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(current.read()))
    except OSError:
        pass  # not Linux, or no cgroup v2: the figure found so far stands
    return available


class KVCache:
    """Block pools of one tier, one tensor per layer.

    Args:
        sites: the model's attention sites, in layer order.
        num_blocks: blocks of this tier (0 is an empty tier).
        block_size: tokens of a block.
        dtype: of the stored K and V.
        device: where the memory lies.
    """

    def __init__(
        self,
        sites: Sequence[AttentionSite],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.pools: list[torch.Tensor] = []
        self._k_views: list[torch.Tensor] = []
        self._v_views: list[torch.Tensor] = []
        self._layers: list[LayerCache] = []
        for site in sites:
            k_len, v_len = block_size * site.head_dim, block_size * site.v_head_dim
            pool = torch.empty((num_blocks, site.num_kv_heads, k_len + v_len), dtype=dtype, device=device)
            self.pools.append(pool)
            self._k_views.append(torch.unflatten(pool[..., :k_len], -1, (block_size, site.head_dim)))
            self._v_views.append(torch.unflatten(pool[..., k_len:], -1, (block_size, site.v_head_dim)))
            self._layers.append(LayerCache(self._k_views[-1], self._v_views[-1]))

    def place(self, workers: Workers) -> bool:
        """On a machine with several memory nodes: let the threads that will read the pools touch them first.

        Memory belongs to the node of its first writer, which otherwise would be whoever stores the first token. All of
        the cache becomes resident. Call it before anything is stored; True if it was done.
        """
        if len(numa_nodes()) < 2:
            return False
        for ticket in [workers.submit_first_touch(pool) for pool in self.pools]:
            ticket.wait()
        return True

    def k(self, layer: int) -> torch.Tensor:
        """K of a layer, [num_blocks, num_kv_heads, block_size, head_dim], a view."""
        return self._k_views[layer]

    def v(self, layer: int) -> torch.Tensor:
        """V of a layer, [num_blocks, num_kv_heads, block_size, v_head_dim], a view."""
        return self._v_views[layer]

    def layer(self, layer: int) -> LayerCache:
        """Both views of a layer, prepared for the decode kernels."""
        return self._layers[layer]

    def write(self, layer: int, slots: Slots, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """Store K and V of T tokens at their slots."""
        self._k_views[layer][slots.block_ids, :, slots.offsets] = k_THD.to(self.dtype)
        self._v_views[layer][slots.block_ids, :, slots.offsets] = v_THD.to(self.dtype)

    def gather(self, layer: int, block_ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request's first `num_tokens` tokens, [num_kv_heads, num_tokens, dim] each, copies."""
        k, v = self._k_views[layer][block_ids], self._v_views[layer][block_ids]
        k_HTD = k.transpose(0, 1).flatten(1, 2)[:, :num_tokens]
        v_HTD = v.transpose(0, 1).flatten(1, 2)[:, :num_tokens]
        return k_HTD, v_HTD

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN: tests use it to show that freed blocks are never read."""
        for pool in self.pools:
            pool[list(block_ids)] = float("nan")

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(pool.numel() * pool.element_size() for pool in self.pools)


@dataclass(frozen=True, slots=True)
class Slots:
    """Where T tokens are stored: block_ids int64 [T] and offsets within the block int64 [T]."""

    block_ids: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, block_ids: Sequence[int] | NDArray[np.int32], start: int, num_tokens: int, block_size: int) -> Slots:
        """Slots of tokens `start` .. `start + num_tokens - 1` of the request that owns `block_ids`."""
        positions = torch.arange(start, start + num_tokens)
        table = torch.as_tensor(block_ids, dtype=torch.int64)
        return cls(table[positions // block_size], positions % block_size)
