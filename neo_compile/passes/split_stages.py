"""Cuts a graph at its attention sites.

    nodes    a b [attention 0] c d e [attention 1] f
    stages   0: a b            1: c d e            2: f

A stage reads registers (graph inputs, tensors of the graph, results of earlier stages and sites) and writes those of
its results that something later reads. Nodes keep their order, so a node belongs to the stage it was traced in; but
for what is made of parameters once (packed weights), which belongs to none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from neo_compile.ops import describe_site
from neo_compile.packed_linear import join_biases, pack_weights
from neo_compile.parameters import DerivedCall
from neo_compile.staged import Artifact, Program, SiteCall, StageCall


@dataclass
class StageGraph:
    """One linear stage: placeholder i reads register inputs[i], output i is register outputs[i]."""

    graph_module: fx.GraphModule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    num_operators: int

    def example_inputs(self) -> list[Any]:
        """Fake tensors (or symbolic integers) of the placeholders."""
        return [node.meta["example_value"] for node in self.graph_module.graph.nodes if node.op == "placeholder"]


@dataclass
class SplitGraph:
    """Stages and sites of a graph, and which register holds what."""

    stages: list[StageGraph]
    sites: list[SiteCall]
    num_registers: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    constants: dict[int, Any] = field(default_factory=dict)
    derived: list[DerivedCall] = field(default_factory=list)


def is_site(node: fx.Node) -> bool:
    """Whether `node` is a `neo::attention` call."""
    return node.op == "call_function" and node.target in (
        torch.ops.neo.attention,
        torch.ops.neo.attention.default,
    )


def find_sites(graph: fx.Graph) -> list[fx.Node]:
    """The attention sites of `graph`, in program order."""
    return [node for node in graph.nodes if is_site(node)]


def flatten_batch(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Drops the batch dimension (1) of q, k, v and of the result at the cuts, so that drivers need no views.

    The graph can only be split afterwards, not executed.
    """
    for site in find_sites(gm.graph):
        if site.meta.get("is_flat"):
            continue
        for index in range(3):
            tensor = site.args[index]
            assert isinstance(tensor, fx.Node)
            with gm.graph.inserting_before(site):
                flat = gm.graph.call_method("squeeze", (tensor, 0))
            flat.meta["example_value"] = _fake(tensor).squeeze(0)
            site.update_arg(index, flat)
        out = _fake(site)
        with gm.graph.inserting_after(site):
            batched = gm.graph.call_method("unsqueeze", (site, 0))
        for user in [user for user in site.users if user is not batched]:
            user.replace_input_with(site, batched)
        batched.meta["example_value"] = out
        site.meta["example_value"] = out.squeeze(0)
        site.meta["is_flat"] = True
    return gm


def split_stages(gm: fx.GraphModule) -> SplitGraph:
    """Split `gm` at its sites; every node needs its fake value in `meta["example_value"]`."""
    registers: dict[fx.Node, int] = {}
    constants: dict[int, Any] = {}
    derived: list[DerivedCall] = []
    segments: list[list[fx.Node]] = [[]]
    site_nodes: list[fx.Node] = []
    stage_of: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if node.users:
                registers[node] = len(registers)
        elif _is_tensor_attribute(gm, node):
            registers[node] = len(registers)
            constants[registers[node]] = _attribute(gm, str(node.target))
            node.meta.setdefault("example_value", constants[registers[node]])
        elif _is_derived(node):
            registers[node] = len(registers)
            derived.append(_derived_call(node, registers))
        elif is_site(node):
            site_nodes.append(node)
            segments.append([])
            registers[node] = len(registers)
        elif node.op != "output":
            segments[-1].append(node)
            stage_of[node] = len(segments) - 1
    crossing = _crossing(gm.graph, stage_of)
    for node in crossing:
        registers[node] = len(registers)
    sizes = _unbacked_sizes(registers)
    stages = [_stage_graph(gm, segment, registers, crossing, sizes) for segment in segments]
    output = next(node for node in gm.graph.nodes if node.op == "output")
    inputs = tuple(registers.get(node) for node in gm.graph.nodes if node.op == "placeholder")
    sites = [_site_call(node, index, registers) for index, node in enumerate(site_nodes)]
    outputs = tuple(registers[node] for node in output.args[0])
    return SplitGraph(stages, sites, len(registers), inputs, outputs, constants, derived)


def build_program(split: SplitGraph, artifacts: Sequence[Artifact | None], bound: dict[int, Any]) -> Program:
    """The flat program of `split` with an artefact per stage; `bound` gives some input registers their value for good.

    A register is cleared by its last reader, unless its value is bound, constant or a result.
    """
    derived = {register for call in split.derived for register in (call.output, *call.inputs)}
    kept = set(split.outputs) | set(split.constants) | set(bound) | derived
    last_reader: dict[int, int] = {}
    for index, stage in enumerate(split.stages):
        last_reader.update(dict.fromkeys(stage.inputs, 2 * index))
        if index < len(split.sites):
            last_reader.update(dict.fromkeys(_reads(split.sites[index]), 2 * index + 1))

    def dead(reads: Sequence[int], position: int) -> tuple[int, ...]:
        return tuple(register for register in reads if last_reader[register] == position and register not in kept)

    stages = tuple(
        StageCall(artifact, stage.inputs, stage.outputs, dead(stage.inputs, 2 * index))
        for index, (stage, artifact) in enumerate(zip(split.stages, artifacts, strict=True))
    )
    sites = tuple(
        SiteCall(**{**vars(call), "dead": dead(_reads(call), 2 * index + 1)}) for index, call in enumerate(split.sites)
    )
    return Program(
        stages=stages,
        sites=sites,
        num_registers=split.num_registers,
        inputs=tuple(None if register in bound else register for register in split.inputs),
        outputs=split.outputs,
        constants={**split.constants, **bound},
        derived=tuple(split.derived),
    )


def _is_derived(node: fx.Node) -> bool:
    return node.target in (torch.ops.neo.pack_weights.default, torch.ops.neo.join_biases.default)


def _derived_call(node: fx.Node, registers: dict[fx.Node, int]) -> DerivedCall:
    function: Any = join_biases
    if node.target is torch.ops.neo.pack_weights.default:
        function = functools.partial(pack_weights, transposed=bool(node.args[1]))
    return DerivedCall(function, tuple(registers[source] for source in node.args[0]), registers[node])  # type: ignore[union-attr, index]


def _reads(call: SiteCall) -> tuple[int, ...]:
    registers = (call.q, call.k, call.v, call.mask, call.sinks)
    return tuple(dict.fromkeys(register for register in registers if register is not None))


def _crossing(graph: fx.Graph, stage_of: dict[fx.Node, int]) -> list[fx.Node]:
    """Results of stages that another stage, a site, or the graph's output reads."""
    return [node for node, stage in stage_of.items() if any(stage_of.get(user, -1) != stage for user in node.users)]


def _unbacked_sizes(registers: dict[fx.Node, int]) -> dict[Any, fx.Node]:
    """The graph input that holds each unbacked size."""
    values = {node: node.meta.get("example_value") for node in registers if node.op == "placeholder"}
    return {
        value.node.expr: node
        for node, value in values.items()
        if isinstance(value, torch.SymInt) and value.node.expr in free_unbacked_symbols(value)
    }


def _stage_graph(
    gm: fx.GraphModule,
    segment: list[fx.Node],
    registers: dict[fx.Node, int],
    crossing: list[fx.Node],
    sizes: dict[Any, fx.Node],
) -> StageGraph:
    members = set(segment)
    outer = dict.fromkeys(node for member in segment for node in member.all_input_nodes if node not in members)
    # Inductor of torch 2.14 does not read an unbacked size off a tensor: it wants each as an input of its own.
    for node in list(outer):
        tensor = node.meta["example_value"]
        if isinstance(tensor, torch.Tensor):
            symbols = sorted(free_unbacked_symbols(tensor), key=str)
            outer.update(dict.fromkeys(sizes[symbol] for symbol in symbols if symbol in sizes))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(outer):
        copies[node] = graph.placeholder(f"in{index}")
        copies[node].meta["example_value"] = node.meta["example_value"]
    for node in segment:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    crossing_set = set(crossing)
    results = [node for node in segment if node in crossing_set]
    graph.output(tuple(copies[node] for node in results))
    return StageGraph(
        graph_module=fx.GraphModule(gm, graph),
        inputs=tuple(registers[node] for node in outer),
        outputs=tuple(registers[node] for node in results),
        num_operators=len(segment),
    )


def _site_call(node: fx.Node, index: int, registers: dict[fx.Node, int]) -> SiteCall:
    arguments: Any = node.args
    q, k, v, mask, sinks, _, scale, is_causal, window, softcap = arguments
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    is_flat = bool(node.meta.get("is_flat"))
    fakes = [_fake(tensor) for tensor in (q, k, v)]
    if is_flat:
        fakes = [fake.unsqueeze(0) for fake in fakes]
    site = describe_site(fakes[0], fakes[1], fakes[2], sinks, index, scale, window, softcap)
    return SiteCall(
        site=site,
        q=registers[q],
        k=registers[k],
        v=registers[v],
        mask=registers[mask] if isinstance(mask, fx.Node) else None,
        sinks=registers[sinks] if isinstance(sinks, fx.Node) else None,
        output=registers[node],
        is_causal=bool(is_causal),
        has_batch_dim=not is_flat,
        dead=(),
    )


def _fake(node: fx.Node) -> torch.Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, torch.Tensor), f"{node} holds {type(value).__name__}, not a tensor"
    return value


def _is_tensor_attribute(gm: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(_attribute(gm, str(node.target)), torch.Tensor)


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for name in target.split("."):
        value = getattr(value, name)
    return value
