"""Graphs for pass tests: traced by Dynamo from a function, so that they look like what the backend is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def trace(function: Callable[..., Any], *inputs: Any) -> tuple[fx.GraphModule, list[Any]]:
    """The Dynamo graph of `function` and its example inputs."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found.append((gm, list(example_inputs)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (graph,) = found
    return graph


def targets(gm: fx.GraphModule) -> list[Any]:
    """Targets of all calls, in order."""
    return [node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
