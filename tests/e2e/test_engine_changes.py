"""An engine whose model is changed under it: it serves what it captured or says so, never something in between."""

from __future__ import annotations

import pytest
import torch

from neo_compile import ConfigError
from tests.helpers.engines import greedy, hf_greedy, make_engine, run_to_end, tiny_llama


def load_assigned(model):
    model.load_state_dict(tiny_llama(num_layers=2, seed=7).state_dict(), assign=True)


def replace_parameter(model):
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(64, 32))


def replace_module(model):
    model.lm_head = tiny_llama(num_layers=2, seed=7).lm_head


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def swap_layers(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def drop_a_layer(model):
    model.model.layers = model.model.layers[:1]


def change_dtype(model):
    model.bfloat16()


def transpose(model):
    weight = model.lm_head.weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize(
    "change",
    [load_assigned, replace_parameter, replace_module, tie, swap_layers, drop_a_layer, change_dtype, transpose],
)
def test_replaced_parameters_are_refused_before_anything_is_queued(change):
    model = tiny_llama(num_layers=2)
    with make_engine(model) as engine:
        engine.add_request([5, 6], greedy(2), request_id="mine")
        engine.generate([1, 2, 3], greedy(4))  # "mine" ends meanwhile
        change(model)
        for serve in (engine.add_request, engine.generate, engine.stream):
            with pytest.raises(ConfigError, match=r"parameters were replaced .* LlamaForCausalLM: make another Engine"):
                serve([1, 2, 3], greedy(4))
        assert set(run_to_end(engine)) == {"mine"}
        assert not engine.has_unfinished


def test_old_parameters_put_back_are_served_again():
    model = tiny_llama(num_layers=2)
    expected = hf_greedy(model, [1, 2, 3], 4)
    own = model.lm_head
    with make_engine(model) as engine:
        request_id = engine.add_request([1, 2, 3], greedy(4))
        engine.step()
        replace_module(model)  # what is under way goes on, and new requests with it: looked at while idle only
        assert run_to_end(engine) == {request_id: expected}
        with pytest.raises(ConfigError, match="replaced"):
            engine.add_request([1, 2, 3])
        model.lm_head = own
        assert engine.generate([1, 2, 3], greedy(4))[0].token_ids == expected
        with torch.no_grad():
            own.weight.neg_()  # other values in the same parameters are seen
        assert engine.generate([1, 2, 3], greedy(4))[0].token_ids == hf_greedy(model, [1, 2, 3], 4) != expected


@pytest.mark.parametrize("change", [change_dtype, transpose])
def test_a_converted_model_is_captured_again_by_the_next_engine(change):
    model = tiny_llama(num_layers=1)
    with make_engine(model) as engine:
        engine.generate([1, 2, 3], greedy(2))
    change(model)  # in place: the parameter objects stay the same
    with make_engine(model) as engine:
        output = engine.generate([1, 2, 3], greedy(1))[0]
    assert output.token_ids == hf_greedy(model, [1, 2, 3], 1)


def test_a_module_at_the_address_of_a_dead_one_is_another_one():
    model = tiny_llama(num_layers=1)
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.LeakyReLU(0.1)
    address = id(mlp.act_fn)
    with make_engine(model) as engine:
        mlp.act_fn = None
        others = [torch.nn.LeakyReLU(0.9) for _ in range(1000)]
        mlp.act_fn = next((other for other in others if id(other) == address), others[0])
        with pytest.raises(ConfigError, match="replaced"):
            engine.generate([1, 2, 3], greedy(2))
