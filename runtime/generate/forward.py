"""One served forward: from the caller's arguments and cache to the model's own output class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from neo_compile.attention import AttentionSite
from neo_compile.errors import ConfigError, UnsupportedModelError
from neo_compile.runtime.generate.calls import CACHE_NAMES, CannotServeError, ForwardCall
from neo_compile.runtime.generate.rows import Bools, PagedRows
from neo_compile.runtime.generate.serving import Int64s, Serving, TokenBlock
from neo_compile.runtime.generate.views import PagedCache, dense_layers, name_cache, paged_cache_of, valid_columns


@dataclass(frozen=True)
class OutputForm:
    """What the model's own forward returns.

    Attributes:
        output_class: a `ModelOutput`.
        cache_name: its field that holds the cache.
        layer_shapes: [heads, dim] of K and of V that its cache keeps, per layer.
        make_cache: an empty cache as the model makes it.
    """

    output_class: type[Any]
    cache_name: str
    layer_shapes: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    text_config: Any

    @classmethod
    def of(cls, model: Any) -> OutputForm:
        """Found by a call with two tokens.

        Raises:
            UnsupportedModelError: a model that returns more than logits and a cache, or keeps no `DynamicCache`.
        """
        text_config = model.config.get_text_config(decoder=True)
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=next(model.parameters()).device)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                # Not `model(...)`, which may be compiled, or have hooks that count its calls.
                outputs = model.forward(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=True)
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run on input_ids alone ({type(error).__name__}: {error})"
            ) from error
        finally:
            model.train(was_training)
        fields = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
        cache_name = next((name for name in CACHE_NAMES if name in fields), None)
        others = [name for name, value in fields.items() if value is not None and name not in ("logits", cache_name)]
        if cache_name is None or others:
            raise UnsupportedModelError(
                f"{type(model).__name__} returns {', '.join(others) or 'no cache'} with its logits"
            )
        layers = getattr(fields[cache_name], "layers", None)
        if type(fields[cache_name]) is not DynamicCache or not layers:
            raise UnsupportedModelError(f"{type(model).__name__} keeps a {type(fields[cache_name]).__name__}")
        if dense_layers(fields[cache_name], len(layers)) is None:
            kinds = sorted({type(layer).__name__ for layer in layers})
            raise UnsupportedModelError(f"{type(model).__name__} keeps cache layers of type {', '.join(kinds)}")
        shapes = tuple((_heads_and_dim(layer.keys), _heads_and_dim(layer.values)) for layer in layers)
        return cls(type(outputs), cache_name, shapes, text_config)

    def check(self, sites: Sequence[AttentionSite]) -> None:
        """Raises UnsupportedModelError unless attention reads what the cache keeps (it may keep latents)."""
        wanted = tuple(((site.num_kv_heads, site.head_dim), (site.num_kv_heads, site.v_head_dim)) for site in sites)
        if wanted != self.layer_shapes:
            raise UnsupportedModelError(
                f"its cache keeps {self.layer_shapes[0]} per token and layer, while attention reads {wanted[0]}"
            )

    def new_cache(self) -> DynamicCache:
        """An empty cache, as `generate` makes it."""
        return DynamicCache(config=self.text_config)

    def outputs(self, logits: torch.Tensor, cache: DynamicCache | None) -> Any:
        """The model's output."""
        return self.output_class(**{"logits": logits, self.cache_name: cache})


def serve_forward(serving: Serving, form: OutputForm, call: ForwardCall) -> Any:
    """Run one forward; the cache grows by its tokens.

    Raises:
        CannotServeError: the call or its cache is not served; nothing has changed.
        CapacityError: the rows do not fit; nothing has changed.
    """
    paged = paged_cache_of(call.cache)
    if paged is not None and (paged.memory is not serving.memory or not _keeps_mask(paged.rows, call.mask)):
        paged.densify()
        paged = None
    if paged is not None:
        block = _token_block(serving, call, paged.rows.valid, paged.rows)
        return form.outputs(serving.run(paged.rows, block), call.cache)
    cache = call.cache if call.cache is not None or not call.use_cache else form.new_cache()
    rows = PagedRows(serving.blocks, len(call.token_ids))
    try:
        layers = _adopt(serving, form, call, cache, rows)
        logits = serving.run(rows, _token_block(serving, call, rows.valid, rows))
    except BaseException:
        rows.clear()
        raise
    if cache is None:
        rows.clear()
        return form.outputs(logits, None)
    paged = PagedCache(rows, serving.memory, layers, serving.stats)
    paged.num_lost_columns = _num_lost_columns(layers)
    paged.attach(cache)
    return form.outputs(logits, cache)


def _adopt(serving: Serving, form: OutputForm, call: ForwardCall, cache: Any, rows: PagedRows) -> Any:
    """Copy what a dense cache holds into `rows`; the cache's layers."""
    if cache is None:
        return []
    layers = dense_layers(cache, len(form.layer_shapes))
    if layers is None:
        raise CannotServeError(name_cache(cache))
    num_columns = int(cache.get_seq_length())
    if not num_columns:
        return layers
    if any(not layer.is_initialized or len(layer.keys) != rows.num_rows for layer in layers):
        raise CannotServeError("a cache of another batch size")
    if any(layer.keys.dtype != serving.memory_dtype or layer.keys.device.type != "cpu" for layer in layers):
        raise CannotServeError("a cache of another dtype or device than the model's")
    _check_mask(call, num_columns)
    valid = valid_columns(call.mask, rows.num_rows, num_columns)
    serving.store(rows, [(layer.keys, layer.values) for layer in layers], valid)
    serving.stats.num_adopted += 1
    return layers


def _num_lost_columns(layers: Sequence[Any]) -> int:
    """Columns that a dense cache's sliding layers had dropped before it was copied."""
    return max(
        (int(layer.get_seq_length()) - layer.keys.shape[2] for layer in layers if layer.is_initialized), default=0
    )


def _keeps_mask(rows: PagedRows, mask: Bools | None) -> bool:
    """Whether a call's mask says of the stored columns what the earlier calls' did.

    Raises:
        ConfigError: it shows columns that were padding, whose KV was not kept.
    """
    valid = rows.valid
    if mask is None:
        shown = np.ones_like(valid)
    elif mask.shape[0] == rows.num_rows and mask.shape[1] >= rows.num_columns:
        shown = mask[:, : rows.num_columns]
    else:
        return True  # `_check_mask` refuses it
    if np.array_equal(shown, valid):
        return True
    num_unknown = int((shown & ~valid).sum())
    if num_unknown:
        raise ConfigError(
            f"the attention_mask shows {num_unknown} cached columns that were padding in an earlier call, whose KV is "
            "not kept: pass the mask of all columns so far, or disable the model for this generation"
        )
    return False


def _check_mask(call: ForwardCall, num_columns: int) -> None:
    if call.mask is not None and call.mask.shape[1] != num_columns + call.token_ids.shape[1]:
        raise CannotServeError("an attention_mask that does not cover exactly the cache and the input")


def _token_block(serving: Serving, call: ForwardCall, past: Bools, rows: PagedRows) -> TokenBlock:
    """The call's new tokens, with every reason checked why they could not be served."""
    token_ids = call.token_ids
    if rows.num_rows != len(token_ids):
        raise CannotServeError("a cache of another batch size")
    if token_ids.max() >= serving.vocab_size or token_ids.min() < 0:
        raise CannotServeError("token ids outside the vocabulary")
    num_past = past.shape[1]
    _check_mask(call, num_past)
    valid = None if call.mask is None else call.mask[:, num_past:]
    if valid is not None and valid.all():
        valid = None
    if valid is not None:
        _check_padding(valid, past, call.wanted)
    if serving.shortest_window is not None and call.mask is not None and call.mask.shape[1] > serving.shortest_window:
        _check_holes(call.mask)
    return TokenBlock(token_ids, _positions(call, past, rows, valid), valid, call.wanted)


def _check_padding(valid: Bools, past: Bools, wanted: Int64s) -> None:
    if not valid.any():
        raise CannotServeError("an input of nothing but padding")
    # Padding before a row's first token predicts nothing; after it, the model would predict from the tokens so far.
    has_begun = past.any(axis=1, keepdims=True) | np.logical_or.accumulate(valid, axis=1)
    if (has_begun & ~valid)[:, wanted].any():
        raise CannotServeError("padding after a prompt whose logits are wanted")


def _check_holes(mask: Bools) -> None:
    """A window counts padding in the middle of a row, here it is not there."""
    starts = mask[:, :1].sum(axis=1) + (mask[:, 1:] & ~mask[:, :-1]).sum(axis=1)
    if (starts > 1).any():
        raise CannotServeError("padding between tokens, and sliding windows")


def _positions(call: ForwardCall, past: Bools, rows: PagedRows, valid: Bools | None) -> Int64s | None:
    """int64 [B, S], or None where each token's position is its place in its row."""
    num_rows, num_columns = call.token_ids.shape
    is_padded = valid is not None or bool((rows.lengths != past.shape[1]).any())
    if call.positions is not None:
        is_packed = call.mask is None and num_columns > 1 and (np.diff(call.positions, axis=1) != 1).any()
        if is_packed:
            raise CannotServeError("position_ids of packed sequences")
        return np.broadcast_to(call.positions, (num_rows, num_columns))
    if is_padded:
        raise CannotServeError("padding without position_ids")
    return None


def _heads_and_dim(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[1], tensor.shape[3]
