"""Finds attention in a Dynamo graph: `scaled_dot_product_attention`, and its hand-written form.

    scores = softcap(matmul(q, transpose(k)) * scale) + mask        every part but the matmul may be missing
    matmul(dropout(softmax(scores)).to(...), v)

Key and value heads repeated for grouped queries are peeled off, so that a site sees the KV that a cache would hold.
What looks like attention but cannot be a site is reported with a reason.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx


@dataclass(frozen=True)
class AttentionMatch:
    """Attention computed by `node`, [B, Hq, S, Dv].

    Attributes:
        q, k, v: [B, H, S, D]; k and v with the heads of the KV cache.
        mask: added to the scores or, if boolean, True where attention is allowed; `is_mask_inverted` swaps that.
        interior: nodes that only the pattern used, last one first; dead once `node` is replaced.
        module: qualified name of the module that computes it.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    is_mask_inverted: bool
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


class _NoMatch(Exception):
    """Carries the reason."""


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
                raise _NoMatch("flex_attention's score function is not understood")
        except _NoMatch as no_match:
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
        raise _NoMatch(f"dropout_p={keywords['dropout_p']}")
    if not isinstance(keywords["is_causal"], bool):
        raise _NoMatch("is_causal is not a constant")
    scale = keywords["scale"]
    if scale is not None and not isinstance(scale, (int, float)):
        raise _NoMatch("scale is not a constant")
    assert isinstance(q, fx.Node), f"{node} has no query"
    _check_rank(q, k, v)
    k, v, interior = _peel_repeated_heads(k, v)
    mask = keywords["attn_mask"]
    return AttentionMatch(
        node=node,
        q=q,
        k=k,
        v=v,
        mask=mask if isinstance(mask, fx.Node) else None,
        is_mask_inverted=False,
        scale=float(scale) if scale is not None else _head_dim(q) ** -0.5,
        is_causal=keywords["is_causal"],
        softcap=None,
        interior=(node, *interior),
        module=module_of(node),
    )


def _match_by_hand(node: fx.Node) -> AttentionMatch | None:
    """None if `node` does not multiply a softmax of scores of queries and keys."""
    weights, v = node.args
    interior = [node]
    weights = _skip_identities(weights, interior)
    if not _is_call(weights, F.softmax):
        return None
    rank = _rank(weights)
    if rank is None or weights.kwargs["dim"] not in (-1, rank - 1):
        return None
    interior.append(weights)
    scores = _skip_identities(weights.args[0], interior)
    scores, mask, is_inverted = _peel_mask(scores, interior)
    scores, softcap = _peel_softcap(scores, interior)
    scores, scale = _peel_scale(scores, interior)
    if not _is_call(scores, torch.matmul):
        return None
    interior.append(scores)
    q, transposed = scores.args
    if not _is_transposed_key(transposed):
        return None
    interior.append(transposed)
    q, factor = _peel_scale(q, interior)
    _check_rank(q, transposed, v)
    k, v, repeats = _peel_repeated_heads(transposed.args[0], v)
    return AttentionMatch(
        node=node,
        q=q,
        k=k,
        v=v,
        mask=mask,
        is_mask_inverted=is_inverted,
        scale=scale * factor,
        is_causal=False,
        softcap=softcap,
        interior=(*interior, *repeats),
        module=module_of(node),
    )


def _skip_identities(node: Any, interior: list[fx.Node]) -> Any:
    """Past casts and dropout of probability 0."""
    while isinstance(node, fx.Node):
        is_cast = node.op == "call_method" and node.target in ("to", "type_as", "float", "contiguous")
        is_no_dropout = _is_call(node, F.dropout) and not _is_active_dropout(node)
        if not is_cast and not is_no_dropout:
            break
        interior.append(node)
        node = node.args[0]
    return node


def _is_active_dropout(node: fx.Node) -> bool:
    probability = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    is_training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return bool(probability) and bool(is_training)


def _peel_mask(node: Any, interior: list[fx.Node]) -> tuple[Any, fx.Node | None, bool]:
    if _is_call(node, operator.add) and all(isinstance(arg, fx.Node) for arg in node.args):
        interior.append(node)
        return node.args[0], node.args[1], False
    if _is_call(node, torch.masked_fill):
        scores, mask, value = node.args
        if isinstance(value, (int, float)) and value <= -1e4:
            interior.append(node)
            return scores, mask, True
        raise _NoMatch(f"scores are filled with {value}")
    return node, None, False


def _peel_softcap(node: Any, interior: list[fx.Node]) -> tuple[Any, float | None]:
    inner, cap = _by_constant(node, operator.mul)
    if cap is None or not _is_call(inner, torch.tanh):
        return node, None
    scores, divisor = _by_constant(inner.args[0], operator.truediv)
    if divisor is None or divisor != cap:
        raise _NoMatch("tanh of the scores is not a soft cap")
    interior += [node, inner, inner.args[0]]
    return scores, float(cap)


def _peel_scale(node: Any, interior: list[fx.Node]) -> tuple[Any, float]:
    inner, factor = _by_constant(node, operator.mul)
    if factor is not None:
        interior.append(node)
        return inner, float(factor)
    inner, divisor = _by_constant(node, operator.truediv)
    if divisor:
        interior.append(node)
        return inner, 1.0 / float(divisor)
    return node, 1.0


def _by_constant(node: Any, function: Any) -> tuple[Any, float | None]:
    """(x, c) of function(x, c)."""
    if _is_call(node, function) and isinstance(node.args[1], (int, float)):
        return node.args[0], node.args[1]
    return node, None


def _is_transposed_key(node: Any) -> bool:
    return _is_call(node, torch.transpose) and {dim % 4 for dim in node.args[1:] if isinstance(dim, int)} == {2, 3}


def _peel_repeated_heads(k: Any, v: Any) -> tuple[Any, Any, tuple[fx.Node, ...]]:
    """k and v before each head was repeated for a group of query heads, if both were, equally."""
    k_source, k_count, k_nodes = _repeat_source(k)
    v_source, v_count, v_nodes = _repeat_source(v)
    if k_count != v_count or k_count == 1:
        return k, v, ()
    return k_source, v_source, (*k_nodes, *v_nodes)


def _repeat_source(node: Any) -> tuple[Any, int, tuple[Any, ...]]:
    unrepeated: tuple[Any, int, tuple[Any, ...]] = (node, 1, ())
    if not isinstance(node, fx.Node) or _rank(node) != 4:
        return unrepeated
    if node.target in ("repeat_interleave", torch.repeat_interleave):
        named: dict[str, Any] = dict(zip(("input", "repeats", "dim"), node.args, strict=False)) | node.kwargs
        if named.get("dim") in (1, -3) and isinstance(named.get("repeats"), int):
            return named["input"], named["repeats"], (node,)
        return unrepeated
    if node.op != "call_method" or node.target not in ("reshape", "view", "contiguous"):
        return unrepeated
    expanded: Any = node.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target != "expand" or _rank(expanded) != 5:
        return unrepeated
    indexed: Any = expanded.args[0]
    everything = slice(None, None, None)
    if not _is_call(indexed, operator.getitem):
        return unrepeated
    index = indexed.args[1]
    if not isinstance(index, tuple) or index[:3] != (everything, everything, None):
        return unrepeated
    source = indexed.args[0]
    heads, count = _shape(expanded)[1], _shape(expanded)[2]
    if not isinstance(count, int) or _shape(node)[1] != heads * count or _rank(source) != 4:
        return unrepeated
    return source, count, (node, expanded, indexed)


def _check_rank(*nodes: Any) -> None:
    for node in nodes:
        if not isinstance(node, fx.Node) or _rank(node) != 4:
            raise _NoMatch(f"{node} is not [batch, heads, tokens, head_dim]")


def _is_call(node: Any, function: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is function


def _shape(node: fx.Node) -> Any:
    return node.meta["example_value"].shape


def _rank(node: Any) -> int | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else None


def _head_dim(node: fx.Node) -> int:
    return int(_shape(node)[-1])
