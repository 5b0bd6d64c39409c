"""The second way to capture a Hugging Face model: by its own attention, where it takes no other (Falcon).

The model is traced with a mask given as an input, in the form that it adds to its scores. Its attention is found in the
graph, and becomes a site if its mask is that input and nothing else:

    sdpa(q, k, v, attn_mask=attention_mask)      ->      neo.attention(q, k, v, causal)

Whatever biases the scores (ALiBi), narrows the mask, or is not recognised leaves other readers of the input, or fewer
sites than layers, and is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from neo_compile.errors import UnsupportedModelError
from neo_compile.hf_attention import chosen_attention
from neo_compile.hf_checks import LogitsCall
from neo_compile.passes.canonicalize import canonicalize
from neo_compile.passes.find_attention import AttentionMatch, Findings, find_attention
from neo_compile.passes.replace_attention import replace_attention
from neo_compile.passes.split_stages import find_sites
from neo_compile.staged import SizeInput
from neo_compile.tracing import TracedModel, name_inputs, trace_tokens

_MASK = "attention_mask"


def trace_stock(model: Any, call: LogitsCall, windows: Sequence[int | None]) -> TracedModel:
    """The graph of `model` with a site for each layer's own attention.

    Args:
        windows: of the masks that the model builds by itself.

    Raises:
        UnsupportedModelError: `.reason` says why.
    """
    name = type(model).__name__
    if any(window is not None for window in windows):
        raise UnsupportedModelError(f"{name} has windows, and computes attention in a way of its own")
    implementation = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    with chosen_attention(model, implementation):
        gm, example_inputs = trace_tokens(call, next(model.parameters()).device, has_mask=True)
    named_inputs = name_inputs(model, gm, example_inputs)
    mask = _placeholder(gm.graph, named_inputs, _MASK)
    canonicalize(gm)
    findings = find_attention(gm.graph)
    _check_findings(name, model.config.get_text_config(decoder=True).num_hidden_layers, findings, mask)
    replace_attention(gm, [_made_causal(match) for match in findings.matches])
    _drop_input(gm.graph, mask, named_inputs, example_inputs)
    _make_contiguous(gm)
    return TracedModel(gm, example_inputs, named_inputs, len(findings.matches), call)


def _check_findings(name: str, num_layers: int, findings: Findings, mask: fx.Node | None) -> None:
    if len(findings.matches) != num_layers:
        first = f" ({findings.why_none()})" if findings.refusals else ""
        raise UnsupportedModelError(
            f"{name} computes attention in a way of its own, which was recognised in {len(findings.matches)} of "
            f"{num_layers} layers{first}"
        )
    for match in findings.matches:
        if [own.node for own in match.masks] != [mask] or match.is_causal or match.sinks is not None:
            raise UnsupportedModelError(f"{name} changes the mask that it is given (in {match.module or match.node})")


def _made_causal(match: AttentionMatch) -> AttentionMatch:
    return dataclasses.replace(match, masks=(), is_causal=True)


def _placeholder(graph: fx.Graph, named_inputs: Sequence[Any], name: str) -> fx.Node | None:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return next((node for node, own in zip(placeholders, named_inputs, strict=True) if own == name), None)


def _drop_input(
    graph: fx.Graph,
    mask: fx.Node | None,
    named_inputs: list[str | SizeInput | None],
    example_inputs: list[Any],
) -> None:
    """Remove the mask from the inputs; where the graph reads its sizes, it reads the number of tokens."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for index in reversed(range(len(placeholders))):
        source = named_inputs[index]
        if isinstance(source, SizeInput) and source.name == _MASK:
            named_inputs[index] = SizeInput("input_ids", 1)
        elif placeholders[index] is mask:
            for user in mask.users:
                raise UnsupportedModelError(f"the model's forward uses its mask outside attention, in {user.name}")
            graph.erase_node(mask)
            del named_inputs[index], example_inputs[index]


def _make_contiguous(gm: fx.GraphModule) -> None:
    """q, k, v contiguous before the cut, as the handlers of sites want them."""
    for site in find_sites(gm.graph):
        for index in range(3):
            tensor = site.args[index]
            assert isinstance(tensor, fx.Node)
            with gm.graph.inserting_before(site):
                contiguous = gm.graph.call_method("contiguous", (tensor,))
            contiguous.meta["example_value"] = tensor.meta["example_value"].contiguous()
            site.update_arg(index, contiguous)
    gm.recompile()
