"""What happens to an enabled model and its caches around `generate`: changed, pickled, used from inference mode."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import neo_compile
from neo_compile.runtime.generate.enabling import CUSTOM_GENERATE, EnabledModel, serving_options
from neo_compile.runtime.generate.serving import Serving
from tests.helpers.engines import greedy, hf_greedy, make_engine
from tests.helpers.generation import ONE_THREAD, enable_one_tier, enable_tiers, left_padded, pair

PROMPTS = left_padded([9, 4])
IDS = torch.arange(3, 43)[None]


def sequences(model: Any) -> torch.Tensor:
    return model.generate(**PROMPTS, max_new_tokens=5, do_sample=False)


@torch.no_grad()
@pytest.mark.parametrize("is_shallow_copy", [False, True])
def test_layers_outlive_their_cache(is_shallow_copy):
    model, _ = pair()
    with enable_tiers(model):
        cache = model(IDS, use_cache=True).past_key_values
        expected = cache.layers[0].keys
        kept = copy.copy(cache) if is_shallow_copy else None
        layers = list(cache.layers)
        del cache
        gc.collect()
        sequences(model)  # takes blocks that were free
        assert torch.equal(layers[0].keys, expected)
        del layers, kept
        gc.collect()
        stats = neo_compile.stats(model)
        assert stats.device_blocks_taken == stats.host_blocks_taken == 0


@torch.no_grad()
def test_buffers_modules_shapes_and_strides_that_change_are_captured_anew():
    def cast(model: Any) -> None:
        model.to(torch.bfloat16).to(torch.float32)  # the same parameter objects, another inv_freq

    def transpose(model: Any) -> None:
        weight = model.lm_head.weight
        weight.data = weight.data.t().contiguous().t()

    def replace_module(model: Any) -> None:
        model.model.layers[0].mlp.act_fn = torch.nn.Tanh()

    def resize(model: Any) -> None:
        torch.manual_seed(0)
        model.resize_token_embeddings(240, mean_resizing=False)

    model, eager = pair()
    with enable_one_tier(model):
        for num_captures, change in enumerate((cast, transpose, replace_module, resize), start=2):
            for changed in (model, eager):
                change(changed)
            eager.load_state_dict(model.state_dict())
            ids = torch.tensor([[3, 239]]) if change is resize else IDS
            torch.testing.assert_close(model(ids).logits, eager(ids).logits, rtol=1e-4, atol=1e-4)
            stats = neo_compile.stats(model)
            assert (stats.num_captures, stats.num_fallbacks) == (num_captures, 0)


@torch.no_grad()
def test_parts_of_weights_written_past_their_version():
    """Rows are pruned, then the smallest weights; an engine made afterwards shares the capture."""

    def prune_rows(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.data[9:16] = 0

    def prune_smallest(model: Any) -> None:
        for layer in model.model.layers:
            weight = layer.mlp.down_proj.weight.data
            weight[weight.abs() < weight.abs().median() / 2] = 0

    model, eager = pair()
    with enable_one_tier(model):
        before = model(IDS).logits
        for change in (prune_rows, prune_smallest):
            for changed in (model, eager):
                change(changed)
            expected = eager(IDS).logits
            assert (before - expected).abs().max() > 1e-2
            torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)
            before = expected
            prompt = IDS[0].tolist()
            with make_engine(model) as engine:
                assert engine.generate([prompt], greedy(8))[0].token_ids == hf_greedy(eager, prompt, 8)
        assert neo_compile.stats(model).num_captures == 1


def test_enabled_in_inference_mode_and_used_outside():
    model, eager = pair()
    with torch.inference_mode():
        enable_tiers(model)
        first = sequences(model)
    assert torch.equal(sequences(model), first)
    assert torch.equal(sequences(eager), first)


def test_a_forward_on_the_instance_is_what_runs_and_what_comes_back():
    model, _ = pair()
    own = model.forward
    model.forward = patched = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.warns(UserWarning, match="its forward was replaced on the instance"):
        enable_one_tier(model)
    with torch.no_grad():
        model(IDS)
    assert neo_compile.stats(model).num_fallbacks == 1
    neo_compile.disable(model)
    assert model.forward is patched


def test_a_model_that_used_custom_generate_can_be_pickled():
    model, _ = pair()
    model.__dict__[CUSTOM_GENERATE] = EnabledModel(model, serving_options(stages="eager", device=ONE_THREAD))
    assert pickle.loads(pickle.dumps(model)).__dict__[CUSTOM_GENERATE] is None
    with enable_one_tier(model), pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)


@torch.no_grad()
def test_no_logits_are_wanted():
    model, eager = pair()
    none = torch.empty(0, dtype=torch.int64)
    with enable_one_tier(model):
        assert model(IDS, logits_to_keep=none).logits.shape == eager(IDS, logits_to_keep=none).logits.shape
        assert neo_compile.stats(model).num_fallbacks == 0


@torch.no_grad()
def test_autocast_falls_back():
    model, eager = pair()
    with enable_one_tier(model), torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match="autocast"):
            logits = model(IDS).logits
        assert torch.equal(logits, eager(IDS).logits)


@torch.no_grad()
def test_a_cache_whose_copies_were_interrupted_is_empty_and_usable(monkeypatch):
    model, eager = pair()
    with enable_tiers(model) as enabled:
        cache = model(IDS, use_cache=True).past_key_values
        with monkeypatch.context() as patch:
            patch.setattr(Serving, "_start_copies", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model(IDS[:, -1:], past_key_values=cache)
        assert (cache.get_seq_length(), neo_compile.stats(model).device_blocks_taken) == (0, 0)
        logits = model(IDS, past_key_values=cache).logits
        torch.testing.assert_close(logits, eager(IDS).logits, rtol=1e-4, atol=1e-4)
        assert neo_compile.stats(model).num_fallbacks == 0
        enabled._serving.blocks.check_integrity()


def test_beams_that_just_fit():
    """Two beams in one block of 16 tokens: one copies it, the other keeps it."""
    model, eager = pair()
    options = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False, "pad_token_id": 0}
    prompt = left_padded([6])
    with enable_tiers(model, device_blocks=2, host_blocks=0, policy="device-only"):
        assert torch.equal(model.generate(**prompt, **options), eager.generate(**prompt, **options))
