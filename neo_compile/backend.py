"""`torch.compile(model, backend="neo")`: the entry point of the torch_dynamo_backends group.

Dynamo hands over a graph; attention is found, the graph is cut there, and the linear stages are compiled. Called
plainly the result computes exactly what the model computed, with any cache object, because each site falls back to the
attention of the original graph unless a forward batch is active.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from neo_compile import compiled_generate
from neo_compile.config import CompileOptions, check_mode
from neo_compile.passes.canonicalize import canonicalize
from neo_compile.passes.compile_stages import compile_in_background, compile_stages, share_stages
from neo_compile.passes.find_attention import Findings, find_attention
from neo_compile.passes.pack_linears import num_packed, pack_linears
from neo_compile.passes.replace_attention import replace_attention
from neo_compile.passes.runner import run_passes
from neo_compile.passes.split_stages import build_program, split_stages
from neo_compile.passes.verify import verify
from neo_compile.staged import StagedModel

compiled_generate.install()

logger = logging.getLogger(__name__)


# Not decorated with register_backend: the entry point registers it, and a second registration is an error.
def neo(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph.

    Args:
        options: see `CompileOptions`.

    Raises:
        ConfigError: an unknown option, or a bad value; the message lists the valid ones.
    """
    check_mode(mode)
    checked = CompileOptions.from_mapping(options)
    if _needs_gradient(example_inputs):
        return _compile_whole(gm, example_inputs, mode, checked, "gradients are needed (call it under torch.no_grad())")
    findings = Findings()
    gm = run_passes(gm, example_inputs, _passes(findings, checked), dump_graphs=checked.dump_graphs)
    reasons = [findings.why_none()] if not findings.matches else verify(gm.graph)
    if reasons:
        return _compile_whole(gm, example_inputs, mode, checked, reasons[0])
    if checked.packed_linear is True and not num_packed(gm.graph):
        warnings.warn("packed_linear=True, but oneDNN can pack no linear of this graph", UserWarning, stacklevel=2)
    if mode not in (None, "default"):
        logger.info("mode=%r has no effect on linear stages: they run as stages=%r", mode, checked.stages)
    split = split_stages(gm)
    keys = share_stages(split)
    artifacts = compile_stages(split, keys, stages=checked.stages)
    staged = StagedModel(build_program(split, artifacts, {}), stage_keys=keys)
    if checked.stages == "background":
        compile_in_background(split, staged)
    return staged


def _passes(findings: Findings, options: CompileOptions) -> list[Callable[..., fx.GraphModule]]:
    def rewrite_attention(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        found = find_attention(gm.graph)
        findings.matches, findings.refusals = found.matches, found.refusals
        return replace_attention(gm, found.matches)

    passes: list[Callable[..., fx.GraphModule]] = [canonicalize, rewrite_attention]
    if options.packed_linear is True:
        passes.append(functools.partial(pack_linears, merge=True))
    return passes


def _needs_gradient(example_inputs: Sequence[Any]) -> bool:
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _compile_whole(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None, options: CompileOptions, reason: str
) -> Callable[..., Any]:
    """The graph as torch.compile's default backend would run it."""
    warnings.warn(f"neo leaves a graph whole: {reason}", UserWarning, stacklevel=2)
    if options.stages == "eager":
        forward: Callable[..., Any] = gm.forward
        return forward
    from torch._inductor.compile_fx import compile_fx

    patches = torch._inductor.list_mode_options(mode) if mode else {}
    compiled = compile_fx(gm, list(example_inputs), config_patches=patches)
    assert callable(compiled), f"Inductor returned {type(compiled).__name__}"
    return compiled
