"""Rewrites matched attention to `neo::attention`.

    out = sdpa(q, k, v, ...)      ->      q' = q.transpose(1, 2)            [B, S, H, D]
                                          o = neo.attention(q', k', v', mask, None, site, scale, ...)
                                          out = o.transpose(1, 2)

Only nodes that the rewrite itself made dead are erased. General dead-code elimination would remove statements such as
`x[i] = y`, which have no user in a Dynamo graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from neo_compile.passes.find_attention import AttentionMatch
from neo_compile.passes.split_stages import find_sites


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
        mask = match.mask
        if mask is not None and match.is_mask_inverted:
            fake = mask.meta["example_value"]
            mask = graph.call_function(torch.logical_not, (mask,))
            mask.meta["example_value"] = torch.logical_not(fake)
        args = (q, k, v, mask, None, -1, match.scale, match.is_causal, None, match.softcap)
        site = graph.call_function(torch.ops.neo.attention.default, args)
        site.meta = {key: value for key, value in match.node.meta.items() if key in ("nn_module_stack", "stack_trace")}
        q_fake, v_fake = q.meta["example_value"], v.meta["example_value"]
        site.meta["example_value"] = q_fake.new_empty(*q_fake.shape[:3], v_fake.shape[3])
        out = _method(graph, "transpose", site, 1, 2)
    match.node.replace_all_uses_with(out)
    for node in match.interior:
        if not node.users:
            graph.erase_node(node)


def _token_major(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """[B, H, S, D] -> [B, S, H, D], in the dtype that the attention computed in (autocast may have changed it)."""
    if node.meta["example_value"].dtype != dtype:
        node = _method(graph, "to", node, dtype)
    return _method(graph, "transpose", node, 1, 2)


def _method(graph: fx.Graph, name: str, node: fx.Node, *args: Any) -> fx.Node:
    call = graph.call_method(name, (node, *args))
    call.meta["example_value"] = getattr(node.meta["example_value"], name)(*args)
    return call
