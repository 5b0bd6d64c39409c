"""Swap copies: layer by layer, just ahead of use, waited for by the layer that needs them and by no other."""

from __future__ import annotations

import pytest
import torch

from neo_compile.host_attention import WorkerPool
from neo_compile.runtime.kv_cache import KVCache
from neo_compile.runtime.plan import Swap
from neo_compile.runtime.request import Request, Tier
from neo_compile.runtime.swap import LayerCopies
from tests.helpers.engines import (
    balanced_costs,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
    tiny_llama,
)
from tests.runtime.test_kv_cache import make_cache

NUM_LAYERS = 6


class RecordingPool:
    """A worker pool that writes down what was submitted and what was waited for, in order."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.log: list[str] = []
        self.num_copies = 0

    def submit_copy(self, *args, **options):
        self.num_copies += 1
        return self._logged(f"copy {self.num_copies - 1}", self.pool.submit_copy(*args, **options))

    def submit_rows(self, *args, **options):
        return self._logged("attention", self.pool.submit_rows(*args, **options))

    def _logged(self, name, ticket):
        self.log.append(f"submit {name}")
        return LoggedTicket(self.log, name, ticket)

    def __getattr__(self, name):
        return getattr(self.pool, name)


class LoggedTicket:
    def __init__(self, log, name, ticket) -> None:
        self.log, self.name, self.ticket = log, name, ticket

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        self.ticket.wait()

    def __getattr__(self, name):
        return getattr(self.ticket, name)


@pytest.fixture
def pool():
    with WorkerPool(1) as pool:
        yield RecordingPool(pool)


def make_copies(pool, **options) -> tuple[LayerCopies, dict[Tier, KVCache]]:
    caches = {tier: make_cache(4) for tier in Tier}
    for cache in caches.values():
        for tensor in cache.pools:
            tensor.fill_(1.0)
    swap = Swap(Request("r", [1], 1), Tier.DEVICE, Tier.HOST, (1, 3), (0, 2))
    return LayerCopies.of_swaps([swap], caches, pool, **options), caches


def test_a_layer_waits_for_its_own_copy_only(pool):
    copies, caches = make_copies(pool)
    num_layers = len(caches[Tier.HOST].pools)
    assert num_layers == 2
    copies.wait(0)
    assert pool.log == ["submit copy 0", "submit copy 1", "wait copy 0"]
    copies.wait(0)  # the second sub-batch
    assert pool.log[3:] == []
    copies.wait(1)
    assert pool.log[3:] == ["wait copy 1"]
    assert copies.is_done
    copies.finish()
    assert len(pool.log) == 4


def test_waiting_for_a_layer_submits_what_nobody_has_submitted(pool, monkeypatch):
    monkeypatch.setattr("neo_compile.runtime.swap._LAYERS_AHEAD", 0)
    copies, _ = make_copies(pool)
    assert pool.log == []
    copies.wait(1)
    assert pool.log == ["submit copy 0", "wait copy 0", "submit copy 1", "wait copy 1"]


def test_no_swaps_no_copies(pool):
    copies = LayerCopies.of_swaps((), {tier: make_cache(4) for tier in Tier}, pool)
    assert copies.is_done
    copies.submit_next()
    copies.finish()
    assert pool.log == []


@pytest.mark.parametrize("poisons_source", [False, True])
def test_poisoned_sources(pool, poisons_source):
    copies, caches = make_copies(pool, poisons_source=poisons_source)
    copies.finish()
    for source in caches[Tier.DEVICE].pools:
        assert torch.isnan(source[[1, 3]]).all() == poisons_source
        assert not torch.isnan(source[[0, 2]]).any()
    assert not any(torch.isnan(target).any() for target in caches[Tier.HOST].pools)


def test_host_attention_does_not_queue_behind_the_copies_of_all_layers():
    """In every iteration that swaps: at most two layers' copies are submitted ahead of a layer's host attention."""
    model = tiny_llama(NUM_LAYERS)
    prompts = random_prompts([30] * 8)
    costs = balanced_costs(NUM_LAYERS)
    logs = []
    with make_engine(model, policy="neo", strategies=("pipelined",), cost_model=costs) as engine:
        executor = engine._core.executor
        executor.device.host_pool = recorder = RecordingPool(executor.device.host_pool)

        def keep_log(engine):
            logs.append(recorder.log)
            recorder.log, recorder.num_copies = [], 0

        ids = [engine.add_request(prompt, greedy(12)) for prompt in prompts]
        tokens = run_to_end(engine, after_step=keep_log)
    assert [tokens[request_id] for request_id in ids] == [hf_greedy(model, prompt, 12) for prompt in prompts]
    logs = [log for log in logs if "submit copy 0" in log and "submit attention" in log]
    assert logs, "no iteration had both swaps and host attention"
    for log in logs:
        assert log.count("submit attention") in (NUM_LAYERS, 2 * NUM_LAYERS)
        num_sub_batches = log.count("submit attention") // NUM_LAYERS
        num_copies = num_attentions = 0
        for entry in log:
            num_copies += entry.startswith("submit copy")
            num_attentions += entry == "submit attention"
            assert num_copies <= num_attentions // num_sub_batches + 2, log
        assert num_copies == NUM_LAYERS
        for layer in range(NUM_LAYERS):
            attention = [i for i, entry in enumerate(log) if entry == "submit attention"][layer * num_sub_batches]
            assert log.index(f"wait copy {layer}") < attention


def test_swaps_of_an_iteration_without_tokens_are_copied(pool):
    """A plan may only swap: its copies are done when it ends."""
    from neo_compile.runtime.plan import IterationPlan, Strategy

    model = tiny_llama(2)
    with make_engine(model) as engine:
        executor = engine._core.executor
        for tier, value in ((Tier.DEVICE, 7.0), (Tier.HOST, 0.0)):
            for tensor in executor.caches[tier].pools:
                tensor.fill_(value)
        swap = Swap(Request("r", [1], 1), Tier.DEVICE, Tier.HOST, (1, 3), (0, 2))
        with engine._core.device.launching():
            result = executor.execute(IterationPlan(Strategy.DEVICE_ONLY, swap_outs=(swap,)))
        assert result.requests == ()
        assert all((tensor[[0, 2]] == 7.0).all() for tensor in executor.caches[Tier.HOST].pools)
