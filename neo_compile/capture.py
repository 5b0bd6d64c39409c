"""Captures a Hugging Face decoder for the runtime: tokens of any mixture of requests, one graph for every size.

The unit of execution is tokens: input_ids [1, T] holds prefill chunks and single decode tokens side by side. All but
attention is per token, and attention is handed to whoever runs the `StagedModel`. For the capture only, the model's
attention implementation is ours (see hf_attention), and no mask is ever built.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.source import LocalSource, TensorPropertySource

from neo_compile.config import STAGE_KINDS, PackedLinear, StageKind, check_choice
from neo_compile.errors import ConfigError, UnsupportedModelError
from neo_compile.fingerprint import fingerprint
from neo_compile.hf_attention import (
    SiteRecord,
    attention_for_recording,
    attention_for_tracing,
    chosen_attention,
    installed_attention,
)
from neo_compile.hf_checks import LogitsCall, check_model, complete_records
from neo_compile.passes.compile_stages import compile_in_background, compile_stages, share_stages
from neo_compile.passes.pack_linears import num_packed, pack_linears
from neo_compile.passes.per_token import mixing_operator
from neo_compile.passes.runner import GraphPass, run_passes
from neo_compile.passes.split_stages import SplitGraph, build_program, find_sites, flatten_batch, split_stages
from neo_compile.passes.verify import mutated_inputs, verify
from neo_compile.probe import check_against
from neo_compile.saved_capture import forget_capture, is_enabled, load_capture, save_capture
from neo_compile.staged import SizeInput, StagedModel
from neo_compile.uncompiled import uncompiled

logger = logging.getLogger(__name__)

_lock = threading.Lock()


def capture(
    model: torch.nn.Module,
    *,
    stages: StageKind = "inductor",
    packed_linear: PackedLinear = "auto",
    dtype: torch.dtype | None = None,
    num_threads: int | None = None,
) -> StagedModel:
    """Capture a Hugging Face causal language model as linear stages and attention sites.

    Args:
        stages: how linear stages run; "eager" needs no C++ compiler; "background" starts with eager ones and replaces
            each once Inductor has compiled it in another process (at once if an earlier process has).
        packed_linear: keep a second, prepacked copy of weights for the CPU's matrix kernels; "auto" where it pays.
        dtype: run a converted copy of the model in this dtype; None keeps the model's own.
        num_threads: threads that compiled stages use; None is torch's current number.

    Returns:
        A staged model with inputs input_ids and position_ids [1, T] and logit_rows [R] (all int64; the rows of T whose
        logits are wanted), and the result (logits [1, R, vocabulary],). It reads the model's parameters by reference.

    Raises:
        UnsupportedModelError: the model cannot be served exactly; `.reason` says why.
    """
    check_choice("stages", stages, STAGE_KINDS)
    check_choice("packed_linear", packed_linear, (True, False, "auto"))
    if dtype is not None and next(model.parameters()).dtype != dtype:
        model = copy.deepcopy(model).to(dtype)
    was_training = model.training
    model.eval()
    try:
        # The attention implementation is switched in the model's config, so captures exclude each other.
        with _lock, torch.no_grad(), uncompiled(model):
            key = None
            if stages != "eager" and is_enabled():
                key = fingerprint(
                    model, packed_linear=packed_linear, num_threads=num_threads or torch.get_num_threads()
                )
            staged = _restore(model, key) if key else None
            if staged is None:
                traced = trace_model(model)
                staged, split = _stage(traced, stages, packed_linear, num_threads)
                _probe(model, traced.call, staged)
                if stages == "background":
                    on_done = functools.partial(save_capture, key, model, staged) if key else None
                    compile_in_background(split, staged, num_threads=num_threads, on_done=on_done)
                elif key:
                    save_capture(key, model, staged)
    finally:
        model.train(was_training)
    return staged


def _restore(model: torch.nn.Module, key: str) -> StagedModel | None:
    """The capture that an earlier process saved, if it still computes what the model does."""
    call = check_model(model)
    staged = load_capture(key, model)
    if staged is None:
        return None
    try:
        _probe(model, call, staged)
    except UnsupportedModelError as error:
        logger.warning("a saved capture is wrong and the model is captured again: %s", error)
        forget_capture(key)
        return None
    return staged


@dataclass
class TracedModel:
    """A model's graph over tokens: one `neo::attention` per layer, inputs named."""

    gm: fx.GraphModule
    example_inputs: list[Any]
    named_inputs: list[str | SizeInput | None]
    records: list[SiteRecord]
    call: LogitsCall


def trace_model(model: torch.nn.Module) -> TracedModel:
    """The graph of `model` (in eval mode, without gradients), with all that is known to go wrong checked.

    Raises:
        UnsupportedModelError: `.reason` says why.
    """
    call = check_model(model)
    records: list[SiteRecord] = []
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 3, dtype=torch.int64, device=device)
    rows = torch.arange(3, device=device)
    # Parts that are compiled by themselves run as they are written; Dynamo will trace into them.
    with installed_attention(model, attention_for_recording(records)), torch.compiler.set_stance("force_eager"):
        try:
            call(tokens, rows[None], rows)
        except UnsupportedModelError:
            raise
        except Exception as error:
            name = type(model).__name__
            reason = f"{name} does not run with another attention function ({type(error).__name__}: {error})"
            raise UnsupportedModelError(reason) from error
    records = complete_records(model, records)
    with installed_attention(model, attention_for_tracing):
        gm, example_inputs = _trace(call, device)
    sites = find_sites(gm.graph)
    if len(sites) != len(records):
        raise UnsupportedModelError(
            f"{len(sites)} attention sites in the graph, but the model calls attention {len(records)} times"
        )
    for index, (site, record) in enumerate(zip(sites, records, strict=True)):
        site.update_arg(5, index)
        site.update_arg(8, record.window)
    gm.recompile()
    return TracedModel(gm, example_inputs, _name_inputs(model, gm, example_inputs), records, call)


class _TracedError(Exception):
    """Ends the traced call once the graph is there."""


def _trace(call: LogitsCall, device: torch.device) -> tuple[fx.GraphModule, list[Any]]:
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append((gm, list(example_inputs)))

        def stop(*_: Any) -> Any:
            raise _TracedError

        return stop

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        torch._check(input_ids.shape[1] == position_ids.shape[1])  # type: ignore[no-untyped-call]
        return call(input_ids, position_ids, logit_rows)

    # A code object of its own: what Dynamo caches for it dies with it, and captures share no recompile limit.
    function = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, None, forward.__closure__
    )
    tokens = torch.zeros(1, 5, dtype=torch.int64, device=device)
    positions = torch.arange(5, device=device)[None]
    rows = torch.arange(2, device=device)
    for tensor, dim in ((tokens, 1), (positions, 1), (rows, 0)):
        mark_unbacked(tensor, dim)
    compiled = torch.compile(function, backend=keep, fullgraph=True, dynamic=False)
    try:
        # Floats stay constants of the graph, also for the second model of a process.
        with torch._dynamo.config.patch(specialize_float=True, automatic_dynamic_shapes=False):
            compiled(tokens, positions, rows)
    except _TracedError:
        pass
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModelError(f"torch.compile cannot capture the model in one graph: {reason}") from error
    (graph,) = found
    return graph


def _name_inputs(
    model: torch.nn.Module, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> list[str | SizeInput | None]:
    """For each placeholder: an input's name, a size of one, or None for a parameter or buffer of the model."""
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


def _stage(
    traced: TracedModel, stages: StageKind, packed_linear: PackedLinear, num_threads: int | None
) -> tuple[StagedModel, SplitGraph]:
    passes: list[GraphPass] = [pack_linears, flatten_batch] if packed_linear is not False else [flatten_batch]
    gm = run_passes(traced.gm, traced.example_inputs, passes)
    if packed_linear is True and not num_packed(gm.graph):
        raise ConfigError("packed_linear=True, but oneDNN can pack no linear of this model; use 'auto' or False")
    split = split_traced(traced)
    keys = share_stages(split)
    bound = {
        register: value
        for register, name, value in zip(split.inputs, traced.named_inputs, traced.example_inputs, strict=True)
        if name is None and register is not None
    }
    _check_stages(split, keys, bound)
    artifacts = compile_stages(split, keys, stages=stages, num_threads=num_threads)
    program = build_program(split, artifacts, bound)
    return StagedModel(program, stage_keys=keys, named_inputs=traced.named_inputs), split


def split_traced(traced: TracedModel) -> SplitGraph:
    """The stages of a traced model.

    Raises:
        UnsupportedModelError: the graph cannot be cut.
    """
    reasons = verify(traced.gm.graph, num_sites=len(traced.records))
    if reasons:
        raise UnsupportedModelError(reasons[0])
    return split_stages(traced.gm)


def _check_stages(split: SplitGraph, keys: Sequence[int | None], bound: Mapping[int, Any]) -> None:
    """Two sub-batches of tokens run the same stages: neither may see what the other does."""
    values = {**split.constants, **bound}
    for call in split.derived:
        values[call.output] = call.function([values[register] for register in call.inputs])
    seen: set[int | None] = {None}
    for index, (stage, key) in enumerate(zip(split.stages, keys, strict=True)):
        if key in seen:
            continue
        seen.add(key)
        mutated = mutated_inputs(stage.graph_module, stage.example_inputs())
        if mutated:
            raise UnsupportedModelError(f"linear stage {index} changes {len(mutated)} of its inputs in place")
        mixing = mixing_operator(stage, values)
        if mixing:
            raise UnsupportedModelError(f"linear stage {index} mixes tokens outside attention: {mixing}")


def _probe(model: torch.nn.Module, call: LogitsCall, staged: StagedModel) -> None:
    parameter = next(model.parameters())

    def reference(input_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        with torch.compiler.set_stance("force_eager"):
            return call(input_ids, positions[None], positions)

    # Some versions of transformers leave softcap or sinks out when they run another implementation.
    needs_eager = any(site.softcap is not None or site.has_sinks for site in staged.sites)
    windows = [site.window for site in staged.sites if site.window is not None and site.window < 64]
    with chosen_attention(model, "eager") if needs_eager else nullcontext():
        error = check_against(
            staged,
            reference,
            vocab_size=model.get_input_embeddings().weight.shape[0],  # type: ignore[operator]
            dtype=parameter.dtype,
            device=parameter.device,
            lengths=(5, 8 + max(windows, default=0)),
        )
    logger.info("captured %d attention sites; logits within %.1e of the model's own", len(staged.sites), error)
