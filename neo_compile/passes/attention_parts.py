"""The parts that hand-written attention is made of: each function takes one off, from the outside in.

All work on canonical graphs, and append the nodes that they pass to `interior`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

# Filling masked scores with less than this is as good as minus infinity.
_MASKED = -1e4
_EVERYTHING = slice(None, None, None)
# In-place spellings count as well, where nothing else reads what they change.
_IN_PLACE = {operator.add: operator.iadd, operator.mul: operator.imul, operator.truediv: operator.itruediv}


class NoMatch(Exception):
    """It looks like attention, and cannot be a site; carries the reason."""


@dataclass(frozen=True)
class Mask:
    """Added to the scores or, if boolean, True where attention is allowed.

    Attributes:
        is_inverted: True where it is not allowed.
        fill: what a boolean mask puts in place of scores; a row without any key is uniform if this is finite.
    """

    node: fx.Node
    is_inverted: bool = False
    fill: float = float("-inf")


def skip_identities(node: Any, interior: list[fx.Node]) -> Any:
    """Past casts and dropout of probability 0."""
    while isinstance(node, fx.Node):
        is_cast = node.op == "call_method" and node.target in ("to", "type_as", "float", "contiguous")
        is_no_dropout = is_call(node, F.dropout) and not _is_active_dropout(node)
        if not is_cast and not is_no_dropout:
            break
        interior.append(node)
        node = node.args[0]
    return node


def _is_active_dropout(node: fx.Node) -> bool:
    probability = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    is_training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return bool(probability) and bool(is_training)


def peel_masks(node: Any, interior: list[fx.Node]) -> tuple[Any, tuple[Mask, ...]]:
    """The scores below all masks, and the masks, innermost first.

    Raises:
        NoMatch: scores are overwritten by something else than a mask.
    """
    masks: list[Mask] = []
    while True:
        inner, mask = _peel_mask(node)
        if mask is None:
            return node, tuple(reversed(masks))
        interior.append(node)
        masks.append(mask)
        node = skip_identities(inner, interior)


def _peel_mask(node: Any) -> tuple[Any, Mask | None]:
    if _is_binary(node, operator.add) and all(isinstance(arg, fx.Node) for arg in node.args):
        return node.args[0], Mask(node.args[1])
    if is_call(node, torch.masked_fill):
        scores, mask, value = node.args
        return scores, Mask(mask, is_inverted=True, fill=_fill(value))
    if is_call(node, torch.where) and len(node.args) == 3 and rank(node.args[1]) == 4:
        mask, scores, value = node.args
        return scores, Mask(mask, fill=_fill(value))
    return node, None


def _fill(value: Any) -> float:
    """The number that `value` is, or that it makes a tensor of.

    Raises:
        NoMatch: it does not mask.
    """
    if is_call(value, torch.tensor):
        value = value.args[0]
    elif is_call(value, torch.full):
        value = value.args[1]
    if not isinstance(value, (int, float)) or value > _MASKED:
        raise NoMatch(f"scores are filled with {value}")
    return float(value)


def peel_last_column(node: Any, interior: list[fx.Node]) -> tuple[Any, bool]:
    """The weights of which `node` leaves the last column out, and whether it does."""
    if is_call(node, operator.getitem) and node.args[1] == (Ellipsis, slice(None, -1, None)):
        interior.append(node)
        return node.args[0], True
    return node, False


def peel_sinks(node: Any) -> tuple[Any, fx.Node, list[fx.Node]]:
    """(scores, sinks [Hq], nodes passed) of `cat([scores, sinks per query], -1)`, less its maximum or not.

    Raises:
        NoMatch: the last column of the weights is something else.
    """
    interior: list[fx.Node] = []
    if is_call(node, operator.sub) and _is_maximum_of(node.args[1], node.args[0]):
        values = node.args[1]
        interior += [node, values, values.args[0]]
        node = node.args[0]
    if not is_call(node, torch.cat) or (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")) != -1:
        raise NoMatch("the last column of the weights is left out, and is not that of sinks")
    parts: Any = node.args[0]
    expanded: Any = parts[1] if len(parts) == 2 else None
    reshaped: Any = expanded.args[0] if _is_method(expanded, "expand") else None
    if not _is_method(reshaped, "reshape", "view") or tuple(reshaped.args[1:]) != (1, -1, 1, 1):
        raise NoMatch("the column beside the scores is not one sink per head")
    interior += [node, expanded, reshaped]
    return parts[0], reshaped.args[0], interior


def _is_maximum_of(node: Any, values: Any) -> bool:
    """`values.max(dim=-1, keepdim=True).values`, which softmax does not see."""
    if not (is_call(node, getattr) and node.args[1] == "values") and not (
        is_call(node, operator.getitem) and node.args[1] == 0
    ):
        return False
    maximum = node.args[0]
    is_max = _is_method(maximum, "max") or is_call(maximum, torch.max)
    return is_max and maximum.args[0] is values and maximum.kwargs.get("keepdim") is True


def peel_softcap(node: Any, interior: list[fx.Node]) -> tuple[Any, float | None]:
    """(x, cap) of tanh(x / cap) * cap.

    Raises:
        NoMatch: two different numbers.
    """
    inner, cap = _by_constant(node, operator.mul)
    if cap is None or not is_call(inner, torch.tanh):
        return node, None
    scores, divisor = _by_constant(inner.args[0], operator.truediv)
    if divisor is None or divisor != cap:
        raise NoMatch("tanh of the scores is not a soft cap")
    interior += [node, inner, inner.args[0]]
    return scores, float(cap)


def peel_scale(node: Any, interior: list[fx.Node]) -> tuple[Any, float]:
    """(x, factor) of x * factor or x / (1 / factor), 1 if there is none."""
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
    if _is_binary(node, function) and isinstance(node.args[1], (int, float)):
        return node.args[0], node.args[1]
    return node, None


def _is_binary(node: Any, function: Any) -> bool:
    """function(x, y), or its in-place form on an x that only it reads."""
    if is_call(node, function):
        return True
    return is_call(node, _IN_PLACE[function]) and isinstance(node.args[0], fx.Node) and len(node.args[0].users) == 1


def is_transposed_key(node: Any) -> bool:
    """Whether `node` swaps the last two of four dimensions."""
    return is_call(node, torch.transpose) and {dim % 4 for dim in node.args[1:] if isinstance(dim, int)} == {2, 3}


def peel_repeated_heads(k: Any, v: Any) -> tuple[Any, Any, tuple[fx.Node, ...]]:
    """k and v before each head was repeated for a group of query heads, if both were, equally."""
    k_source, k_count, k_nodes = _repeat_source(k)
    v_source, v_count, v_nodes = _repeat_source(v)
    if k_count != v_count or k_count == 1:
        return k, v, ()
    return k_source, v_source, (*k_nodes, *v_nodes)


def _repeat_source(node: Any) -> tuple[Any, int, tuple[Any, ...]]:
    unrepeated: tuple[Any, int, tuple[Any, ...]] = (node, 1, ())
    if not isinstance(node, fx.Node) or rank(node) != 4:
        return unrepeated
    if node.target in ("repeat_interleave", torch.repeat_interleave):
        named: dict[str, Any] = dict(zip(("input", "repeats", "dim"), node.args, strict=False)) | node.kwargs
        if named.get("dim") in (1, -3) and isinstance(named.get("repeats"), int):
            return named["input"], named["repeats"], (node,)
        return unrepeated
    is_flattening = _is_method(node, "flatten") and tuple(node.args[1:]) == (1, 2)
    if not is_flattening and not _is_method(node, "reshape", "view", "contiguous"):
        return unrepeated
    expanded: Any = node.args[0]
    if not _is_method(expanded, "expand") or rank(expanded) != 5:
        return unrepeated
    source = _before_new_dimension(expanded.args[0])
    heads, count = _shape(expanded)[1], _shape(expanded)[2]
    if source is None or not isinstance(count, int) or _shape(node)[1] != heads * count or rank(source) != 4:
        return unrepeated
    return source, count, (node, expanded, expanded.args[0])


def _before_new_dimension(node: Any) -> Any:
    """x of x[:, :, None] or x.unsqueeze(2); None if `node` is something else."""
    if _is_method(node, "unsqueeze") and node.args[1] in (2, -3):
        return node.args[0]
    index = node.args[1] if is_call(node, operator.getitem) else None
    is_new = isinstance(index, tuple) and index[:3] == (_EVERYTHING, _EVERYTHING, None)
    return node.args[0] if is_new else None


def check_rank(*nodes: Any) -> None:
    """Raises NoMatch unless all are 4-dimensional tensors."""
    for node in nodes:
        if not isinstance(node, fx.Node) or rank(node) != 4:
            raise NoMatch(f"{node} is not [batch, heads, tokens, head_dim]")


def is_call(node: Any, function: Any) -> bool:
    """Whether `node` calls `function`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is function


def _is_method(node: Any, *names: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in names


def rank(node: Any) -> int | None:
    """Dimensions of a tensor's node, or None."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else None


def head_dim(node: fx.Node) -> int:
    """The last dimension of a tensor's node."""
    return int(_shape(node)[-1])


def _shape(node: fx.Node) -> Any:
    return node.meta["example_value"].shape
