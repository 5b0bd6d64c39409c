"""One spelling for softmax, matmul and scaled_dot_product_attention."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neo_compile.passes.canonicalize import canonicalize
from tests.passes.graphs import targets, trace

A = torch.randn(2, 4, 4)


@pytest.mark.parametrize(
    ("function", "target", "kwargs"),
    [
        (lambda a: a.softmax(-1), F.softmax, {"dim": -1, "dtype": None}),
        (lambda a: torch.softmax(a, -1, torch.float64), F.softmax, {"dim": -1, "dtype": torch.float64}),
        (lambda a: F.softmax(a, dim=1, dtype=torch.float32), F.softmax, {"dim": 1, "dtype": torch.float32}),
        (lambda a: a @ a, torch.matmul, {}),
        (lambda a: a.matmul(a), torch.matmul, {}),
        (lambda a: torch.add(a, a), operator.add, {}),
        (lambda a: a.add(a, alpha=2), "add", {"alpha": 2}),
        (lambda a: a.transpose(1, 2), torch.transpose, {}),
    ],
    ids=["method", "torch", "F", "operator", "matmul", "add", "add-alpha", "transpose"],
)
def test_one_spelling(function: Callable[..., torch.Tensor], target: object, kwargs: dict[str, object]) -> None:
    gm, _ = trace(function, A)
    expected = gm(A)
    canonicalize(gm)
    (node,) = [node for node in gm.graph.nodes if node.op.startswith("call")]
    assert node.target == target
    assert node.kwargs == kwargs
    assert torch.equal(gm(A)[0], expected[0])


def test_attention_arguments_become_keywords() -> None:
    q = torch.randn(1, 2, 3, 4)
    gm, _ = trace(lambda q: F.scaled_dot_product_attention(q, q, q, None, 0.0, True), q)
    expected = gm(q)
    canonicalize(gm)
    (node,) = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert node.kwargs == {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": True,
        "scale": None,
        "enable_gqa": False,
    }
    assert torch.equal(gm(q)[0], expected[0])


def test_numbers_that_are_inputs_become_constants_under_a_guard() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a * self.scale / a.shape[1] ** 0.5

    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[object]) -> Callable[..., object]:
        before = gm.graph.find_nodes(op="call_method", target="item")
        assert len(before) == 1, "Dynamo makes no input of the scale any more"
        graphs.append(canonicalize(gm))
        return gm.forward

    torch._dynamo.reset()
    module = Scaled(3.0)
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for scale, num_graphs in ((3.0, 1), (0.5, 2), (3.0, 2)):
        module.scale = scale
        for length in (4, 9):
            a = torch.randn(2, length)
            torch.testing.assert_close(compiled(a), module(a))
        assert len(graphs) == num_graphs
    for gm, scale in zip(graphs, (3.0, 0.5), strict=True):
        assert not gm.graph.find_nodes(op="call_method", target="item")
        assert scale in [arg for node in gm.graph.nodes for arg in node.args]


def test_idempotent() -> None:
    gm, _ = trace(lambda a: (a @ a).softmax(-1).transpose(1, 2) * 2, A)
    once = targets(canonicalize(gm))
    assert targets(canonicalize(gm)) == once
