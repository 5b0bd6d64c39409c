"""Whole-request swaps between the tiers: block copies by the host pool, one per layer, just ahead of the layers' use.

    launching thread   S0 b0 | S0 b1 | S1 b0 | S1 b1 | S2 b0 | ...        S: linear stage, ca: host attention
    host pool          copy 0, copy 1 | ca 0 | ca 0 | copy 2 | ca 1 | ca 1 | copy 3 | ...

Attention at a site waits for the copy of its own layer (`LayerCopies.wait`) and for nothing else of the swaps. The copy
of layer l + 2 is submitted once all sub-batches have submitted their host attention of layer l, so host attention
queues behind one layer's copy at most, and the copy still has a whole linear stage of each sub-batch to hide under.

A swapped request takes part in the iteration that swaps it, and blocks freed by a swap-out may be given to others in
the same iteration: whatever reads or writes KV of a layer comes after that layer's wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from neo_compile.host_attention import BlockPairs
from neo_compile.runtime.device import Ticket, Workers
from neo_compile.runtime.kv_cache import KVCache
from neo_compile.runtime.plan import Swap
from neo_compile.runtime.request import Tier

_LAYERS_AHEAD = 2


class LayerCopies:
    """Block copies of one iteration, the same in every layer: target[pairs[i, 1]] = source[pairs[i, 0]].

    Args:
        pairs: int64 [N, 2] (source block, target block); none of a target twice.
        pool: the threads that copy.
        max_gbps: throttle of each copy, GB/s.
        poisons_source: fill the source blocks of a layer with NaN once they are copied: nobody owns them any more.
    """

    def __init__(
        self,
        source: KVCache,
        target: KVCache,
        pairs: npt.NDArray[np.int64],
        pool: Workers,
        max_gbps: float | None = None,
        *,
        poisons_source: bool = False,
    ) -> None:
        self.tickets: list[Ticket] = []
        self._source, self._target = source, target
        self._pairs = BlockPairs(pairs, (source.num_blocks, target.num_blocks))
        self._pool, self._max_gbps, self._poisons_source = pool, max_gbps, poisons_source
        self._num_layers = len(source.pools) if len(pairs) else 0
        self._num_waited = 0
        for _ in range(_LAYERS_AHEAD):
            self.submit_next()

    @classmethod
    def of_swaps(
        cls,
        swaps: Sequence[Swap],
        caches: dict[Tier, KVCache],
        pool: Workers,
        max_gbps: float | None = None,
        *,
        poisons_source: bool = False,
    ) -> LayerCopies:
        """The copies of `swaps`, all in one direction (the scheduler sees to it): one copy per layer moves them all."""
        tiers = {(swap.src_tier, swap.dst_tier) for swap in swaps} or {(Tier.DEVICE, Tier.HOST)}
        assert len(tiers) == 1, f"swaps in both directions in one plan: {swaps}"
        source, target = tiers.pop()
        pairs = [pair for swap in swaps for pair in zip(swap.src_block_ids, swap.dst_block_ids, strict=True)]
        array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return cls(caches[source], caches[target], array, pool, max_gbps, poisons_source=poisons_source)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._num_waited == self._num_layers

    def submit_next(self) -> None:
        """Submit the copy of one more layer, if there is one."""
        layer = len(self.tickets)
        if layer < self._num_layers:
            src, dst = self._source.pools[layer], self._target.pools[layer]
            self.tickets.append(self._pool.submit_copy(src, dst, self._pairs, max_gbps=self._max_gbps))

    def wait(self, layer: int) -> None:
        """Block until the copies of layers up to `layer` are done."""
        while self._num_waited <= min(layer, self._num_layers - 1):
            if self._num_waited == len(self.tickets):
                self.submit_next()
            self.tickets[self._num_waited].wait()
            if self._poisons_source:
                self._source.pools[self._num_waited][self._pairs.array[:, 0].tolist()] = float("nan")
            self._num_waited += 1

    def finish(self) -> None:
        """Submit what is left, and block until all is done."""
        while len(self.tickets) < self._num_layers:
            self.submit_next()
        self.wait(self._num_layers - 1)
