"""Greedy tokens of the engine equal Hugging Face's own, for every policy, strategy and answer to a full cache."""

from __future__ import annotations

from random import Random

import pytest

from tests.helpers.engines import (
    assert_all_blocks_free,
    balanced_costs,
    force_swaps,
    greedy,
    hf_greedy,
    make_engine,
    poison_free_blocks,
    random_prompts,
    run_to_end,
    tiny_llama,
)

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 50, 63, 64)
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(model, prompts):
    return [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]


CASES = {
    "device-only-swap": {"policy": "device-only", "full_cache": "swap"},
    "device-only-recompute": {"policy": "device-only", "full_cache": "recompute"},
    "device-only-reserve": {"policy": "device-only", "full_cache": "reserve"},
    "host-only": {"policy": "host-only"},
    "neo": {"policy": "neo"},
    "neo-pipelined": {"policy": "neo", "strategies": ("pipelined",)},
    "neo-unsplit": {"policy": "neo", "strategies": ("unsplit",)},
    "symmetric": {"policy": "symmetric"},
    "neo-chunked": {"policy": "neo", "max_num_batched_tokens": 24},
    "neo-one-device-block": {"policy": "neo", "device_blocks": 1, "host_blocks": 64},
    "neo-small-host": {"policy": "neo", "device_blocks": 6, "host_blocks": 8},
    "neo-block-of-1": {"policy": "neo", "block_size": 1, "device_blocks": 130, "host_blocks": 900},
    "neo-few-seqs": {"policy": "neo", "max_num_seqs": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_hugging_face(model, prompts, expected, name):
    with make_engine(model, **CASES[name]) as engine:
        ids = [engine.add_request(prompt, greedy(MAX_TOKENS)) for prompt in prompts]
        tokens = run_to_end(engine, after_step=poison_free_blocks)
        assert [tokens[request_id] for request_id in ids] == expected
        assert_all_blocks_free(engine)


def test_pipelined_iterations_and_swaps_really_happen(model, prompts, expected):
    """The cases above would also pass if every plan were device-only."""
    costs = balanced_costs(host_tokens_per_ms=300.0)
    with make_engine(model, policy="neo", cost_model=costs) as engine:
        outputs = engine.generate(prompts, greedy(MAX_TOKENS))
        stats = engine.stats()
    assert [output.token_ids for output in outputs] == expected
    assert stats.iterations_by_strategy.get("pipelined", 0) > 0, stats
    assert stats.num_host_requests > 0
    assert stats.num_host_decode_tokens > 0


def test_device_only_swaps(model, prompts, expected):
    with make_engine(model, policy="device-only", full_cache="swap") as engine:
        outputs = engine.generate(prompts, greedy(MAX_TOKENS))
        stats = engine.stats()
    assert [output.token_ids for output in outputs] == expected
    assert stats.num_swap_outs > 0
    assert stats.num_swap_ins > 0
    assert stats.num_host_decode_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_and_slow_hosts(model, seed):
    """Requests that arrive while others run; hosts from useless to as fast as the device."""
    prompts = random_prompts([(seed * 37 + 13 * i) % 70 + 1 for i in range(14)], seed=seed)
    wanted = {f"r{i}": hf_greedy(model, prompt, 5 + i) for i, prompt in enumerate(prompts)}
    costs = balanced_costs(host_tokens_per_ms=(50.0, 500.0, 4000.0, 8000.0)[seed])
    with make_engine(model, policy="neo", cost_model=costs, device_blocks=7) as engine:
        waiting = list(enumerate(prompts))

        def arrive(engine):
            poison_free_blocks(engine)
            if waiting:
                index, prompt = waiting.pop(0)
                engine.add_request(prompt, greedy(5 + index), request_id=f"r{index}")

        arrive(engine)
        tokens = run_to_end(engine, after_step=arrive)
    assert tokens == wanted


@pytest.mark.parametrize("policy", ["neo", "symmetric", "host-only"])
def test_forced_swaps_every_iteration(model, prompts, expected, policy):
    """Running requests are thrown from tier to tier between iterations, in the middle of prefills too."""
    random = Random(policy)
    moved = []
    with make_engine(model, policy=policy, device_blocks=20, host_blocks=60, max_num_batched_tokens=70) as engine:
        ids = [engine.add_request(prompt, greedy(MAX_TOKENS)) for prompt in prompts]
        tokens = run_to_end(engine, after_step=lambda engine: moved.append(force_swaps(engine, random)))
    assert [tokens[request_id] for request_id in ids] == expected
    assert sum(moved) > 50, moved


def test_outputs_do_not_mix(model):
    """Prompts from disjoint vocabularies under churn: each output equals its solo run."""
    prompts = [random_prompts([20 + i], seed=i, low=1 + 20 * i, high=21 + 20 * i)[0] for i in range(9)]
    with make_engine(model, policy="neo", device_blocks=5) as engine:
        together = [output.token_ids for output in engine.generate(prompts, greedy(12))]
    with make_engine(model, policy="device-only", device_blocks=5) as engine:
        alone = [engine.generate(prompt, greedy(12))[0].token_ids for prompt in prompts]
    assert together == alone
