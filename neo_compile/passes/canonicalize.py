"""One spelling for what the attention patterns are made of, so that each pattern is written once.

    x.softmax(-1), torch.softmax(x, -1)      ->  F.softmax(x, dim=-1, dtype=...)
    a @ b, a.matmul(b)                       ->  torch.matmul(a, b)
    x.masked_fill(m, v), x.transpose(i, j)   ->  torch.masked_fill(...), torch.transpose(...)
    sdpa(q, k, v, mask, 0.0, True)           ->  sdpa(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=True, ...)
    f(x, input.item())                       ->  f(x, 1e-6)         numbers that Dynamo made inputs of (dynamic=True)

In-place spellings are left alone: they change their argument.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._sympy.symbol import SymT, symbol_is_type

_FUNCTION_OF_METHOD: dict[str, Any] = {
    "softmax": F.softmax,
    "matmul": torch.matmul,
    "masked_fill": torch.masked_fill,
    "transpose": torch.transpose,
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "tanh": torch.tanh,
}
_FUNCTION_OF_FUNCTION: dict[Any, Any] = {
    torch.softmax: F.softmax,
    operator.matmul: torch.matmul,
    torch.add: operator.add,
    torch.mul: operator.mul,
    torch.div: operator.truediv,
    torch.true_divide: operator.truediv,
    F.tanh: torch.tanh,
}
# operator's functions take two positional arguments and nothing else.
_BINARY = (operator.add, operator.mul, operator.truediv)
_SDPA_KEYWORDS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def canonicalize(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite the operators named above; everything else stays."""
    is_changed = _fix_numbers(gm.graph)
    for node in gm.graph.nodes:
        is_changed |= _canonicalize_target(node)
        is_changed |= _canonicalize_arguments(node)
    if is_changed:
        gm.recompile()
    return gm


def _fix_numbers(graph: fx.Graph) -> bool:
    """Put numbers in place of float inputs. Dynamo then guards on their values, so another one is another graph.

    A scale must be known to a site, and stages take tensors and sizes.
    """
    is_changed = False
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.SymFloat) or not _is_float_input(value):
            continue
        for user in [user for user in node.users if user.op != "output"]:
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), _putter(node, float(value)))
            is_changed = True
        if not node.users and node.op != "placeholder":
            graph.erase_node(node)
    return is_changed


def _putter(node: fx.Node, number: float) -> Callable[[fx.Node], Any]:
    return lambda arg: number if arg is node else arg


def _is_float_input(value: torch.SymFloat) -> bool:
    """Whether float inputs alone determine `value`: a function of sizes must stay one."""
    symbols = value.node.expr.free_symbols
    return value.node.has_hint() and all(symbol_is_type(symbol, SymT.FLOAT) for symbol in symbols)


def _canonicalize_target(node: fx.Node) -> bool:
    if node.op == "call_method":
        target = _FUNCTION_OF_METHOD.get(str(node.target))
    elif node.op == "call_function":
        target = _FUNCTION_OF_FUNCTION.get(node.target)
    else:
        return False
    if target is None or (target in _BINARY and (len(node.args) != 2 or node.kwargs)):
        return False
    node.op, node.target = "call_function", target
    return True


def _canonicalize_arguments(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is F.scaled_dot_product_attention:
        names = ("query", "key", "value", *_SDPA_KEYWORDS)
        given = {**_SDPA_KEYWORDS, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        args = tuple(given.pop(name) for name in ("query", "key", "value"))
    elif node.target is F.softmax:
        # The method and torch.softmax are (x, dim, dtype); F.softmax is (x, dim, _stacklevel, dtype).
        rest = list(node.args[1:])
        if len(rest) == 3:
            rest.pop(1)
        given = {"dim": None, "dtype": None, **dict(zip(("dim", "dtype"), rest, strict=False)), **node.kwargs}
        given.pop("_stacklevel", None)
        args = (given.pop("input", None) if not node.args else node.args[0],)
    else:
        return False
    if (args, given) == (node.args, node.kwargs):
        return False
    node.args, node.kwargs = args, given
    return True
