"""What must hold for a Hugging Face model before it may be captured for the runtime, and how its logits are asked for.

Each check names a way in which a model has been seen to go silently wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from neo_compile.errors import UnsupportedModelError
from neo_compile.hf_attention import SiteRecord


class LogitsCall(Protocol):
    """Asks a model for logits."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [1, R, V] of input_ids and position_ids [1, T] at logit_rows [R]; causal if there is no mask."""


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
    layer_types = getattr(config, "layer_types", None)
    unknown = set(layer_types or ()) - _LAYER_TYPES
    if unknown:
        raise UnsupportedModelError(f"{name} has layers of type {', '.join(sorted(unknown))}")
    if not layer_types and getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} keeps recurrent state, not a KV cache")
    if _adds_alibi(model, config):
        raise UnsupportedModelError(f"{name} adds ALiBi biases to its attention scores")
    for module_name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in _LENGTH_DEPENDENT_ROPE:
                raise UnsupportedModelError(
                    f"{module_name} rotates by {kind!r}, which depends on the sequence's length"
                )
    return _logits_call(model)


def _adds_alibi(model: torch.nn.Module, config: Any) -> bool:
    """Falcon's config says so, MPT's in a part of it, Bloom's not at all."""
    is_configured = getattr(config, "alibi", getattr(getattr(config, "attn_config", None), "alibi", False))
    return bool(is_configured) or any(hasattr(module, "build_alibi_tensor") for module in model.modules())


def check_records(model: Any, records: Sequence[SiteRecord]) -> None:
    """Whether every layer of `model` calls attention once, in order.

    Raises:
        UnsupportedModelError: it does not.
    """
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(records) != num_layers:
        why = (
            "some layers call it more than once"
            if len(records) > num_layers
            else "the other layers keep state that is not a KV cache"
        )
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} layers but {len(records)} attention sites: {why}"
        )
    for index, record in enumerate(records):
        if record.layer_index is not None and record.layer_index != index:
            raise UnsupportedModelError(f"attention site {index} belongs to layer {record.layer_index}")


def _logits_call(model: Any) -> LogitsCall:
    parameters = inspect.signature(model.forward).parameters
    takes_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward takes no position_ids: its positions come from its mask"
        )
    keeps_logits = "logits_to_keep" in parameters
    fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters or takes_keywords else {}

    def call(
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        options = dict(fixed)
        if attention_mask is not None:
            options["attention_mask"] = attention_mask
        if keeps_logits:
            outputs = model(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logit_rows, **options)
            logits: torch.Tensor = outputs.logits
            return logits
        logits = model(input_ids=input_ids, position_ids=position_ids, **options).logits
        return logits[:, logit_rows]

    return call
