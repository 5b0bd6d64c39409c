"""Gives every stage a function; structurally equal stages share one.

Parameters are stage inputs, so the stages of equal layers differ in nothing but the registers they read, and the
number of compilations does not grow with the number of layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from neo_compile.config import StageKind
from neo_compile.passes.split_stages import SplitGraph, StageGraph
from neo_compile.staged import Artifact, StagedModel, StageFunction

if TYPE_CHECKING:
    from neo_compile.passes.background import BackgroundCompilation

logger = logging.getLogger(__name__)


def structural_key(gm: fx.GraphModule) -> tuple[Any, ...]:
    """Equal for graphs that compute the same on equally shaped inputs: operators, wiring, input metadata."""
    index: dict[fx.Node, int] = {}
    rows: list[Any] = []
    for node in gm.graph.nodes:
        args = _describe((node.args, node.kwargs), index, gm)
        target = node.target if node.op in ("call_function", "call_method") else None
        value = _metadata(node.meta.get("example_value")) if node.op == "placeholder" else None
        if node.op == "get_attr":
            value = id(_attribute(gm, str(node.target)))
        rows.append((node.op, target, args, value))
        index[node] = len(index)
    return tuple(rows)


def share_stages(split: SplitGraph) -> list[int | None]:
    """For each stage the index of its artefact: equal stages have the same one. None: a stage without operators."""
    index_of: dict[tuple[Any, ...], int] = {}
    return [
        index_of.setdefault(structural_key(stage.graph_module), len(index_of)) if stage.num_operators else None
        for stage in split.stages
    ]


def compile_stages(
    split: SplitGraph, keys: Sequence[int | None], *, stages: StageKind, num_threads: int | None = None
) -> list[Artifact | None]:
    """The artefact of each stage; equal stages have the same one.

    Args:
        keys: from `share_stages`.
        stages: "background" gives eager ones, for `compile_in_background`.
        num_threads: Inductor bakes the thread count into its loops; None takes torch's current one.
    """
    artifacts: dict[int, Artifact] = {}
    for stage, key in zip(split.stages, keys, strict=True):
        if key is not None and key not in artifacts:
            artifacts[key] = _compile(stage, stages, num_threads)
    logger.info("%d linear stages, %d distinct", len(split.stages), len(artifacts))
    return [None if key is None else artifacts[key] for key in keys]


def compile_in_background(
    split: SplitGraph,
    staged: StagedModel,
    *,
    num_threads: int | None = None,
    on_done: Callable[[], object] | None = None,
) -> BackgroundCompilation:
    """Start to compile the eager stages of `staged`, made from `split`; see `BackgroundCompilation`."""
    from neo_compile.passes.background import BackgroundCompilation

    artifacts: list[Artifact] = []
    graphs: list[StageGraph] = []
    for graph, call, key in zip(split.stages, staged.program.stages, staged.stage_keys, strict=True):
        if key == len(artifacts) and call.artifact:
            artifacts.append(call.artifact)
            graphs.append(graph)
    threads = num_threads or torch.get_num_threads()
    compilation = BackgroundCompilation(artifacts, graphs, staged.stage_keys, num_threads=threads, on_done=on_done)
    staged.compilation = compilation
    return compilation


def _compile(stage: StageGraph, stages: StageKind, num_threads: int | None) -> Artifact:
    if stages != "inductor":
        return Artifact(_eager(stage.graph_module), "eager")
    from neo_compile.passes.inductor import compile_with_inductor

    return compile_with_inductor(stage.graph_module, stage.example_inputs(), num_threads=num_threads)


def _eager(gm: fx.GraphModule) -> StageFunction:
    gm.recompile()
    forward = gm.forward

    def run(values: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = forward(*values)
        return results

    return run


def _describe(value: Any, index: dict[fx.Node, int], gm: fx.GraphModule) -> Any:
    if isinstance(value, fx.Node):
        return ("node", index[value])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_describe(item, index, gm) for item in value))
    if isinstance(value, dict):
        return ("dict", *((key, _describe(item, index, gm)) for key, item in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_describe(item, index, gm) for item in (value.start, value.stop, value.step)))
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, repr(value))


def _metadata(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, str(value))
    return (
        str(tuple(value.shape)),
        str(value.stride()) if value.layout == torch.strided else str(value.layout),
        str(value.dtype),
        str(value.device),
    )


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for name in target.split("."):
        value = getattr(value, name)
    return value
