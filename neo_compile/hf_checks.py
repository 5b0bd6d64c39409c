"""What must hold for a Hugging Face model before it may be captured for the runtime, and how its logits are asked for.

Each check names a way in which a model has been seen to go silently wrong.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from neo_compile.errors import UnsupportedModelError
from neo_compile.hf_attention import SiteRecord

# (input_ids [1, T], position_ids [1, T], logit_rows [R]) -> logits [1, R, V]
LogitsCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Their frequencies depend on the length of the sequence, not on the token's position alone.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_model(model: torch.nn.Module) -> LogitsCall:
    """How to ask `model` for logits, once everything that can be checked without running it holds.

    Raises:
        UnsupportedModelError: `.reason` says why.
    """
    name = type(model).__name__
    try:
        from transformers import PreTrainedModel
    except ImportError as error:  # pragma: no cover
        raise UnsupportedModelError("transformers is not installed") from error
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{name} is not a Hugging Face PreTrainedModel")
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder")
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise UnsupportedModelError(f"{name} has layers of type {', '.join(sorted(unknown))}")
    for module_name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in _LENGTH_DEPENDENT_ROPE:
                raise UnsupportedModelError(
                    f"{module_name} rotates by {kind!r}, which depends on the sequence's length"
                )
    return _logits_call(model)


def complete_records(model: Any, records: Sequence[SiteRecord]) -> list[SiteRecord]:
    """`records` with windows filled from the config where the model does not hand them over.

    Raises:
        UnsupportedModelError: layers without attention, or in another order.
    """
    config = model.config.get_text_config(decoder=True)
    num_layers = config.num_hidden_layers
    if len(records) != num_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} layers but {len(records)} attention sites: "
            "the other layers keep state that is not a KV cache"
        )
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    completed = []
    for index, record in enumerate(records):
        if record.layer_index is not None and record.layer_index != index:
            raise UnsupportedModelError(f"attention site {index} belongs to layer {record.layer_index}")
        if layer_types and not record.has_window_keyword and layer_types[index] == "sliding_attention":
            if window is None:
                raise UnsupportedModelError(f"layer {index} is a sliding-window layer without a window")
            record = dataclasses.replace(record, window=int(window))
        completed.append(record)
    return completed


def _logits_call(model: Any) -> LogitsCall:
    parameters = inspect.signature(model.forward).parameters
    takes_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward takes no position_ids: its positions come from its mask"
        )
    keeps_logits = "logits_to_keep" in parameters
    fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters or takes_keywords else {}

    def call(input_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        if keeps_logits:
            outputs = model(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logit_rows, **fixed)
            logits: torch.Tensor = outputs.logits
            return logits
        logits = model(input_ids=input_ids, position_ids=position_ids, **fixed).logits
        return logits[:, logit_rows]

    return call
