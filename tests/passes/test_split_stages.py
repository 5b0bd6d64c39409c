"""Cutting at sites: registers, liveness, shared stages, and what must not be cut."""

from __future__ import annotations

from typing import Any

import torch

from neo_compile.passes.compile_stages import compile_stages, share_stages
from neo_compile.passes.split_stages import SplitGraph, build_program, find_sites, flatten_batch, split_stages
from neo_compile.passes.verify import is_functional, mutated_inputs, verify
from neo_compile.staged import StagedModel
from tests.passes.graphs import targets, trace

X = torch.randn(1, 5, 2, 4)
W = torch.randn(3, 4, 4)


def site(q: torch.Tensor) -> torch.Tensor:
    return torch.ops.neo.attention(q, q, q, None, None, -1, 0.5, True, None, None)


def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for layer in range(3):
        x = x + site((x @ w[layer]).contiguous())
    return x.sum(-1)


def number_sites(gm: torch.fx.GraphModule) -> None:
    for index, node in enumerate(find_sites(gm.graph)):
        node.update_arg(5, index)


def staged_of(gm: torch.fx.GraphModule) -> tuple[StagedModel, SplitGraph]:
    split = split_stages(gm)
    keys = share_stages(split)
    functions = compile_stages(split, keys, stages="eager")
    return StagedModel(build_program(split, functions, {}), stage_keys=keys), split


def test_split_equals_whole() -> None:
    gm, example_inputs = trace(layers, X, W)
    number_sites(gm)
    expected = gm(*example_inputs)[0]
    staged, split = staged_of(gm)
    assert len(split.stages) == 4
    assert [call.site.index for call in split.sites] == [0, 1, 2]
    assert torch.equal(staged(*example_inputs)[0], expected)


def test_flattened_split_equals_whole() -> None:
    gm, example_inputs = trace(layers, X, W)
    number_sites(gm)
    expected = gm(*example_inputs)[0]
    flatten_batch(gm)
    nodes = len(gm.graph.nodes)
    assert len(flatten_batch(gm).graph.nodes) == nodes
    staged, _ = staged_of(gm)
    assert staged.sites[0].num_q_heads == 2
    assert torch.equal(staged(*example_inputs)[0], expected)


def test_registers_are_cleared_by_their_last_reader() -> None:
    gm, _ = trace(layers, X, W)
    number_sites(gm)
    staged, split = staged_of(gm)
    program = staged.program
    cleared = [register for call in (*program.stages, *program.sites) for register in call.dead]
    assert len(cleared) == len(set(cleared))
    assert set(cleared) == set(range(split.num_registers)) - set(split.outputs)


def test_bound_registers_stay() -> None:
    gm, example_inputs = trace(layers, X, W)
    number_sites(gm)
    split = split_stages(gm)
    position = next(index for index, value in enumerate(example_inputs) if value is W)
    register = split.inputs[position]
    assert register is not None
    program = build_program(split, compile_stages(split, share_stages(split), stages="eager"), {register: W})
    assert program.inputs[position] is None
    assert all(register not in call.dead for call in (*program.stages, *program.sites))
    staged = StagedModel(program, stage_keys=share_stages(split))
    arguments = [None if value is W else value for value in example_inputs]
    first, second = staged(*arguments), staged(*arguments)
    assert torch.equal(first[0], gm(*example_inputs)[0])
    assert torch.equal(first[0], second[0])


def test_equal_stages_share_one_artefact() -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        for w in (a, b, c):
            x = x + site((x @ w).contiguous())
        return x

    gm, _ = trace(function, X, *W)
    staged, _ = staged_of(gm)
    assert staged.stage_keys == (0, 1, 1, 2)
    assert staged.num_artifacts == 3


def test_constants_tell_stages_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for factor in (2.0, 2.0, 3.0):
            x = x + site((x * factor).contiguous())
        return x

    gm, _ = trace(function, X)
    assert staged_of(gm)[0].stage_keys == (0, 1, 2, 3)


def test_sites_back_to_back_need_no_stage() -> None:
    gm, example_inputs = trace(lambda x: site(site(x)), X)
    staged, _ = staged_of(gm)
    assert staged.stage_keys == (None, None, None)
    assert staged.num_artifacts == 0
    assert torch.equal(staged(*example_inputs)[0], gm(*example_inputs)[0])


def test_verify() -> None:
    gm, _ = trace(layers, X, W)
    assert "numbered" in verify(gm.graph)[0]
    number_sites(gm)
    assert verify(gm.graph) == []
    assert "expected 2" in verify(gm.graph, num_sites=2)[0]
    plain, _ = trace(lambda x: x + 1, X)
    assert verify(plain.graph) == ["no attention site in the graph"]


def test_an_autocast_region_must_not_span_a_site() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return site(x) @ x.transpose(2, 3)

    gm, _ = trace(function, X)
    number_sites(gm)
    assert verify(gm.graph)[0] == "an autocast region spans the attention site 0"


def _stage_of(function: Any, *inputs: torch.Tensor) -> tuple[torch.fx.GraphModule, list[Any]]:
    gm, _ = trace(function, *inputs)
    return gm, [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]


def test_mutation_and_aliases_are_seen() -> None:
    assert mutated_inputs(*_stage_of(lambda x: x.add_(1).sum(), X.clone())) == [0]
    assert mutated_inputs(*_stage_of(lambda x: x.add(1), X)) == []
    assert is_functional(*_stage_of(lambda x: x.add(1), X))
    assert not is_functional(*_stage_of(lambda x: x.view(-1), X))
    assert not is_functional(*_stage_of(lambda x: (x * 2).chunk(2, 1), X))


def test_statements_without_users_survive() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 0] = 0.0
        return site(y) + y

    gm, example_inputs = trace(function, X)
    number_sites(gm)
    staged, _ = staged_of(gm)
    assert "setitem" in str(targets(gm))
    assert torch.equal(staged(*example_inputs)[0], function(X))
