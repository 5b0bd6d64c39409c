"""Replaces F.linear by `neo::packed_linear`, one call for all projections of the same input.

    q = linear(x, wq)                      qkv = packed_linear(x, [wq, wk, wv], [])
    k = linear(x, wk)          ->          q, k, v = qkv.split([...], -1)
    v = linear(x, wv)

Only plain CPU parameters that oneDNN can pack; quantised, wrapped and computed weights stay as they are.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from neo_compile.packed_linear import can_pack
from neo_compile.passes.split_stages import is_site

logger = logging.getLogger(__name__)


def pack_linears(gm: fx.GraphModule, example_inputs: Sequence[Any], *, merge: bool = True) -> fx.GraphModule:
    """Rewrite the linears of `gm` whose weights are among `example_inputs`, the graph's real inputs.

    Args:
        merge: join linears of the same input that lie in the same linear stage.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(placeholders, example_inputs, strict=True))
    groups: dict[Any, list[fx.Node]] = {}
    stage = 0
    for node in gm.graph.nodes:
        stage += is_site(node)
        if node.op == "call_function" and node.target is torch.nn.functional.linear:
            x, weight, bias = _linear_args(node)
            if _is_packable(weight, inputs) and (bias is None or _is_parameter(bias, inputs)):
                key = (stage, x, bias is None, inputs[weight].dtype) if merge else node
                groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        _replace(gm.graph, nodes)
    if groups:
        logger.info("%d linears in %d packed calls", sum(map(len, groups.values())), len(groups))
        gm.recompile()
    return gm


def num_packed(graph: fx.Graph) -> int:
    """How many packed calls `graph` holds."""
    return sum(node.target is torch.ops.neo.packed_linear.default for node in graph.nodes)


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    arguments = [_linear_args(node) for node in nodes]
    x = arguments[0][0]
    weights = [weight for _, weight, _ in arguments]
    biases = [bias for _, _, bias in arguments if bias is not None]
    fakes = [node.meta["example_value"] for node in nodes]
    with graph.inserting_before(nodes[0]):
        packed = graph.call_function(torch.ops.neo.packed_linear.default, (x, weights, biases))
        sizes = [fake.shape[-1] for fake in fakes]
        packed.meta["example_value"] = fakes[0].new_empty(*fakes[0].shape[:-1], sum(sizes))
        if len(nodes) == 1:
            parts = [packed]
        else:
            split = graph.call_method("split", (packed, sizes, -1))
            values = packed.meta["example_value"].split(sizes, -1)
            split.meta["example_value"] = values
            parts = []
            for index, value in enumerate(values):
                parts.append(graph.call_function(operator.getitem, (split, index)))
                parts[-1].meta["example_value"] = value
    for node, part in zip(nodes, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _linear_args(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return named["input"], named["weight"], named.get("bias")  # type: ignore[return-value]


def _is_parameter(node: Any, inputs: dict[fx.Node, Any]) -> bool:
    return isinstance(node, fx.Node) and type(inputs.get(node)) in (torch.Tensor, torch.nn.Parameter)


def _is_packable(node: Any, inputs: dict[fx.Node, Any]) -> bool:
    return _is_parameter(node, inputs) and isinstance(inputs[node], torch.nn.Parameter) and can_pack(inputs[node])
