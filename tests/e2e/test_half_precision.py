"""Half precision: a linear's rows depend on how many there are, so a token may differ from Hugging Face's, but only
where two candidates are nearly tied."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.engines import greedy, make_engine, random_prompts, tiny_llama

NEAR_TIE = {torch.bfloat16: 0.15, torch.float16: 0.03, torch.float32: 1e-3}


def worst_gap(model, prompt, tokens):
    """How far below the best logit, in Hugging Face's forward over the whole text, the chosen tokens lie at most."""
    ids = torch.tensor([prompt + tokens[:-1]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((logits.max(dim=-1).values - chosen).max())


@pytest.mark.parametrize("dtype", NEAR_TIE)
def test_tokens_differ_only_at_near_ties(dtype):
    model = tiny_llama(dtype=dtype)
    prompts = random_prompts([5, 17, 40, 33, 16, 28, 9, 50], seed=3)
    with make_engine(model, policy="neo", device_blocks=6) as engine:
        outputs = engine.generate(prompts, greedy(20))
        assert engine.stats().num_host_decode_tokens > 0
    gaps = [worst_gap(model, prompt, output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    assert max(gaps) < NEAR_TIE[dtype], gaps


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16])
def test_a_cache_of_lower_precision_than_the_model(cache_dtype):
    model = tiny_llama()
    prompts = random_prompts([5, 17, 40, 33, 16, 28], seed=4)
    with make_engine(model, policy="neo", device_blocks=6, dtype=cache_dtype) as engine:
        outputs = engine.generate(prompts, greedy(16))
        assert engine.stats().bytes_per_block == 3 * 16 * 2 * 2 * 8 * 2
    gaps = [worst_gap(model, prompt, output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    assert max(gaps) < NEAR_TIE[cache_dtype], gaps
