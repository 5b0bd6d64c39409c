"""What neo would do with a model, and why: graphs, attention sites, linear stages and how many differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from neo_compile.attention import AttentionSite
from neo_compile.capture import split_traced, trace_model
from neo_compile.errors import UnsupportedModelError
from neo_compile.passes.canonicalize import canonicalize
from neo_compile.passes.compile_stages import share_stages
from neo_compile.passes.find_attention import Refusal, find_attention, module_of
from neo_compile.passes.pack_linears import num_packed, pack_linears, why_unpacked
from neo_compile.passes.replace_attention import replace_attention
from neo_compile.passes.split_stages import SplitGraph, find_sites, flatten_batch, split_stages
from neo_compile.passes.verify import verify
from neo_compile.uncompiled import uncompiled


@dataclass(frozen=True)
class Region:
    """One captured graph.

    Attributes:
        modules: qualified name of the module behind each site, "" where unknown.
        stage_keys: artefact of each linear stage; equal numbers share one compilation.
        num_operators: of each linear stage.
        refusals: attention that cannot be a site.
        num_packed: calls with prepacked weights (runtime captures on the CPU).
        unpacked: why weights of matrix products stay as they are, and how many.
        reason: why the graph is left whole; None if it is cut at its sites.
    """

    num_nodes: int
    sites: tuple[AttentionSite, ...] = ()
    modules: tuple[str, ...] = ()
    stage_keys: tuple[int | None, ...] = ()
    num_operators: tuple[int, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    reason: str | None = None
    num_packed: int = 0
    unpacked: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_artifacts(self) -> int:
        """Distinct linear stages."""
        return len(set(self.stage_keys) - {None})


@dataclass(frozen=True)
class Report:
    """The result of `explain`; `str()` gives a page to read.

    Attributes:
        kind: "runtime capture" (tokens of many requests) or "torch.compile" (the call as it stands).
        reason: why the model is refused as a whole, or None.
    """

    model: str
    kind: str
    regions: tuple[Region, ...] = ()
    reason: str | None = None

    @property
    def num_sites(self) -> int:
        """Attention sites over all graphs."""
        return sum(len(region.sites) for region in self.regions)

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.kind}, {_count(len(self.regions), 'graph')}, {_count(self.num_sites, 'site')}"]
        if self.reason:
            lines.append(f"  refused: {self.reason}")
        for index, region in enumerate(self.regions):
            lines += _region_lines(index, region)
        return "\n".join(lines)


def explain(model: torch.nn.Module, *example_inputs: Any, **keywords: Any) -> Report:
    """Report what neo makes of `model`, without compiling anything.

    With inputs, the model is called with them under `torch.compile`; without, it is captured as for the runtime, which
    takes a Hugging Face causal language model. Compilation that the model or a part of it has of its own is left out.
    """
    model = getattr(model, "_orig_mod", model)
    name = type(model).__name__
    was_training = model.training
    with torch.no_grad(), uncompiled(model):
        if example_inputs or keywords:
            return Report(name, "torch.compile", tuple(_explain_call(model, example_inputs, keywords)))
        model.eval()
        try:
            return Report(name, "runtime capture", (_explain_capture(model),))
        except UnsupportedModelError as error:
            return Report(name, "runtime capture", reason=error.reason)
        finally:
            model.train(was_training)


def _explain_call(model: torch.nn.Module, args: Sequence[Any], keywords: dict[str, Any]) -> list[Region]:
    regions: list[Region] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        regions.append(_explain_graph(gm))
        forward: Callable[..., Any] = gm.forward
        return forward

    # At its limit of recompilations for this model's code Dynamo would run it eagerly, with nothing to see.
    with torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20):
        torch.compile(model, backend=backend)(*args, **keywords)
    return regions


def _explain_graph(gm: fx.GraphModule) -> Region:
    num_nodes = len(gm.graph.nodes)
    copied = fx.GraphModule(gm, fx.Graph())
    copied.graph.output(copied.graph.graph_copy(gm.graph, {}))
    canonicalize(copied)
    findings = find_attention(copied.graph)
    refusals = tuple(findings.refusals)
    if not findings.matches:
        return Region(num_nodes, refusals=refusals, reason=findings.why_none())
    replace_attention(copied, findings.matches)
    reasons = verify(copied.graph)
    if reasons:
        return Region(num_nodes, refusals=refusals, reason=reasons[0])
    return _region(num_nodes, copied, split_stages(copied), refusals)


def _explain_capture(model: torch.nn.Module) -> Region:
    traced = trace_model(model)
    num_nodes = len(traced.gm.graph.nodes)
    unpacked = why_unpacked(traced.gm, traced.example_inputs)
    pack_linears(traced.gm, traced.example_inputs)
    flatten_batch(traced.gm)
    region = _region(num_nodes, traced.gm, split_traced(traced), ())
    return replace(region, num_packed=num_packed(traced.gm.graph), unpacked=unpacked)


def _region(num_nodes: int, gm: fx.GraphModule, split: SplitGraph, refusals: tuple[Refusal, ...]) -> Region:
    return Region(
        num_nodes=num_nodes,
        sites=tuple(call.site for call in split.sites),
        modules=tuple(module_of(site) for site in find_sites(gm.graph)),
        stage_keys=tuple(share_stages(split)),
        num_operators=tuple(stage.num_operators for stage in split.stages),
        refusals=refusals,
    )


def _region_lines(index: int, region: Region) -> list[str]:
    lines = [f"  graph {index}: {region.num_nodes} nodes"]
    if region.reason:
        lines.append(f"    left whole: {region.reason}")
    if region.stage_keys:
        lines.append(
            f"    {_count(len(region.stage_keys), 'linear stage')}, {region.num_artifacts} to compile: "
            + _stage_kinds(region)
        )
    if region.num_packed:
        lines.append(f"    {_count(region.num_packed, 'matrix product')} with prepacked weights")
    lines += [f"    not packed: {_count(number, 'weight')}: {reason}" for reason, number in region.unpacked.items()]
    groups: dict[tuple[str, str], list[int]] = {}
    for site, module in zip(region.sites, region.modules, strict=True):
        groups.setdefault((_describe(site), re.sub(r"\b\d+\b", "*", module)), []).append(site.index)
    for (description, pattern), sites in groups.items():
        label = "sites" if len(sites) > 1 else "site"
        module = pattern if len(sites) > 1 else region.modules[sites[0]]
        lines.append(f"    {label} {_ranges(sites)}: {description}" + (f"  ({module})" if module else ""))
    lines += [f"    not a site: {refusal.node_name} {refusal.module}: {refusal.reason}" for refusal in region.refusals]
    return lines


def _stage_kinds(region: Region) -> str:
    counts = Counter(key for key in region.stage_keys if key is not None)
    operators = {key: region.num_operators[region.stage_keys.index(key)] for key in counts}
    return ", ".join(f"#{key} x{counts[key]} ({_count(operators[key], 'operator')})" for key in sorted(counts))


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending `numbers` as text, runs of three and more as 0-29."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _describe(site: AttentionSite) -> str:
    head_dim = f"head_dim {site.head_dim}"
    if site.v_head_dim != site.head_dim:
        head_dim += f" (values {site.v_head_dim})"
    parts = [
        f"{site.num_q_heads} query / {site.num_kv_heads} KV heads",
        head_dim,
        f"scale {site.scale:.4g}",
        f"window {site.window}" if site.window else "no window",
    ]
    if site.softcap is not None:
        parts.append(f"softcap {site.softcap:g}")
    if site.has_sinks:
        parts.append("sinks")
    return ", ".join([*parts, str(site.dtype).removeprefix("torch.")])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
