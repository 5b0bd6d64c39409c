"""torch.compile(model, backend="neo") on every family: logits and tokens equal eager, and every layer is a site."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from neo_compile.backend import neo
from neo_compile.staged import StagedModel
from tests.helpers.engines import hf_greedy
from tests.helpers.models import FAMILIES, MORE_FAMILIES, REFUSED, eager_logits, family_model, slow, tiny_model

TOKENS = [4, 8, 15, 16, 23, 42, 7, 7, 2]
# One of each kind of graph: SDPA, eager with soft caps, eager with sinks, latent attention, two kinds of masks.
CACHED = ("Llama", "Gemma2", "GptOss", "Gemma3Text")
# Inductor's stages are tested on three families by default; a third is in test_capture.py.
COMPILED = ("GPT2", "Gemma3Text")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def watched(model: Any) -> tuple[Any, list[Any]]:
    """`model` compiled by the backend with eager stages, and what the backend returned for each graph."""
    returned: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        returned.append(neo(gm, example_inputs, options={"stages": "eager"}))
        return returned[-1]

    return torch.compile(model, backend=backend), returned


def assert_all_sites(returned: list[Any], model: Any) -> None:
    """Every graph was cut at each of the model's layers."""
    assert returned
    for function in returned:
        assert isinstance(function, StagedModel)
        assert len(function.sites) == model.config.num_hidden_layers


@pytest.mark.parametrize("family", [*FAMILIES, *slow(MORE_FAMILIES)])
@torch.no_grad()
def test_logits_without_a_cache(family: str) -> None:
    model = family_model(family)
    compiled, returned = watched(model)
    out = compiled(input_ids=torch.tensor([TOKENS]), use_cache=False)
    torch.testing.assert_close(out.logits[0], eager_logits(model, TOKENS), atol=2e-4, rtol=2e-4)
    assert_all_sites(returned, model)


@pytest.mark.parametrize("family", [*CACHED, *slow(set(FAMILIES) - set(CACHED)), *slow(MORE_FAMILIES)])
@torch.no_grad()
def test_logits_with_a_dynamic_cache(family: str) -> None:
    model = family_model(family)
    expected = eager_logits(model, TOKENS)
    compiled, returned = watched(model)
    cache = DynamicCache(config=model.config)
    start = 0
    for end in (5, 6, 7, 9):
        out = compiled(input_ids=torch.tensor([TOKENS[start:end]]), past_key_values=cache, use_cache=True)
        torch.testing.assert_close(out.logits[0], expected[start:end], atol=2e-4, rtol=2e-4)
        start = end
    assert_all_sites(returned, model)
    assert len(returned) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_twenty_greedy_tokens(family: str) -> None:
    model = family_model(family)
    expected = hf_greedy(model, TOKENS, 20)
    compiled = copy.copy(model)
    compiled.compile(backend="neo", options={"stages": "eager"})
    assert hf_greedy(compiled, TOKENS, 20) == expected


@pytest.mark.parametrize("family", [*COMPILED, *slow(set(FAMILIES) - set(COMPILED))])
@torch.no_grad()
def test_inductor(family: str) -> None:
    model = family_model(family)
    compiled = torch.compile(model, backend="neo", dynamic=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="neo")
        for length in (9, 4):
            out = compiled(input_ids=torch.tensor([TOKENS[:length]]), use_cache=False)
            torch.testing.assert_close(out.logits[0], eager_logits(model, TOKENS[:length]), atol=2e-4, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:neo leaves a graph whole")
@torch.no_grad()
def test_what_the_runtime_refuses_is_compiled_all_the_same(name: str) -> None:
    model = tiny_model(REFUSED[name].family, **REFUSED[name].overrides)
    inputs = {"input_ids": torch.tensor([TOKENS]), "use_cache": False}
    if REFUSED[name].family == "T5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    compiled, _ = watched(model)
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, atol=2e-4, rtol=2e-4)
