"""Traces a model's call over tokens with Dynamo: one graph for every number of tokens, its inputs named."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.source import LocalSource, TensorPropertySource

from neo_compile.errors import UnsupportedModelError
from neo_compile.hf_checks import LogitsCall
from neo_compile.staged import SizeInput


@dataclass
class TracedModel:
    """A model's graph over tokens: `num_sites` calls of `neo::attention`, one per layer; inputs named."""

    gm: fx.GraphModule
    example_inputs: list[Any]
    named_inputs: list[str | SizeInput | None]
    num_sites: int
    call: LogitsCall


class _TracedError(Exception):
    """Ends the traced call once the graph is there."""


def trace_tokens(call: LogitsCall, device: torch.device, *, has_mask: bool = False) -> tuple[fx.GraphModule, list[Any]]:
    """The graph of `call`, and example inputs; the number of tokens and of rows are unbacked sizes.

    Args:
        has_mask: the graph has an input attention_mask [1, 1, T, T] as well, float32, to be added to the scores.

    Raises:
        UnsupportedModelError: there is no such graph.
    """
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append((gm, list(example_inputs)))

        def stop(*_: Any) -> Any:
            raise _TracedError

        return stop

    tokens = torch.zeros(1, 5, dtype=torch.int64, device=device)
    positions = torch.arange(5, device=device)[None]
    rows = torch.arange(2, device=device)
    mask = torch.zeros(1, 1, 5, 5, device=device)
    for tensor, dim in ((tokens, 1), (positions, 1), (rows, 0), (mask, 2), (mask, 3)):
        mark_unbacked(tensor, dim)
    inputs = (tokens, positions, rows, mask) if has_mask else (tokens, positions, rows)
    compiled = torch.compile(_own_copy(_forward(call)), backend=keep, fullgraph=True, dynamic=False)
    try:
        # Floats stay constants of the graph, also for the second model of a process.
        with torch._dynamo.config.patch(specialize_float=True, automatic_dynamic_shapes=False):
            compiled(*inputs)
    except _TracedError:
        pass
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModelError(f"torch.compile cannot capture the model in one graph: {reason}") from error
    (graph,) = found
    return graph


def _forward(call: LogitsCall) -> Any:
    def forward(
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens = input_ids.shape[1]
        torch._check(num_tokens == position_ids.shape[1])  # type: ignore[no-untyped-call]
        if attention_mask is not None:
            for size in attention_mask.shape[2:]:
                torch._check(size == num_tokens)  # type: ignore[no-untyped-call]
                torch._check(size != 0)  # type: ignore[no-untyped-call]
        return call(input_ids, position_ids, logit_rows, attention_mask)

    return forward


def _own_copy(function: Any) -> Callable[..., torch.Tensor]:
    """`function` with a code object of its own: what Dynamo caches for it dies with it, and captures share no limit."""
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def name_inputs(
    model: torch.nn.Module, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> list[str | SizeInput | None]:
    """For each placeholder: an input's name, a size of one, or None for a parameter or buffer of the model.

    Raises:
        UnsupportedModelError: it is something else.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    names: list[str | SizeInput | None] = []
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs, strict=True):
        source = getattr(node, "_dynamo_source", None)
        if isinstance(source, TensorPropertySource) and isinstance(source.base, LocalSource):
            names.append(SizeInput(source.base.local_name, int(source.idx or 0)))
        elif isinstance(source, LocalSource):
            names.append(source.local_name)
        elif isinstance(example, torch.Tensor) and id(example) in known:
            names.append(None)
        else:
            raise UnsupportedModelError(
                f"the model's forward reads {node.name}, which is neither a parameter nor an input"
            )
    return names
