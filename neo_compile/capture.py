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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from neo_compile.checks import check_choice
from neo_compile.config import STAGE_KINDS, PackedLinear, StageKind
from neo_compile.errors import ConfigError, UnsupportedModelError
from neo_compile.fingerprint import fingerprint
from neo_compile.hf_attention import (
    SiteRecord,
    attention_for_recording,
    attention_for_tracing,
    chosen_attention,
    installed_attention,
)
from neo_compile.hf_checks import LogitsCall, check_model, check_records
from neo_compile.hf_masks import MaskRecorder
from neo_compile.hf_stock import trace_stock
from neo_compile.passes.compile_stages import compile_in_background, compile_stages, share_stages
from neo_compile.passes.pack_linears import num_packed, pack_linears
from neo_compile.passes.per_token import mixing_operator
from neo_compile.passes.runner import GraphPass, run_passes
from neo_compile.passes.split_stages import SplitGraph, build_program, find_sites, flatten_batch, split_stages
from neo_compile.passes.verify import mutated_inputs, verify
from neo_compile.probe import check_against
from neo_compile.saved_capture import forget_capture, is_enabled, load_capture, save_capture
from neo_compile.staged import StagedModel
from neo_compile.tracing import TracedModel, name_inputs, trace_tokens
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


def trace_model(model: torch.nn.Module) -> TracedModel:
    """The graph of `model` (in eval mode, without gradients), with all that is known to go wrong checked.

    Raises:
        UnsupportedModelError: `.reason` says why.
    """
    call = check_model(model)
    device = next(model.parameters()).device
    records, masks = _record_attention(model, call, device)
    if not records:
        return trace_stock(model, call, masks.windows)
    check_records(model, records)
    with installed_attention(model, attention_for_tracing):
        gm, example_inputs = trace_tokens(call, device)
    sites = find_sites(gm.graph)
    if len(sites) != len(records):
        raise UnsupportedModelError(
            f"{len(sites)} attention sites in the graph, but the model calls attention {len(records)} times"
        )
    for index, (site, record) in enumerate(zip(sites, records, strict=True)):
        site.update_arg(5, index)
        site.update_arg(8, record.window)
    gm.recompile()
    return TracedModel(gm, example_inputs, name_inputs(model, gm, example_inputs), len(records), call)


def _record_attention(
    model: torch.nn.Module, call: LogitsCall, device: torch.device
) -> tuple[list[SiteRecord], MaskRecorder]:
    """What the model asks of attention when it runs on three tokens; nothing if its attention cannot be switched."""
    records: list[SiteRecord] = []
    masks = MaskRecorder()
    tokens = torch.zeros(1, 3, dtype=torch.int64, device=device)
    rows = torch.arange(3, device=device)
    name = type(model).__name__
    # Parts that are compiled by themselves run as they are written; Dynamo will trace into them.
    with (
        installed_attention(model, attention_for_recording(records, masks), masks),
        torch.compiler.set_stance("force_eager"),
    ):
        try:
            call(tokens, rows[None], rows)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{name}: {error.reason}") from error
        except Exception as error:
            reason = f"{name} does not run with another attention function ({type(error).__name__}: {error})"
            raise UnsupportedModelError(reason) from error
    return records, masks


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
    reasons = verify(traced.gm.graph, num_sites=traced.num_sites)
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
