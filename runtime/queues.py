"""Where every unfinished request is and which blocks it holds.

    add -> waiting -> admit -> running[DEVICE] <-- swap --> running[HOST] -> finish
              ^--------------- preempt -------------------------'

The only code that moves a request between queues or touches its blocks; it decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import NamedTuple

from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.plan import Swap
from neo_compile.runtime.request import FinishReason, Request, RequestStatus, Tier


class Census(NamedTuple):
    """The running requests of one tier, counted in one pass.

    Attributes:
        decodes, prefills: in order of arrival in the tier.
        growing: decodes that need one more block for their next token.
        kv_tokens: tokens of all of them (a prefill's that are not computed yet included).
    """

    decodes: list[Request]
    prefills: list[Request]
    growing: list[Request]
    kv_tokens: int


class Queues:
    """The waiting queue, the running requests of each tier (in order of arrival in the tier), and the block pools."""

    def __init__(self, device_pool: BlockPool, host_pool: BlockPool) -> None:
        assert (device_pool.tier, host_pool.tier) == (Tier.DEVICE, Tier.HOST), "pools in the wrong order"
        assert device_pool.block_size == host_pool.block_size, "a swap is a block copy: block sizes must be equal"
        self.pools = {Tier.DEVICE: device_pool, Tier.HOST: host_pool}
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[Tier, dict[str, Request]] = {Tier.DEVICE: {}, Tier.HOST: {}}

    @property
    def num_running(self) -> int:
        return len(self.running[Tier.DEVICE]) + len(self.running[Tier.HOST])

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of this id."""
        for queue in (self.waiting, *self.running.values()):
            if request_id in queue:
                return queue[request_id]
        return None

    def list_running(self) -> list[Request]:
        """Device requests, then host requests."""
        return [*self.running[Tier.DEVICE].values(), *self.running[Tier.HOST].values()]

    def list_preempted(self) -> list[Request]:
        """Waiting requests that ran before; they are at the front."""
        return list(takewhile(lambda request: request.num_preemptions > 0, self.waiting.values()))

    def count(self, tier: Tier) -> Census:
        """Who is in `tier` and what they need: the one pass over all its requests that a decision makes.

        With a thousand requests every further look at each of them is a tenth of the time of a decision, so the tests
        of `Request.is_prefilling` and `num_tokens` are spelt out here.
        """
        block_size = self.pools[tier].block_size
        decodes: list[Request] = []
        prefills: list[Request] = []
        growing: list[Request] = []
        kv_tokens = 0
        for request in self.running[tier].values():
            num_computed, num_outputs = request.num_computed_tokens, len(request.output_token_ids)
            num_tokens = len(request.prompt_token_ids) + num_outputs
            kv_tokens += num_tokens
            if not num_outputs or num_computed + 1 < num_tokens:
                prefills.append(request)
                continue
            decodes.append(request)
            if num_computed >= len(request.block_ids) * block_size:
                growing.append(request)
        return Census(decodes, prefills, growing, kv_tokens)

    def num_blocks_needed(self, request: Request) -> int:
        """Blocks for all tokens known so far: what a prefill writes, and what the next decode needs."""
        return self.pools[Tier.DEVICE].num_blocks_for(request.num_tokens)

    def admit(self, request: Request, tier: Tier, num_blocks: int) -> None:
        del self.waiting[request.request_id]
        request.block_ids = self.pools[tier].allocate(num_blocks)
        request.tier = tier
        request.status = RequestStatus.RUNNING
        self.running[tier][request.request_id] = request

    def grow(self, request: Request) -> None:
        """Gives a running request one more block in its tier."""
        assert request.tier is not None, f"{request.request_id} holds no blocks"
        request.block_ids.extend(self.pools[request.tier].allocate(1))

    def swap(self, request: Request, num_blocks: int, iteration: int) -> Swap:
        """Moves a running request to the other tier, into `num_blocks` blocks (at least those with computed KV)."""
        src_tier = request.tier
        assert src_tier is not None, f"{request.request_id} holds no blocks"
        dst_tier = src_tier.other
        num_copied = self.pools[src_tier].num_blocks_for(request.num_computed_tokens)
        assert num_blocks >= num_copied, f"{num_blocks} blocks for {request.num_computed_tokens} computed tokens"
        dst_block_ids = self.pools[dst_tier].allocate(num_blocks)
        swap = Swap(
            request, src_tier, dst_tier, tuple(request.block_ids[:num_copied]), tuple(dst_block_ids[:num_copied])
        )
        self.pools[src_tier].free(request.block_ids)
        del self.running[src_tier][request.request_id]
        self.running[dst_tier][request.request_id] = request
        request.block_ids = dst_block_ids
        request.tier = dst_tier
        request.num_swaps += 1
        request.swapped_at = iteration
        return swap

    def preempt(self, request: Request) -> None:
        """Drops the request's KV; it waits, before all others, to be computed again."""
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.last_advanced = -1
        request.status = RequestStatus.WAITING
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.WAITING:
            del self.waiting[request.request_id]
        else:
            self._release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def _release(self, request: Request) -> None:
        assert request.tier is not None, f"{request.request_id} holds no blocks"
        self.pools[request.tier].free(request.block_ids)
        del self.running[request.tier][request.request_id]
        request.block_ids = []
        request.tier = None

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, queues and requests agree."""
        for tier, pool in self.pools.items():
            pool.check_integrity()
            held = [block_id for request in self.running[tier].values() for block_id in request.block_ids]
            assert len(held) == len(set(held)) == pool.num_taken, (
                f"{tier.value}: requests hold {len(held)} blocks ({len(set(held))} distinct), {pool.num_taken} taken"
            )
            for request in self.running[tier].values():
                assert (request.status, request.tier) == (RequestStatus.RUNNING, tier), request
                num_blocks = pool.num_blocks_for(request.num_computed_tokens)
                assert num_blocks <= len(request.block_ids), request
                assert request.num_computed_tokens <= request.num_tokens, request
        for request in self.waiting.values():
            assert (request.status, request.tier) == (RequestStatus.WAITING, None), request
            assert (request.block_ids, request.num_computed_tokens) == ([], 0), request

    def dump(self) -> str:
        """A few lines for a bug report."""
        lines = [
            f"{tier.value}: {len(self.running[tier])} requests, {pool.num_free} of {pool.num_blocks} blocks free"
            for tier, pool in self.pools.items()
        ]
        lines.append(f"waiting: {len(self.waiting)} requests")
        everything = [*self.list_running(), *self.waiting.values()]
        lines.extend(
            f"  {request.request_id}: {request.status.value}, {request.num_computed_tokens} of {request.num_tokens} "
            f"tokens computed, {len(request.block_ids)} blocks, {request.num_preemptions} preemptions"
            for request in everything[:20]
        )
        return "\n".join(lines)
