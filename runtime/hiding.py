"""Step 4's arithmetic: how many host decodes the device's work hides (METHOD, "the six steps").

    T_l0 >= T_ca1    and    T_l1 + T_ga0 >= T_ca0

All sums of KV are differences of one running sum over the host decodes in their order, so trying a number costs two
look-ups in the cost tables, however many requests there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from neo_compile.runtime.cost_model import CostModel, SubBatchLoad


class HostDecodes:
    """The host decodes of one decision, in their order, as loads.

    Args:
        num_computed: tokens of each whose KV is in the cache.
    """

    def __init__(self, num_computed: Iterable[int], cost_model: CostModel) -> None:
        self.cost_model = cost_model
        self._num_computed = [0, *accumulate(num_computed)]

    def kv_tokens(self, first: int, last: int) -> int:
        """KV that `decodes[first:last]` read; each reads its computed tokens and the newest."""
        return self._num_computed[last] - self._num_computed[first] + last - first

    def fill_slack(self, base: SubBatchLoad, limit: int) -> tuple[int, int]:
        """The most host decodes (in batch-1, in batch-0) under the hiding constraints.

        Each sub-batch's host decodes lengthen its own linear stage, which gives the other's more room: a few rounds
        reach the fixed point.
        """
        device_ms = self._device_ms(base)
        num_batch_1 = num_batch_0 = 0
        for _ in range(3):
            before = (num_batch_1, num_batch_0)
            num_batch_1 = self.num_hidden(0, limit, self.cost_model.linear_ms(base.num_tokens + num_batch_0))
            room_ms = self.cost_model.linear_ms(num_batch_1) + device_ms
            num_batch_0 = self.num_hidden(num_batch_1, limit, room_ms)
            if (num_batch_1, num_batch_0) == before or num_batch_1 + num_batch_0 == limit:
                break
        return num_batch_1, num_batch_0

    def split_evenly_loaded(self, base: SubBatchLoad, num: int) -> tuple[int, int]:
        """All `num` host decodes, split so that both sub-batches' host attention is exposed (or hidden) alike."""
        device_ms = self._device_ms(base)
        linear_ms = self.cost_model.linear_ms

        def leans_on_batch_0(num_batch_1: int) -> bool:
            exposed_1 = self._host_ms(0, num_batch_1) - linear_ms(base.num_tokens + num - num_batch_1)
            exposed_0 = self._host_ms(num_batch_1, num) - linear_ms(num_batch_1) - device_ms
            return exposed_1 <= exposed_0

        num_batch_1 = max(_largest(num, leans_on_batch_0), min(1, num))
        return num_batch_1, num - num_batch_1

    def num_hidden_unsplit(self, base: SubBatchLoad, limit: int) -> int:
        """The most host decodes that hide under the device attention of their own, single, batch."""
        return self.num_hidden(0, limit, self._device_ms(base))

    def num_hidden(self, first: int, limit: int, room_ms: float) -> int:
        """How many of `decodes[first:limit]`, from the first, have their attention done in `room_ms`."""
        return _largest(limit - first, lambda num: self._host_ms(first, first + num) <= room_ms)

    def _device_ms(self, base: SubBatchLoad) -> float:
        decode_ms = self.cost_model.device_decode_ms(base.num_device_decodes, base.device_kv_tokens)
        return base.prefill_attention_ms + decode_ms

    def _host_ms(self, first: int, last: int) -> float:
        return self.cost_model.host_attention_ms(last - first, self.kv_tokens(first, last))


def _largest(limit: int, is_allowed: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that is allowed; allowed means all smaller ones (but 0) are too."""
    if limit <= 0 or is_allowed(limit):
        return max(limit, 0)
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if is_allowed(middle):
            low = middle
        else:
            high = middle
    return low
