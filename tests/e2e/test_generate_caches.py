"""Caches of an enabled model: continued, copied, cropped, handed back, and what falls back in the middle."""

from __future__ import annotations

import copy
import gc
import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import neo_compile
from neo_compile.errors import ConfigError
from tests.helpers.generation import enable_one_tier, enable_tiers, left_padded, pair
from tests.helpers.models import tiny_model

PROMPTS = left_padded([9, 4, 17, 16])
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return pair()


def continue_with(model: Any, first: Any, cache: Any, extra: torch.Tensor, **options: Any) -> Any:
    """`generate` goes on from `first`'s tokens and further ones."""
    ids = torch.cat([first.sequences, extra], dim=1)
    mask = torch.cat([PROMPTS["attention_mask"], torch.ones(len(ids), ids.shape[1] - 17, dtype=torch.int64)], dim=1)
    return model.generate(input_ids=ids, attention_mask=mask, **{forward_name(model): cache}, **OPTIONS | options)


def test_continue_copy_and_hand_back(models):
    model, eager = models
    extra = torch.randint(1, 199, (4, 5), generator=torch.Generator().manual_seed(1))
    theirs = eager.generate(**PROMPTS, **OPTIONS)
    expected = continue_with(eager, theirs, copy.deepcopy(theirs[forward_name(eager)]), extra).sequences
    with enable_tiers(model, device_blocks=4):
        ours = model.generate(**PROMPTS, **OPTIONS)
        cache = ours[forward_name(model)]
        taken = neo_compile.stats(model).device_blocks_taken
        assert taken > 0
        copied = copy.deepcopy(cache)
        assert neo_compile.stats(model).device_blocks_taken == taken, "a copy shares every block"
        plain = neo_compile.to_dynamic_cache(cache)
        wanted = theirs[forward_name(eager)]
        visible = PROMPTS["attention_mask"].bool()
        for layer, their_layer in zip(plain.layers, wanted.layers, strict=True):
            assert type(layer) is type(their_layer)
            assert layer.keys.shape == their_layer.keys.shape
            for mine, other in ((layer.keys, their_layer.keys), (layer.values, their_layer.values)):
                mine, other = mine.transpose(1, 2), other.transpose(1, 2)
                torch.testing.assert_close(mine[:, :17][visible], other[:, :17][visible], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(mine[:, 17:], other[:, 17:], rtol=1e-4, atol=1e-4)
        for start in (copied, cache, plain):  # the copy first: it must not write into what it shares
            assert torch.equal(continue_with(model, ours, start, extra).sequences, expected)
        stats = neo_compile.stats(model)
        assert stats.num_adopted == 1, "the plain cache"
        assert not stats.fallbacks
        del ours, cache, copied, plain, start, layer
        gc.collect()
        stats = neo_compile.stats(model)
        assert stats.device_blocks_taken == stats.host_blocks_taken == 0


def forward_name(model: Any) -> str:
    """What this transformers calls the cache."""
    names = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in names)


def decode(model: Any, cache: DynamicCache, input_ids: torch.Tensor, steps: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Greedy decoding by hand with a keyword or two more in each step; the last logits of each."""
    logits = []
    for options in steps:
        output = model(input_ids=input_ids, use_cache=True, **{forward_name(model): cache}, **options)
        logits.append(output.logits[:, -1])
        input_ids = logits[-1][:, None].argmax(-1)
    return logits


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_a_fallback_in_the_middle_goes_on_with_the_same_kv(family):
    model = tiny_model(family)
    eager = copy.deepcopy(model)
    ids = torch.randint(1, 97, (3, 11), generator=torch.Generator().manual_seed(0))
    steps: list[dict[str, Any]] = [{}, {}, {"output_hidden_states": True}, {}, {}, {"output_hidden_states": True}]
    expected = decode(eager, DynamicCache(config=eager.config), ids, steps)
    with enable_tiers(model, device_blocks=2):
        with pytest.warns(UserWarning, match="output_hidden_states") as warned:
            actual = decode(model, DynamicCache(config=model.config), ids, steps)
        stats = neo_compile.stats(model)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert stats.fallbacks == {"the argument output_hidden_states": 2}
    assert (stats.num_served, stats.num_densified, stats.num_adopted) == (4, 2, 1)
    assert len([w for w in warned if "output_hidden_states" in str(w.message)]) == 1


@torch.no_grad()
def test_crop_reset_select_and_repeat(models):
    model, eager = models
    ids = torch.randint(1, 199, (3, 20), generator=torch.Generator().manual_seed(0))
    results = []
    for which in (eager, model):
        cache = DynamicCache(config=which.config)
        name = forward_name(which)
        with enable_tiers(which, device_blocks=3) if which is model else nullcontext():
            logits = [which(ids, **{name: cache}).logits]
            cache.crop(-5)
            logits.append(which(ids[:, 15:18], **{name: cache}).logits)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            logits.append(which(ids[[2, 2, 0, 0], 18:19], **{name: cache}).logits)
            cache.reorder_cache(torch.tensor([3, 1, 1, 0]))
            logits.append(which(ids[[0, 2, 2, 2], 19:20], **{name: cache}).logits)
            assert cache.get_seq_length() == 20
            keys = cache.layers[1].keys
            cache.reset()
            logits.append(which(ids[[0, 1, 2, 0], :7], **{name: cache}).logits)
            if which is model:
                stats = neo_compile.stats(model)
                assert not stats.fallbacks
                assert stats.num_host_row_decodes > 0
        results.append([*logits, keys])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"labels": torch.ones(2, 6, dtype=torch.int64)}, "labels"),
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 6, 32)}, "inputs_embeds"),
        ({"attention_mask": torch.zeros(2, 1, 6, 6)}, "attention_mask that is not"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])}, "padding after a prompt"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])}, "padding without position_ids"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "packed sequences"),
        ({"cache": "static"}, "a StaticCache"),
    ],
)
def test_what_is_not_served_falls_back_with_its_name(models, options, reason):
    model, eager = models
    options = {"input_ids": torch.arange(1, 13).view(2, 6), **options}
    caches = [{}, {}]
    if options.pop("cache", None):
        caches = [{forward_name(eager): StaticCache(config=eager.config, max_cache_len=8)} for _ in range(2)]
    expected = eager(**options, **caches[0]).logits
    with enable_one_tier(model):
        with pytest.warns(UserWarning, match=reason):
            actual = model(**options, **caches[1]).logits
        (counted,) = neo_compile.stats(model).fallbacks
    assert reason in counted
    assert torch.equal(actual, expected)


def test_gradients_fall_back(models):
    model, _ = models
    with enable_one_tier(model), pytest.warns(UserWarning, match="gradients"):
        model(torch.ones(1, 3, dtype=torch.int64)).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    model.zero_grad()


def test_hooks_fall_back(models):
    model, eager = models
    seen = []
    with enable_one_tier(model):
        handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
        with pytest.warns(UserWarning, match="hooks"):
            output = model.generate(**PROMPTS, max_new_tokens=3, do_sample=False)
        handle.remove()
    assert len(seen) == 3
    assert torch.equal(output, eager.generate(**PROMPTS, max_new_tokens=3, do_sample=False))


def test_an_unsupported_model_generates_as_before():
    model = tiny_model("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    ids = torch.arange(3, 9)[None]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with pytest.warns(UserWarning, match="rotates by 'dynamic'"):
        enabled = enable_one_tier(model)
    with enabled:
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        stats = neo_compile.stats(model)
    assert stats.num_fallbacks == stats.num_forwards > 0
    assert stats.num_captures == 0


@torch.no_grad()
def test_new_parameters_are_captured_anew(models):
    model, _ = pair()
    ids = torch.arange(3, 9)[None]
    with enable_one_tier(model):
        model(ids)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
        expected = type(model).forward(model, ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert neo_compile.stats(model).num_captures == 2


@torch.no_grad()
def test_padding_cannot_become_a_token_later(models):
    model, _ = models
    name = forward_name(model)
    mask, cache = torch.tensor([[0, 1, 1]]), DynamicCache(config=model.config)
    with enable_one_tier(model):
        model(torch.ones_like(mask), attention_mask=mask, position_ids=torch.tensor([[0, 0, 1]]), **{name: cache})
        with pytest.raises(ConfigError, match="shows 1 cached columns that were padding"):
            model(torch.ones(1, 1, dtype=torch.int64), **{name: cache})
