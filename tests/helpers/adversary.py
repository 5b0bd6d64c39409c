"""Random engines on the adversarial device, with swaps forced into their plans; and the check that tokens are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch

from neo_compile.runtime.engine import Engine
from neo_compile.runtime.plan import IterationPlan, SubBatch, Swap
from neo_compile.runtime.request import Request, Tier
from tests.helpers.engines import VOCAB_SIZE, assert_all_blocks_free, balanced_costs, greedy, make_engine

MAX_PROMPT, MAX_NEW = 70, 16


class WrongTokensError(AssertionError):
    """An engine's tokens are not the model's own."""


def serve_at_random(model: Any, seed: int, *, num_requests: int = 12) -> Counter[str]:
    """Serve random requests on a random engine; how often what happened.

    Raises:
        WrongTokensError: an answer is not what the model itself says; the message holds the configuration.
    """
    random = Random(seed)
    config = random_config(random)
    prompts = {f"r{i}": random_prompt(random) for i in range(num_requests)}
    waiting, tokens, counts = list(prompts), {}, Counter()
    with make_engine(model, kind="adversarial", seed=seed, **config) as engine:
        meddler = Meddler(engine, random, swap_share=random.choice([0.0, 0.2, 0.5]))
        rush = random.choice([0.2, 0.5, 0.9])
        while waiting or engine.has_unfinished:
            while waiting and (not engine.has_unfinished or random.random() < rush):
                request_id = waiting.pop()
                engine.add_request(prompts[request_id], greedy(random.randint(1, MAX_NEW)), request_id=request_id)
            for output in engine.step():
                if output.is_finished:
                    if output.finish_reason != "length":
                        raise WrongTokensError(f"seed {seed}, {config}: {output.request_id} ended: {output.error}")
                    tokens[output.request_id] = output.token_ids
            engine._core.scheduler.check_integrity()
            for workers in (engine._core.device.attention_pool, engine._core.device.host_pool):
                if workers.num_outstanding:
                    raise WrongTokensError(f"seed {seed}: work outlived its iteration")
            counts["iterations"] += 1
        assert_all_blocks_free(engine)
        counts += meddler.counts
        counts.update({f"{name} iterations": n for name, n in engine.stats().iterations_by_strategy.items()})
    for request_id, prompt in prompts.items():
        if not is_greedy(model, prompt, tokens[request_id]):
            raise WrongTokensError(f"seed {seed}, {config}: {request_id} has {tokens[request_id]}")
    return counts


def random_config(random: Random) -> dict[str, Any]:
    """Caches that are mostly too small, budgets that cut prompts anywhere, every policy."""
    block_size = random.choice([1, 3, 4, 8, 16])
    largest = -(-(MAX_PROMPT + MAX_NEW) // block_size)
    policy = random.choice(["neo", "neo", "neo", "neo", "symmetric", "host-only", "device-only"])
    config: dict[str, Any] = {
        "policy": policy,
        "block_size": block_size,
        "device_blocks": random.randint(1, 3 * largest),
        "host_blocks": random.randint(largest, 6 * largest),
        "max_num_batched_tokens": random.choice([10, 25, 60, 200]),
        "staging_blocks": random.choice([None, 1, 2, 3, 7, 20]),
        "cost_model": balanced_costs(host_tokens_per_ms=random.choice([300.0, 1000.0, 4000.0])),
    }
    if policy == "neo":
        config["strategies"] = random.choice([None, ("pipelined",), ("unsplit",)])
    if policy == "device-only":
        config["device_blocks"] = random.randint(largest, 3 * largest)
        config["full_cache"] = random.choice(["swap", "recompute"])
    return config


def random_prompt(random: Random) -> list[int]:
    return [random.randrange(1, VOCAB_SIZE) for _ in range(random.randint(1, MAX_PROMPT))]


@torch.no_grad()
def is_greedy(model: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Whether `model` itself would continue `prompt` with `tokens`: each is the likeliest after those before it."""
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return bool(logits.argmax(-1).tolist() == tokens)


class Meddler:
    """Changes an engine's plans in ways that the scheduler could have chosen, but rarely does.

    Requests of the plan are swapped to the other tier (in the plan's own direction), where they run in this very
    iteration; and others are given the blocks that those have just left.
    """

    def __init__(self, engine: Engine, random: Random, swap_share: float) -> None:
        self.counts: Counter[str] = Counter()
        self._scheduler, self._queues = engine._core.scheduler, engine._core.scheduler.queues
        self._random, self._swap_share = random, swap_share
        self._may_swap = engine._core.scheduler.policy.computes_on_host
        self._schedule = engine._core.scheduler.schedule
        engine._core.scheduler.schedule = self.schedule  # type: ignore[method-assign]

    def schedule(self) -> IterationPlan:
        """The scheduler's plan, meddled with."""
        plan = self._schedule()
        if self._may_swap and not plan.is_empty:
            plan = self._swap_more(plan)
        swaps = (*plan.swap_outs, *plan.swap_ins)
        sources = {block_id for swap in swaps for block_id in swap.src_block_ids}
        if swaps:
            self._rehome(plan, swaps[0].src_tier)
            reused = sources & set(self._held_blocks(swaps[0].src_tier))
            self.counts["blocks reused at once"] += len(reused)
        self.counts["swaps"] += len(swaps)
        for sub_batch in plan.sub_batches:
            self.counts["host decodes"] += len(sub_batch.host_decodes)
            host_prefills = [prefill for prefill in sub_batch.prefills if prefill.tier is Tier.HOST]
            block_size = self._queues.pools[Tier.HOST].block_size
            self.counts["host prefills"] += len(host_prefills)
            self.counts["host prefills in mid-block"] += sum(p.start % block_size != 0 for p in host_prefills)
        return plan

    def _swap_more(self, plan: IterationPlan) -> IterationPlan:
        own = (*plan.swap_outs, *plan.swap_ins)
        source = own[0].src_tier if own else self._random.choice(list(Tier))
        swapped = {swap.request.request_id for swap in own}
        swaps: list[Swap] = []
        for request in plan.requests:
            is_movable = request.tier is source and request.request_id not in swapped
            num_blocks = len(request.block_ids)
            has_room = self._queues.pools[source.other].can_allocate(num_blocks)
            if is_movable and has_room and self._random.random() < self._swap_share:
                swaps.append(self._queues.swap(request, num_blocks, self._scheduler.iteration))
        if not swaps:
            return plan
        name = "swap_outs" if source is Tier.DEVICE else "swap_ins"
        return replace(
            plan,
            sub_batches=tuple(_by_tier(sub_batch) for sub_batch in plan.sub_batches),
            **{name: (*own, *swaps)},
        )

    def _rehome(self, plan: IterationPlan, tier: Tier) -> None:
        """Blocks that hold no KV yet are exchanged for the ones freed last."""
        pool = self._queues.pools[tier]
        for request in plan.requests:
            if request.tier is tier:
                for index in range(pool.num_blocks_for(request.num_computed_tokens), len(request.block_ids)):
                    if pool.can_allocate(1):
                        (new,), old = pool.allocate(1), request.block_ids[index]
                        request.block_ids[index] = new
                        pool.free([old])

    def _held_blocks(self, tier: Tier) -> Iterator[int]:
        return (block_id for request in self._queues.running[tier].values() for block_id in request.block_ids)


def _by_tier(sub_batch: SubBatch) -> SubBatch:
    """The same requests, each where it is now."""
    decodes: list[Request] = [*sub_batch.device_decodes, *sub_batch.host_decodes]
    return SubBatch(
        prefills=tuple(
            replace(prefill, tier=prefill.request.tier or prefill.tier, samples=prefill.samples)
            for prefill in sub_batch.prefills
        ),
        device_decodes=tuple(request for request in decodes if request.tier is Tier.DEVICE),
        host_decodes=tuple(request for request in decodes if request.tier is Tier.HOST),
    )
