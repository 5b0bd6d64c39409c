"""Replaces F.linear by `neo::packed_linear`, one call for all projections of the same input.

    q = linear(x, wq)                      packed = pack_weights([wq, wk, wv])        (kept between runs)
    k = linear(x, wk)          ->          qkv = packed_linear(x, packed, None)
    v = linear(x, wv)                      q, k, v = qkv.split([...], -1)

    y = addmm(bias, x, w)      ->          y = packed_linear(x, pack_weights([w], transposed), bias)

The second form is GPT-2's Conv1D. Only plain CPU parameters that oneDNN can pack; quantised, wrapped and computed
weights stay as they are, and so do weights of three dimensions (mixtures of experts).
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from neo_compile.packed_linear import can_pack
from neo_compile.passes.split_stages import is_site

logger = logging.getLogger(__name__)


class _Linear(NamedTuple):
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


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
        linear = _match(node)
        if linear and _is_packable(linear.weight, inputs) and _is_plain_bias(linear.bias, inputs):
            dtype = inputs[linear.weight].dtype
            key = (stage, linear.x, linear.bias is None, linear.transposed, dtype) if merge else node
            groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        _replace(gm.graph, nodes)
    if groups:
        logger.info("%d linears in %d packed calls", sum(map(len, groups.values())), len(groups))
        gm.recompile()
    return gm


def why_unpacked(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, int]:
    """Reasons why parameters of matrix products are not packed, and how many each concerns. Before `pack_linears`."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(placeholders, example_inputs, strict=True))
    reasons: Counter[str] = Counter()
    linears = [linear for linear in map(_match, gm.graph.nodes) if linear]
    for weight in dict.fromkeys(linear.weight for linear in linears):
        if not _is_packable(weight, inputs):
            value = inputs.get(weight) if isinstance(weight, fx.Node) else None
            if value is None:
                reasons["computed in the graph"] += 1
            elif type(value) not in (torch.Tensor, torch.nn.Parameter):
                reasons[f"{type(value).__name__}, a tensor of its own kind"] += 1
            else:
                reasons[f"oneDNN packs no {str(value.dtype).removeprefix('torch.')} on {value.device.type}"] += 1
    experts = [value for value in inputs.values() if isinstance(value, torch.nn.Parameter) and value.dim() == 3]
    if experts:
        reasons["three dimensions (experts): chosen by token, not one matrix"] += len(experts)
    return dict(reasons)


def num_packed(graph: fx.Graph) -> int:
    """How many packed calls `graph` holds."""
    return sum(node.target is torch.ops.neo.packed_linear.default for node in graph.nodes)


def _match(node: fx.Node) -> _Linear | None:
    if node.op != "call_function":
        return None
    if node.target is torch.nn.functional.linear:
        named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        x, weight, bias = named["input"], named["weight"], named.get("bias")
        return _Linear(x, weight, bias, False)  # type: ignore[arg-type]
    if node.target is torch.addmm and len(node.args) == 3 and not node.kwargs:
        bias, x, weight = node.args
        return _Linear(x, weight, bias, True)  # type: ignore[arg-type]
    return None


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    linears = [linear for linear in map(_match, nodes) if linear]  # matched again: x may have been replaced meanwhile
    fakes = [node.meta["example_value"] for node in nodes]
    sizes = [fake.shape[-1] for fake in fakes]
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears if linear.bias]
    with graph.inserting_before(nodes[0]):
        packed = _call(graph, torch.ops.neo.pack_weights.default, weights, linears[0].transposed)
        bias = None
        if biases:
            bias = biases[0] if len(biases) == 1 else _call(graph, torch.ops.neo.join_biases.default, biases)
        whole = graph.call_function(torch.ops.neo.packed_linear.default, (linears[0].x, packed, bias))
        whole.meta["example_value"] = fakes[0].new_empty(*fakes[0].shape[:-1], sum(sizes))
        parts = [whole] if len(nodes) == 1 else _split(graph, whole, sizes)
    for node, part in zip(nodes, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _split(graph: fx.Graph, whole: fx.Node, sizes: list[int]) -> list[fx.Node]:
    split = graph.call_method("split", (whole, sizes, -1))
    split.meta["example_value"] = values = whole.meta["example_value"].split(sizes, -1)
    parts = []
    for index, value in enumerate(values):
        parts.append(graph.call_function(operator.getitem, (split, index)))
        parts[-1].meta["example_value"] = value
    return parts


def _call(graph: fx.Graph, target: Any, sources: list[fx.Node], *options: Any) -> fx.Node:
    """A node that computes something of parameters once; split_stages takes it out of the stages."""
    node = graph.call_function(target, (sources, *options))
    fakes = [source.meta["example_value"] for source in sources]
    node.meta["example_value"] = target(fakes, *options)
    return node


def _is_plain(node: Any, inputs: Mapping[fx.Node, Any]) -> bool:
    return isinstance(node, fx.Node) and type(inputs.get(node)) in (torch.Tensor, torch.nn.Parameter)


def _is_plain_bias(bias: Any, inputs: Mapping[fx.Node, Any]) -> bool:
    return bias is None or (_is_plain(bias, inputs) and inputs[bias].dim() == 1)


def _is_packable(node: Any, inputs: Mapping[fx.Node, Any]) -> bool:
    return _is_plain(node, inputs) and isinstance(inputs[node], torch.nn.Parameter) and can_pack(inputs[node])
