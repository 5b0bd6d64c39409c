"""Linear stages must be per token: sub-batches are slices of the tokens. Finds the operator that mixes them.

    run with tokens 0 1 2 3        results cut to 0 1 equal those of the second run, cut to 2 3 those of the third;
    run with tokens 0 1            if not, the first operator is named whose value for a token differs
    run with tokens 2 3

Only results are judged: inside, a mixture of experts sorts rows by expert and counts them, and is per token all the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from neo_compile.passes.find_attention import module_of
from neo_compile.passes.split_stages import StageGraph

_NUM_TOKENS = 4
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}


def mixing_operator(stage: StageGraph, values: Mapping[int, Any]) -> str | None:
    """The first operator of `stage` whose result for a token depends on other tokens; None if there is none.

    Args:
        values: contents of registers that are the same in every run (parameters); other inputs are made up.
    """
    placeholders = [node for node in stage.graph_module.graph.nodes if node.op == "placeholder"]
    examples = [node.meta["example_value"] for node in placeholders]
    made_up = [example for example, register in zip(examples, stage.inputs, strict=True) if register not in values]
    symbols = {str(symbol) for example in made_up for size in _sizes(example) for symbol in free_unbacked_symbols(size)}
    if not symbols:
        return None
    generator = torch.Generator().manual_seed(0)
    whole = [
        values[register] if register in values else _make_up(example, generator)
        for example, register in zip(examples, stage.inputs, strict=True)
    ]
    reference = _Recorder(stage.graph_module)
    with torch.no_grad():
        reference.run(*whole)
        for first in (0, _NUM_TOKENS // 2):
            part = [
                value if register in values else _cut_input(value, example, first)
                for value, example, register in zip(whole, examples, stage.inputs, strict=True)
            ]
            comparison = _Comparison(stage.graph_module, reference.recorded, symbols, first)
            comparison.run(*part)
            if comparison.has_other_results():
                return _describe(comparison.culprit())
    return None


class _Recorder(fx.Interpreter):
    """Keeps the value of every node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.recorded: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.recorded[n.name] = value.clone() if isinstance(value, torch.Tensor) and n.op != "placeholder" else value
        return value


class _Comparison(fx.Interpreter):
    """Notes the nodes whose values are not cuts of the recorded ones."""

    def __init__(self, gm: fx.GraphModule, recorded: Mapping[str, Any], symbols: set[str], first: int) -> None:
        super().__init__(gm)
        self._recorded, self._symbols, self._first = recorded, symbols, first
        self._different: dict[fx.Node, None] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        example: Any = n.meta.get("example_value")
        if not n.op.startswith("call") or not isinstance(value, torch.Tensor) or not isinstance(example, torch.Tensor):
            return value
        if _are_tokens(example, self._symbols):
            expected = _cut(self._recorded[n.name], example, self._first)
            if not _is_close(value, expected):
                self._different[n] = None
        return value

    def has_other_results(self) -> bool:
        """Whether a result of the stage differs."""
        (output,) = self.graph.find_nodes(op="output")
        return any(node in self._different for node in output.all_input_nodes)

    def culprit(self) -> fx.Node:
        """The first node whose value for a token differs, or what it reads that all tokens share (a mean)."""
        per_token = [
            node for node in self._different if set(map(str, node.meta["example_value"].shape)) & self._symbols
        ]
        first = per_token[0] if per_token else next(iter(self._different))
        shared = [node for node in first.all_input_nodes if node in self._different]
        return shared[0] if shared else first


def _are_tokens(example: torch.Tensor, symbols: set[str]) -> bool:
    """Whether all sizes of `example` are constants or the number of tokens."""
    sizes: Sequence[Any] = example.shape
    return all(isinstance(size, int) or str(size) in symbols for size in sizes)


def _sizes(example: Any) -> Sequence[Any]:
    if isinstance(example, torch.Tensor):
        return example.shape
    return (example,) if isinstance(example, torch.SymInt) else ()


def _make_up(example: Any, generator: torch.Generator) -> Any:
    if not isinstance(example, torch.Tensor):
        return _size(example, _NUM_TOKENS)
    shape = [_size(size, _NUM_TOKENS) for size in example.shape]
    if example.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(example.device, example.dtype)
    if len(shape) == 1:  # rows to take the logits of
        return torch.arange(shape[0], device=example.device).to(example.dtype)
    return torch.randint(2, shape, generator=generator).to(example.device, example.dtype)


def _cut_input(value: Any, example: Any, first: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return _size(example, _NUM_TOKENS // 2)
    if value.dim() == 1 and not value.is_floating_point():
        return value[: _NUM_TOKENS // 2].clone()
    return _cut(value, example, first).contiguous()


def _cut(value: torch.Tensor, example: torch.Tensor, first: int) -> torch.Tensor:
    """The rows of half of the tokens, from token `first` on."""
    sizes: Sequence[Any] = example.shape
    for dim, size in enumerate(sizes):
        if not isinstance(size, int):
            value = value.narrow(dim, _size(size, first), _size(size, _NUM_TOKENS // 2))
    return value


def _size(size: Any, num_tokens: int) -> Any:
    """`size` (a number of tokens, or a multiple of it) for `num_tokens`; anything else as it is."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, num_tokens)))


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    actual64, expected64 = actual.double(), expected.double()
    scale = expected64.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if expected.numel() else 0.0
    tolerance = _TOLERANCE[actual.dtype] * max(scale, 1e-6)
    return torch.allclose(actual64, expected64, rtol=0, atol=tolerance, equal_nan=True)


def _describe(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    module = module_of(node)
    return f"{target} in {module}" if module else target
