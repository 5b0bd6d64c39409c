"""Families with different attention (windows, soft caps, sinks, latent KV, fused and odd layouts) on two tiers."""

from __future__ import annotations

from random import Random

import pytest

from tests.helpers.engines import force_swaps, greedy, hf_greedy, make_engine, random_prompts, run_to_end
from tests.helpers.models import FAMILIES, MORE_FAMILIES, VOCAB_SIZE, family_model, slow

MAX_TOKENS = 20


@pytest.mark.parametrize("family", [*FAMILIES, *slow(MORE_FAMILIES)])
def test_tokens_with_swaps_equal_hugging_face(family):
    model = family_model(family)
    prompts = random_prompts([3, 7, 16, 21, 33], seed=1, low=3, high=VOCAB_SIZE)
    expected = [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    random, moved = Random(family), []
    with make_engine(model, policy="neo", device_blocks=12, host_blocks=30, max_num_batched_tokens=24) as engine:
        ids = [engine.add_request(prompt, greedy(MAX_TOKENS, ignore_eos=True)) for prompt in prompts]
        tokens = run_to_end(engine, after_step=lambda engine: moved.append(force_swaps(engine, random)))
        stats = engine.stats()
    assert [tokens[request_id] for request_id in ids] == expected
    assert sum(moved) > 5, moved
    assert stats.num_host_decode_tokens > 0
