"""Rewrites matched attention to `neo::attention`.

    out = sdpa(q, k, v, ...)      ->      q' = q.transpose(1, 2)            [B, S, H, D]
                                          o = neo.attention(q', k', v', mask, None, site, scale, ...)
                                          out = o.transpose(1, 2)

Only nodes that the rewrite itself made dead are erased. General dead-code elimination would remove statements such as
`x[i] = y`, which have no user in a Dynamo graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from neo_compile.passes.attention_parts import Mask
from neo_compile.passes.find_attention import AttentionMatch
from neo_compile.passes.split_stages import find_sites
from neo_compile.passes.verify import fake_mode_of


def replace_attention(gm: fx.GraphModule, matches: Sequence[AttentionMatch]) -> fx.GraphModule:
    """Replace every match, and number the sites in program order."""
    for match in matches:
        _replace(gm.graph, match)
    for index, site in enumerate(find_sites(gm.graph)):
        site.update_arg(5, index)
    if matches:
        gm.graph.lint()
        gm.recompile()
    return gm


def _replace(graph: fx.Graph, match: AttentionMatch) -> None:
    result = match.node.meta["example_value"]
    with graph.inserting_before(match.node):
        q, k, v = (_token_major(graph, node, result.dtype) for node in (match.q, match.k, match.v))
        mask = _combined(graph, match.masks, result.dtype)
        args = (q, k, v, mask, match.sinks, -1, match.scale, match.is_causal, None, match.softcap)
        site = graph.call_function(torch.ops.neo.attention.default, args)
        site.meta = {key: value for key, value in match.node.meta.items() if key in ("nn_module_stack", "stack_trace")}
        q_fake, v_fake = q.meta["example_value"], v.meta["example_value"]
        site.meta["example_value"] = q_fake.new_empty(*q_fake.shape[:3], v_fake.shape[3])
        out = _method(graph, "transpose", site, 1, 2)
    match.node.replace_all_uses_with(out)
    for node in match.interior:
        if not node.users:
            graph.erase_node(node)


def _combined(graph: fx.Graph, masks: Sequence[Mask], dtype: torch.dtype) -> fx.Node | None:
    """One mask that does what all do: boolean if all mask with minus infinity, otherwise added to the scores."""
    booleans: list[fx.Node] = []
    added: list[fx.Node] = []
    for mask in masks:
        if mask.node.meta["example_value"].dtype != torch.bool:
            assert not mask.is_inverted, f"{mask.node} fills scores, and is not boolean"
            added.append(mask.node)
            continue
        allowed = _call(graph, torch.logical_not, mask.node) if mask.is_inverted else mask.node
        if mask.fill == float("-inf"):
            booleans.append(allowed)
        else:
            added.append(_method(graph, "to", _call(graph, torch.where, allowed, 0.0, mask.fill), dtype))
    both = functools.reduce(lambda a, b: _call(graph, torch.logical_and, a, b), booleans) if booleans else None
    bias = functools.reduce(lambda a, b: _call(graph, torch.add, a, b), added) if added else None
    if both is None or bias is None:
        return bias if both is None else both
    return _call(graph, torch.where, both, bias, float("-inf"))


def _call(graph: fx.Graph, function: Any, *args: Any) -> fx.Node:
    call = graph.call_function(function, args)
    fakes = [arg.meta["example_value"] if isinstance(arg, fx.Node) else arg for arg in args]
    with fake_mode_of(fakes):
        call.meta["example_value"] = function(*fakes)
    return call


def _token_major(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """[B, H, S, D] -> [B, S, H, D], in the dtype that the attention computed in (autocast may have changed it)."""
    if node.meta["example_value"].dtype != dtype:
        node = _method(graph, "to", node, dtype)
    return _method(graph, "transpose", node, 1, 2)


def _method(graph: fx.Graph, name: str, node: fx.Node, *args: Any) -> fx.Node:
    call = graph.call_method(name, (node, *args))
    call.meta["example_value"] = getattr(node.meta["example_value"], name)(*args)
    return call
