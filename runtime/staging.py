"""Layer-wise swap-out of prefills bound for the host, through a small ring of device blocks (paper, section 3.1).

    launching thread   S0 | write KV 0, attention 0 | S1 | write KV 1, attention 1 | S2 | ...
    host pool             |      KV 0 leaves        |    |      KV 1 leaves        |

A prefill's attention is computed on the device, its KV lives on the host. On a device with memory of its own the KV of
one layer at a time is written to blocks of the ring, from where the host pool copies it to its host blocks beside the
next layers' work. A block of the ring is written again when its copy has ended; the ring's size bounds the blocks under
way. One ring serves all layers of the same block shape.

Only whole blocks are copied. A chunk that starts in the middle of a block therefore writes that block's earlier tokens
too; they came back to the device, with the rest of the context, for the chunk's attention.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from neo_compile.attention import AttentionSite
from neo_compile.runtime.batch import StagedChunk
from neo_compile.runtime.device import Device, Ticket
from neo_compile.runtime.kv_cache import KVCache, Slots

_BlockIds = Sequence[int] | torch.Tensor


class Staging:
    """The rings of a model, by layer.

    Args:
        sites: the model's attention sites.
        num_blocks: of each ring.
        host: where the KV goes.
    """

    def __init__(self, sites: Sequence[AttentionSite], num_blocks: int, host: KVCache, device: Device) -> None:
        rings: dict[tuple[int, int, int], _Ring] = {}
        for site in sites:
            shape = (site.num_kv_heads, site.head_dim, site.v_head_dim)
            if shape not in rings:
                rings[shape] = _Ring(site, num_blocks, host, device)
        self._rings = tuple(rings.values())
        self._ring_of = [rings[site.num_kv_heads, site.head_dim, site.v_head_dim] for site in sites]

    def store(
        self, layer: int, chunk: StagedChunk, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send a chunk's K and V on their way to the chunk's host blocks.

        Returns:
            K and V of the request's whole context on the device, [num_kv_heads, chunk.start + T, dim].
        """
        return self._ring_of[layer].store(layer, chunk, k_THD, v_THD)

    def finish(self) -> list[tuple[int, Ticket]]:
        """Block until all KV has left; the (layer, copy)s since the last call."""
        return [copy for ring in self._rings for copy in ring.finish()]


class _Ring:
    """Blocks of one shape: free, or leaving with a copy that has to end before they are written again."""

    def __init__(self, site: AttentionSite, num_blocks: int, host: KVCache, device: Device) -> None:
        self._blocks = KVCache([site], num_blocks, host.block_size, host.dtype, device.torch_device)
        self._host, self._device = host, device
        self._free = deque(range(num_blocks))
        self._leaving: deque[tuple[Ticket, list[int]]] = deque()
        self._copies: list[tuple[int, Ticket]] = []
        self._max_group = max(1, num_blocks // 2)  # one half is written while the other leaves

    def store(
        self, layer: int, chunk: StagedChunk, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Staging.store`."""
        k_HSD, v_HSD = k_THD.transpose(0, 1), v_THD.transpose(0, 1)
        if chunk.start:
            k_context, v_context = self._load(layer, chunk.block_ids, chunk.start)
            k_HSD = torch.cat([k_context, k_HSD.to(k_context.dtype)], dim=1)
            v_HSD = torch.cat([v_context, v_HSD.to(v_context.dtype)], dim=1)
        block_size = self._host.block_size
        first_block, end = chunk.start // block_size, chunk.start + chunk.num_tokens
        for block in range(first_block, -(-end // block_size), self._max_group):
            span = slice(block * block_size, min((block + self._max_group) * block_size, end))
            block_ids = chunk.block_ids[block : -(-span.stop // block_size)]
            slots = self._take(len(block_ids))
            where = Slots.of(slots, 0, span.stop - span.start, block_size)
            self._blocks.write(0, where, k_HSD[:, span].transpose(0, 1), v_HSD[:, span].transpose(0, 1))
            ticket = self._copy(self._blocks.pools[0], self._host.pools[layer], slots, block_ids)
            self._leaving.append((ticket, slots))
            self._copies.append((layer, ticket))
        return k_HSD, v_HSD

    def finish(self) -> list[tuple[int, Ticket]]:
        """See `Staging.finish`."""
        while self._leaving:
            self._wait_oldest()
        copies, self._copies = self._copies, []
        return copies

    def _load(self, layer: int, block_ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request's first `num_tokens` tokens from the host, [num_kv_heads, num_tokens, dim] each."""
        block_size = self._host.block_size
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start in range(0, num_tokens, self._blocks.num_blocks * block_size):
            end = min(start + self._blocks.num_blocks * block_size, num_tokens)
            group = block_ids[start // block_size : -(-end // block_size)]
            slots = self._take(len(group))
            ticket = self._copy(self._host.pools[layer], self._blocks.pools[0], group, slots)
            self._copies.append((layer, ticket))
            ticket.wait()
            parts.append(self._blocks.gather(0, torch.tensor(slots), end - start))
            self._give_back(slots)
        k_parts, v_parts = zip(*parts, strict=True)
        return torch.cat(k_parts, dim=1), torch.cat(v_parts, dim=1)

    def _copy(self, src: torch.Tensor, dst: torch.Tensor, src_ids: _BlockIds, dst_ids: _BlockIds) -> Ticket:
        pairs = np.stack([np.asarray(src_ids), np.asarray(dst_ids)], axis=1)
        return self._device.host_pool.submit_copy(src, dst, pairs, self._device.swap_gbps)

    def _take(self, num_blocks: int) -> list[int]:
        """Blocks to write to; waits for the oldest copies until there are enough."""
        while len(self._free) < num_blocks:
            self._wait_oldest()
        return [self._free.popleft() for _ in range(num_blocks)]

    def _wait_oldest(self) -> None:
        ticket, slots = self._leaving.popleft()
        ticket.wait()
        self._give_back(slots)

    def _give_back(self, slots: list[int]) -> None:
        if self._device.poisons_freed_blocks:
            self._blocks.poison(slots)
        self._free.extend(slots)
