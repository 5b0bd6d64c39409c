"""What must hold before a graph is cut. Each violation is a reason, in words a user can act on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef

from neo_compile.passes.split_stages import find_sites, is_site

# Pairs of calls that switch a mode on and off; a cut between them would run a stage in the wrong mode.
_ENTER = {torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast}


def verify(graph: fx.Graph, *, num_sites: int | None = None) -> list[str]:
    """Reasons why `graph` must not be cut at its sites; empty if it may.

    Args:
        num_sites: how many sites there must be; None accepts any number but 0.
    """
    reasons = []
    sites = find_sites(graph)
    if not sites:
        reasons.append("no attention site in the graph")
    elif num_sites is not None and len(sites) != num_sites:
        reasons.append(f"{len(sites)} attention sites in the graph, expected {num_sites}")
    numbers = [site.args[5] for site in sites]
    if numbers != list(range(len(sites))):
        reasons.append(f"attention sites are numbered {numbers}")
    reasons += _open_modes(graph)
    reasons += _untyped_crossings(graph)
    return reasons


def _open_modes(graph: fx.Graph) -> list[str]:
    open_modes: list[fx.Node] = []
    reasons = []
    for node in graph.nodes:
        if node.target in _ENTER:
            open_modes.append(node)
        elif node.target in _ENTER.values() and open_modes:
            open_modes.pop()
        elif is_site(node) and open_modes:
            reasons.append(f"an autocast region spans the attention site {node.args[5]}")
    return reasons[:1]


def _untyped_crossings(graph: fx.Graph) -> list[str]:
    """Values without a recorded type that a later stage reads."""
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for node in graph.nodes:
        stage += is_site(node)
        stage_of[node] = stage
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and "example_value" not in node.meta:
            crossing = [user for user in node.users if stage_of[user] != stage_of[node] or is_site(user)]
            if crossing:
                return [f"{node.name}, of unknown type, crosses from a linear stage to the next"]
    return []


def mutated_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """Which inputs of a stage it changes in place, found by running it on fake tensors."""
    inputs = as_fakes(example_inputs)
    versions = _versions(inputs)
    with torch.no_grad(), fake_mode_of(inputs), enable_python_dispatcher():
        gm(*inputs)
    return [index for index, (old, new) in enumerate(zip(versions, _versions(inputs), strict=True)) if old != new]


def is_functional(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a stage mutates no input, and its results share memory with no input and not with each other."""
    inputs = as_fakes(example_inputs)
    versions = _versions(inputs)
    with torch.no_grad(), fake_mode_of(inputs), enable_python_dispatcher():
        results = [value for value in gm(*inputs) if isinstance(value, torch.Tensor)]
    if versions != _versions(inputs):
        return False
    storages = [_storage(tensor) for tensor in results]
    given = {_storage(value) for value in inputs if isinstance(value, torch.Tensor)}
    return len(set(storages)) == len(storages) and not given & set(storages)


def as_fakes(example_inputs: Sequence[Any]) -> list[Any]:
    """`example_inputs` with a fake in place of each real tensor (tensors of the graph itself are real)."""
    fake_mode = fake_mode_of(example_inputs)
    return [
        fake_mode.from_tensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) else value
        for value in example_inputs
    ]


def fake_mode_of(example_inputs: Sequence[Any]) -> FakeTensorMode:
    """The mode that the graph was traced in. Dynamo gives its backends another one, of the same shape environment."""
    for value in example_inputs:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(shape_env=ShapeEnv())


def _storage(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _versions(values: Sequence[Any]) -> list[int | None]:
    return [value._version if isinstance(value, torch.Tensor) else None for value in values]
