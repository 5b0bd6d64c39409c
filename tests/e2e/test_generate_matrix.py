"""Every way of calling `generate` on every kind of attention: the same results as eager, really served.

The default run takes every use on one family and a few on the others; the product of all is slow.
"""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch

import neo_compile
from tests.helpers.generation import enable_one_tier, enable_tiers
from tests.helpers.models import tiny_model
from tests.helpers.uses import BATCH, USES

# One family for each way that attention differs: grouped heads; fused projections, learnt positions and no groups;
# a window; soft caps beside windows; two rotary tables; norms of q and k.
FAMILIES = ("Llama", "GPT2", "Mistral", "Gemma2", "Gemma3Text", "Qwen3", "OPT")
SAMPLE = ("greedy", "beams", "assisted", "continue from cache", "output attentions")


def _cases() -> list[Any]:
    cases = []
    for family in FAMILIES:
        for use in USES:
            is_default = family == "Llama" or use in SAMPLE
            cases.append(pytest.param(family, use, marks=() if is_default else pytest.mark.slow, id=f"{family}-{use}"))
    return cases


@pytest.fixture(scope="module")
def enabled_models() -> Any:
    """family -> (enabled on two tiers, its twin in eager, a draft model); one capture per family."""
    made: dict[str, tuple[Any, Any, Any]] = {}

    def get(family: str) -> tuple[Any, Any, Any]:
        if family not in made:
            model = tiny_model(family)
            model.generation_config.eos_token_id = None
            eager = copy.deepcopy(model)
            draft = tiny_model(family, seed=3)
            draft.generation_config.eos_token_id = None
            enable_tiers(model, block_size=4, device_blocks=18, host_blocks=400)
            made[family] = (model, eager, draft)
        return made[family]

    yield get
    for model, _, _ in made.values():
        neo_compile.disable(model)


@pytest.mark.parametrize(("family", "name"), _cases())
def test_results_equal_eager(enabled_models, family, name):
    use = USES[name]
    model, eager, draft = enabled_models(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what neo says is counted below; what transformers says is not the subject
        expected = use.run(eager, draft)
        before = neo_compile.stats(model)
        actual = use.run(model, draft)
    after = neo_compile.stats(model)
    _assert_equal(actual, expected)
    _assert_served(before, after, use)


def test_right_padding_warns_as_ever_and_falls_back_by_name(enabled_models, caplog):
    """The logits of padding after a prompt, which nobody should want: transformers warns, the results are its own."""
    model, eager, _ = enabled_models("Llama")
    inputs = {name: tensor.flip(1) for name, tensor in BATCH.items()}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = eager.generate(**inputs, **options)
    caplog.clear()
    before = neo_compile.stats(model).fallbacks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = model.generate(**inputs, **options)
    after = neo_compile.stats(model).fallbacks
    assert torch.equal(actual, expected)
    (reason,) = [reason for reason in after if after[reason] > before.get(reason, 0)]
    assert "padding after a prompt" in reason


def test_an_encoder_decoder_is_refused_by_name():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    inputs = {"input_ids": torch.arange(3, 11)[None], "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**inputs)
    with enable_one_tier(model):
        with pytest.warns(UserWarning, match="EncoderDecoderCache"):
            assert torch.equal(model.generate(**inputs), expected)
        stats = neo_compile.stats(model)
    assert stats.num_served == 0
    assert all("EncoderDecoder" in reason for reason in stats.fallbacks), stats.fallbacks


def _assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            _assert_equal(ours, theirs)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=0.0101)
    else:
        assert actual == expected


def _assert_served(before: Any, after: Any, use: Any) -> None:
    """Nothing fell back but for the reasons that the use names; no block is left taken."""
    new = {reason for reason, count in after.fallbacks.items() if count > before.fallbacks.get(reason, 0)}
    assert len(new) == len(use.fallbacks), new
    for part in use.fallbacks:
        assert any(part in reason for reason in new), new
    num_served = after.num_served - before.num_served
    assert (num_served > 0) is not bool(use.fallbacks)
    assert num_served + after.num_fallbacks - before.num_fallbacks == after.num_forwards - before.num_forwards
    gc.collect()
    assert after.device_blocks_taken == after.host_blocks_taken == 0


def test_the_uses_reach_the_host(enabled_models):
    """The device cache is too small for the batch, so a use of a batch with a cache decodes rows on the host."""
    model, _, draft = enabled_models("Llama")
    for name in ("greedy", "beams", "sampling", "chunked prefill", "guidance", "batches of other sizes"):
        before = neo_compile.stats(model).num_host_row_decodes
        USES[name].run(model, draft)
        assert neo_compile.stats(model).num_host_row_decodes > before, name
