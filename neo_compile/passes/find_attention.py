"""Finds attention in a Dynamo graph: `scaled_dot_product_attention`, and its hand-written form.

    scores = softcap(matmul(q, transpose(k)) * scale) + mask + ...  every part but the matmul may be missing
    scores = cat([scores, sinks]) - max                             with sinks
    matmul(dropout(softmax(scores))[..., :-1].to(...), v)

Key and value heads repeated for grouped queries are peeled off, so that a site sees the KV that a cache would hold.
What looks like attention but cannot be a site is reported with a reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import fx

from neo_compile.passes.attention_parts import (
    Mask,
    NoMatch,
    check_rank,
    head_dim,
    is_call,
    is_transposed_key,
    peel_last_column,
    peel_masks,
    peel_repeated_heads,
    peel_scale,
    peel_sinks,
    peel_softcap,
    rank,
    skip_identities,
)


@dataclass(frozen=True)
class AttentionMatch:
    """Attention computed by `node`, [B, Hq, S, Dv].

    Attributes:
        q, k, v: [B, H, S, D]; k and v with the heads of the KV cache.
        masks: all of them narrow what is attended to.
        sinks: [Hq], one more logit per head in the softmax.
        interior: nodes that only the pattern used, last one first; dead once `node` is replaced.
        module: qualified name of the module that computes it.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    masks: tuple[Mask, ...]
    sinks: fx.Node | None
    scale: float
    is_causal: bool
    softcap: float | None
    interior: tuple[fx.Node, ...]
    module: str


@dataclass(frozen=True)
class Refusal:
    """Something that looks like attention, and why it cannot be a site."""

    node_name: str
    module: str
    reason: str


@dataclass
class Findings:
    """What `find_attention` found, in program order."""

    matches: list[AttentionMatch] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def why_none(self) -> str:
        """The reason why there are no matches."""
        if not self.refusals:
            return "no attention found in the graph"
        first = self.refusals[0]
        where = f" in {first.module}" if first.module else ""
        return f"attention {first.node_name}{where} cannot be a site: {first.reason}"


def find_attention(graph: fx.Graph) -> Findings:
    """Attention in a canonical graph."""
    findings = Findings()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        try:
            if node.target is F.scaled_dot_product_attention:
                findings.matches.append(_match_sdpa(node))
            elif node.target is torch.matmul:
                match = _match_by_hand(node)
                if match is not None:
                    findings.matches.append(match)
            elif "flex_attention" in str(node.target):
                raise NoMatch("flex_attention's score function is not understood")
        except NoMatch as no_match:
            findings.refusals.append(Refusal(node.name, module_of(node), str(no_match)))
    return findings


def module_of(node: fx.Node) -> str:
    """Qualified name of the innermost module that `node` was traced in, or ""."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name = str(list(stack.values())[-1][0])
    return re.sub(r"^(.*\.cell_contents|L\['\w+'\](\[\d+\])?)\.", "", name)


def _match_sdpa(node: fx.Node) -> AttentionMatch:
    q, k, v = node.args
    keywords = node.kwargs
    if keywords["dropout_p"] != 0.0:
        raise NoMatch(f"dropout_p={keywords['dropout_p']}")
    if not isinstance(keywords["is_causal"], bool):
        raise NoMatch("is_causal is not a constant")
    scale = keywords["scale"]
    if scale is not None and not isinstance(scale, (int, float)):
        raise NoMatch("scale is not a constant")
    assert isinstance(q, fx.Node), f"{node} has no query"
    check_rank(q, k, v)
    k, v, interior = peel_repeated_heads(k, v)
    mask = keywords["attn_mask"]
    return AttentionMatch(
        node=node,
        q=q,
        k=k,
        v=v,
        masks=(Mask(mask),) if isinstance(mask, fx.Node) else (),
        sinks=None,
        scale=float(scale) if scale is not None else head_dim(q) ** -0.5,
        is_causal=keywords["is_causal"],
        softcap=None,
        interior=(node, *interior),
        module=module_of(node),
    )


def _match_by_hand(node: fx.Node) -> AttentionMatch | None:
    """None if `node` does not multiply a softmax of scores of queries and keys."""
    weights, v = node.args
    interior = [node]
    weights, has_sinks = peel_last_column(skip_identities(weights, interior), interior)
    if not is_call(weights, F.softmax):
        return None
    dims = rank(weights)
    if dims is None or weights.kwargs["dim"] not in (-1, dims - 1):
        return None
    interior.append(weights)
    scores = skip_identities(weights.args[0], interior)
    sinks = None
    if has_sinks:
        scores, sinks, extra = peel_sinks(scores)
        interior += extra
    scores, masks = peel_masks(skip_identities(scores, interior), interior)
    scores, softcap = peel_softcap(scores, interior)
    scores, scale = peel_scale(scores, interior)
    if not is_call(scores, torch.matmul):
        return None
    interior.append(scores)
    q, transposed = scores.args
    if not is_transposed_key(transposed):
        return None
    interior.append(transposed)
    q, factor = peel_scale(q, interior)
    check_rank(q, transposed, v)
    k, v, repeats = peel_repeated_heads(transposed.args[0], v)
    return AttentionMatch(
        node=node,
        q=q,
        k=k,
        v=v,
        masks=masks,
        sinks=sinks,
        scale=scale * factor,
        is_causal=False,
        softcap=softcap,
        interior=(*interior, *repeats),
        module=module_of(node),
    )
