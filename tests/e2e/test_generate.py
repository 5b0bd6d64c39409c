"""`model.generate` on an enabled model: the same tokens as before in every mode, and really served."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from transformers import pipeline

import neo_compile
from neo_compile.errors import CapacityError, ConfigError
from neo_compile.runtime.generate.enabling import CUSTOM_GENERATE, EnabledModel, serving_options
from tests.helpers.engines import tiny_llama
from tests.helpers.generation import (
    ONE_THREAD,
    bytes_of,
    enable_one_tier,
    enable_tiers,
    left_padded,
    pair,
    pipelining_costs,
)

PROMPTS = left_padded([9, 4, 17, 16])
TOKENS = {"max_new_tokens": 20, "do_sample": False}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3},
    "typical": {"do_sample": True, "typical_p": 0.7},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "return sequences": {"do_sample": True, "num_return_sequences": 3},
    "repetition penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "chunked prefill": {"prefill_chunk_size": 5},
    "guidance": {"guidance_scale": 1.5},
    "no cache": {"use_cache": False},
    "eos": {"eos_token_id": list(range(1, 60)), "pad_token_id": 0},
}


@pytest.fixture(autouse=True)
def _no_silent_fallback() -> Any:
    """A fallback warns; here that is a failure unless the test expects it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="neo leaves a call")
        yield


def generate(model: Any, options: dict[str, Any], inputs: dict[str, torch.Tensor] = PROMPTS) -> torch.Tensor:
    torch.manual_seed(7)
    output = model.generate(**inputs, **TOKENS | options)
    return output if isinstance(output, torch.Tensor) else output.sequences


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return pair()


@pytest.mark.parametrize("tiers", ["one tier", "two tiers"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_eager(models, mode, tiers):
    model, eager = models
    expected = generate(eager, MODES[mode])
    context = enable_tiers(model) if tiers == "two tiers" else enable_one_tier(model)
    with context:
        assert torch.equal(generate(model, MODES[mode]), expected)
        stats = neo_compile.stats(model)
    assert stats.num_served == stats.num_forwards > 0
    assert not stats.fallbacks
    assert stats.num_captures == 1
    assert stats.device_blocks_taken == stats.host_blocks_taken == 0
    if tiers == "two tiers" and mode not in ("no cache", "eos"):
        assert stats.num_host_row_decodes > 0


def test_pipelined_and_moved_rows(models):
    model, eager = models
    options = {"max_new_tokens": 60}
    expected = generate(eager, options)
    with enable_tiers(model, device_blocks=9, cost_model=pipelining_costs()):
        assert torch.equal(generate(model, options), expected)
        stats = neo_compile.stats(model)
    assert stats.num_pipelined > 20
    assert stats.num_swaps > 0, "the device filled in the middle, so a row had to move"


@pytest.mark.parametrize("policy", ["host-only", "device-only"])
def test_policies(models, policy):
    model, eager = models
    expected = generate(eager, {})
    with enable_tiers(model, device_blocks=100, policy=policy):
        assert torch.equal(generate(model, {}), expected)
        stats = neo_compile.stats(model)
    assert (stats.num_host_row_decodes > 0) == (policy == "host-only")


def test_scores_and_logits_of_a_dict_output(models):
    model, eager = models
    options = TOKENS | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = eager.generate(**PROMPTS, **options)
    with enable_tiers(model):
        actual = model.generate(**PROMPTS, **options)
    assert type(actual) is type(expected)
    for ours, theirs in zip(actual.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_assisted_and_prompt_lookup(models):
    model, eager = models
    prompt = {name: tensor[2:3] for name, tensor in PROMPTS.items()}
    draft = tiny_llama(num_layers=1, seed=3)
    for options in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        expected = generate(eager, options, prompt)
        with enable_tiers(model):
            assert torch.equal(generate(model, options, prompt), expected)
            assert not neo_compile.stats(model).fallbacks
    expected = generate(eager, {"assistant_model": draft}, prompt)
    with enable_one_tier(draft), enable_tiers(model):  # both served
        assert torch.equal(generate(model, {"assistant_model": draft}, prompt), expected)
        assert neo_compile.stats(draft).num_served > 0


def test_forward_without_generate(models):
    model, eager = models
    with torch.no_grad(), enable_tiers(model):
        ids = PROMPTS["input_ids"][2:3]
        torch.testing.assert_close(model(ids).logits, eager(ids).logits, rtol=1e-4, atol=1e-4)
        ours, theirs = model(ids, return_dict=False), eager(ids, return_dict=False)
        assert len(ours) == len(theirs)
        rows = torch.tensor([5, 2, -1])
        expected = eager(ids, logits_to_keep=rows).logits
        torch.testing.assert_close(model(ids, logits_to_keep=rows).logits, expected, rtol=1e-4, atol=1e-4)
        assert not neo_compile.stats(model).fallbacks


def test_a_batch_that_fits_nowhere_is_refused_with_both_sizes_and_the_knob(models):
    model, eager = models
    expected = generate(eager, {})
    with enable_tiers(model, device_blocks=2, host_blocks=3):
        with pytest.raises(CapacityError, match=r"need 6 KV blocks .* 2 on the device and 3 on the host.*host_cache"):
            generate(model, {}, left_padded([17, 17, 17]))
        with pytest.raises(CapacityError, match="of 16 tokens"):  # outgrows both in the middle
            generate(model, {}, left_padded([9, 9, 9]))
        stats = neo_compile.stats(model)
        assert stats.device_blocks_taken == stats.host_blocks_taken == 0
    with enable_tiers(model):
        assert torch.equal(generate(model, {}), expected)


def test_two_threads(models):
    model, eager = models
    batches = [left_padded([9 + i, 4], seed=i) for i in range(2)]
    expected = [generate(eager, {}, batch) for batch in batches]
    found: dict[int, torch.Tensor] = {}
    with enable_tiers(model):
        threads = [
            threading.Thread(target=lambda i=i: found.setdefault(i, model.generate(**batches[i], **TOKENS)))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert neo_compile.stats(model).num_served == 40
    assert all(torch.equal(found[i], expected[i]) for i in range(2))


def test_compiled_module_generates_on_neo_and_the_model_stays_untouched(models):
    model, eager = models
    original = model.forward
    options = {"stages": "eager", "device_cache": bytes_of(model, 100), "host_cache": "1MiB"}
    compiled = torch.compile(model, backend="neo", options=options)
    assert torch.equal(generate(compiled, {}), generate(eager, {}))
    stats = neo_compile.stats(compiled)
    assert stats.num_served == stats.num_forwards == 20
    assert stats.device_blocks == 100
    assert model.forward == original
    assert "generate" not in model.__dict__
    assert "generate" not in torch.compile(model, backend="eager").__dict__
    with pytest.raises(ConfigError, match="device_cash"):
        torch.compile(model, backend="neo", options={"device_cash": 1}).generate(**PROMPTS)


def test_model_compile():
    model, eager = pair()
    model.compile(backend="neo", options={"stages": "eager"})
    assert torch.equal(generate(model, {}), generate(eager, {}))
    assert neo_compile.stats(model).num_served == 20


@pytest.mark.parametrize("is_compiled_first", [True, False])
def test_enable_counts_on_a_compiled_model(is_compiled_first):
    model, eager = pair()
    expected = generate(eager, {})
    if is_compiled_first:
        model.compile(backend="neo", options={"stages": "eager"})
        assert torch.equal(generate(model, {}), expected)
    with enable_tiers(model) as enabled:
        if not is_compiled_first:
            model.compile(backend="neo", options={"stages": "eager"})
        assert torch.equal(generate(model, {}), expected)
        assert neo_compile.stats(model).num_served == 20
        assert enabled.stats().host_blocks > 0
    assert torch.equal(generate(model, {}), expected)


def test_custom_generate():
    model, eager = pair()
    # What the first call would make with default options, which compile.
    model.__dict__[CUSTOM_GENERATE] = EnabledModel(model, serving_options(stages="eager", device=ONE_THREAD))
    for options in ({}, {"num_beams": 3}):
        expected = generate(eager, options)
        before = model.__dict__.get("forward")
        assert torch.equal(generate(model, options | {"custom_generate": neo_compile.generate}), expected)
        assert model.__dict__.get("forward") is before
    assert neo_compile.stats(model).num_served == 40


def test_text_generation_pipeline(tmp_path):
    from transformers import AutoTokenizer

    from tests.helpers.smollm import save_tiny_llama

    folder = save_tiny_llama(tmp_path)
    pipe = pipeline("text-generation", model=str(folder), tokenizer=AutoTokenizer.from_pretrained(folder))
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    texts = ["One two", "Three"]
    expected = pipe(texts, **options)
    with enable_one_tier(pipe.model):
        assert pipe(texts, **options) == expected
        assert neo_compile.stats(pipe.model).num_served == 12


def test_disable_and_copies(models):
    model, _ = models
    original = model.forward
    with enable_tiers(model) as enabled:
        assert model.forward is enabled
        copied = copy.deepcopy(model)
        assert copied.forward == type(copied).forward.__get__(copied), "a copy is not enabled"
    assert model.forward == original
    neo_compile.disable(model)
    with pytest.raises(ConfigError, match="not enabled"):
        neo_compile.stats(copied)
    with pytest.raises(ConfigError, match="policy='fast'"):
        neo_compile.enable(model, policy="fast")
    with pytest.raises(ConfigError, match="device_cache='much', must be bytes"):
        neo_compile.enable(model, device_cache="much")
