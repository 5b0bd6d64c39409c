"""The attention functions that a Hugging Face model calls while it is captured.

`AttentionInterface` hands over what a mask would otherwise encode: scale, window, softcap and sinks arrive as keywords.
The model runs once eagerly with a recording function, which sees those keywords, the masks (see hf_masks) and the
calling module, and is then traced with a function that leaves one `neo::attention` per layer, and without any mask.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from neo_compile.errors import UnsupportedModelError
from neo_compile.hf_masks import MaskRecorder

IMPLEMENTATION = "neo"

# Keywords that do not change what attention computes once there is no mask and no cache.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "is_causal",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "training",
        "use_cache",
    }
)


@dataclass(frozen=True)
class SiteRecord:
    """What one call of the attention interface was given."""

    layer_index: int | None
    window: int | None


def attention_for_tracing(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One `neo::attention` from [B, H, S, D] q, k, v, made token-major and contiguous before the cut."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    out = torch.ops.neo.attention(q, k, v, None, s_aux, -1, scale, True, sliding_window, softcap)
    return out, None


def attention_for_recording(records: list[SiteRecord], masks: MaskRecorder) -> Callable[..., tuple[torch.Tensor, None]]:
    """An attention function that appends what it is given to `records`, and computes attention.

    The window is that of the mask: not every model hands it over as a keyword, and without a mask (in transformers' own
    implementations) the keyword alone has no effect.

    It raises UnsupportedModelError for anything that `neo::attention` has no argument for.
    """

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        name = type(module).__name__
        is_known, window = masks.recall(attention_mask)
        if not is_known:
            raise UnsupportedModelError(f"{name} hands its attention a mask that it builds itself")
        if attention_mask is None and sliding_window is not None:
            raise UnsupportedModelError(f"{name} has a window of {sliding_window} tokens and builds no mask for it")
        if keywords.get("is_causal", True) is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{name} is not causal")
        for keyword, argument in keywords.items():
            if keyword not in _HARMLESS and argument is not None and argument is not False:
                raise UnsupportedModelError(f"{name} gives its attention an unknown keyword {keyword!r}")
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModelError(f"{name} attends to {key.shape[2]} keys with {query.shape[2]} tokens given")
        records.append(SiteRecord(layer_index=getattr(module, "layer_idx", None), window=window))
        return attention_for_tracing(module, query, key, value, None, scaling, window, softcap, s_aux)

    return attention


@contextmanager
def installed_attention(
    model: torch.nn.Module, function: Callable[..., tuple[torch.Tensor, None]], masks: MaskRecorder | None = None
) -> Generator[None, None, None]:
    """While active, `model` computes attention by `function`, and builds its masks by `masks`, or none at all.

    Other models are not touched.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    with (
        chosen_attention(model, IMPLEMENTATION),
        _registered(AttentionInterface._global_mapping, function),
        _registered(AttentionMaskInterface._global_mapping, masks),
    ):
        yield


@contextmanager
def _registered(mapping: dict[str, Any], function: Any) -> Generator[None, None, None]:
    """While active, `mapping` has `function` under our name, or nothing if it is None."""
    previous = mapping.pop(IMPLEMENTATION, None)
    if function is not None:
        mapping[IMPLEMENTATION] = function
    try:
        yield
    finally:
        mapping.pop(IMPLEMENTATION, None)
        if previous is not None:
            mapping[IMPLEMENTATION] = previous


@contextmanager
def chosen_attention(model: torch.nn.Module, implementation: str) -> Generator[None, None, None]:
    """While active, `model` uses the attention implementation of this name."""
    configs = _configs(model)
    saved = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        for config, previous in zip(configs, saved, strict=True):
            config._attn_implementation_internal = previous


def _configs(model: torch.nn.Module) -> list[Any]:
    """Every config that a module of `model` reads its attention implementation from."""
    from transformers import PretrainedConfig

    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
            found.update({id(part): part for part in (config, *parts) if isinstance(part, PretrainedConfig)})
    return list(found.values())
