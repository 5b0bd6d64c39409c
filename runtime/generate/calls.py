"""Reads what a forward was called with, and says in words what cannot be served."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from neo_compile.runtime.generate.rows import Bools
from neo_compile.runtime.generate.views import is_served, name_cache

# Arguments that change nothing where they are None or False, and are refused otherwise.
_READ = frozenset(
    {"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", "cache_position"}
)
# `generate` hands these down to every forward (for stop strings and assistants), and no model reads them.
_IGNORED = frozenset({"tokenizer", "assistant_tokenizer"})
CACHE_NAMES = ("cache", "past_key_values")


class CannotServeError(Exception):
    """This forward runs as it would without neo; `reason` is what `stats().fallbacks` counts it under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """The arguments of one forward, checked as far as they can be without the cache.

    Attributes:
        token_ids: int64 [B, S].
        mask: bool [B, columns], or None.
        positions: int64 [1 or B, S], or None.
        wanted: int64 [K], columns of S whose logits are wanted.
        cache: the caller's, or None.
    """

    token_ids: NDArray[np.int64]
    mask: Bools | None
    positions: NDArray[np.int64] | None
    wanted: NDArray[np.int64]
    cache: Any
    use_cache: bool
    return_dict: bool


class CallReader:
    """Reads the calls of one model.

    Args:
        forward: the model's own, whose signature tells the names of positional arguments.
    """

    def __init__(self, model: Any, forward: Callable[..., Any]) -> None:
        self._config = model.config
        self._names = tuple(inspect.signature(forward).parameters)
        self.keeps_logits = "logits_to_keep" in self._names

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ForwardCall:
        """The call in numbers.

        Raises:
            CannotServeError: an argument that is not served.
        """
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        cache = next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)
        if cache is not None and not is_served(cache):
            raise CannotServeError(name_cache(cache))
        for name, value in arguments.items():
            if name in _READ or name in _IGNORED or name in CACHE_NAMES:
                continue
            if value is not None and value is not False:
                raise CannotServeError(f"the argument {name}")
        config = self._config
        for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
            if arguments.get(name) is None and getattr(config, name, False):
                raise CannotServeError(f"config.{name}")
        token_ids = self._token_ids(arguments.get("input_ids"))
        use_cache, return_dict = arguments.get("use_cache"), arguments.get("return_dict")
        return ForwardCall(
            token_ids=token_ids,
            mask=_mask(arguments.get("attention_mask"), len(token_ids)),
            positions=_positions(arguments.get("position_ids"), token_ids.shape),
            wanted=_wanted(arguments.get("logits_to_keep", 0), token_ids.shape[1]),
            cache=cache,
            use_cache=bool(getattr(config, "use_cache", True) if use_cache is None else use_cache),
            return_dict=bool(getattr(config, "return_dict", True) if return_dict is None else return_dict),
        )

    def _token_ids(self, input_ids: Any) -> NDArray[np.int64]:
        if not isinstance(input_ids, torch.Tensor):
            raise CannotServeError("no input_ids")
        if input_ids.dim() != 2 or input_ids.dtype != torch.int64 or not input_ids.numel():
            raise CannotServeError("input_ids that are not int64 [rows, columns]")
        return _numpy(input_ids, "input_ids")


def _mask(mask: Any, num_rows: int) -> Bools | None:
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise CannotServeError("an attention_mask that is not [rows, columns]")
    array = _numpy(mask, "attention_mask")
    if len(array) != num_rows:
        raise CannotServeError("an attention_mask of another batch size")
    return array if array.dtype == np.bool_ else array != 0


def _positions(position_ids: Any, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
    if position_ids is None:
        return None
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2 or position_ids.dtype != torch.int64:
        raise CannotServeError("position_ids that are not int64 [rows, columns]")
    array = _numpy(position_ids, "position_ids")
    if array.shape not in (shape, (1, shape[1])):
        raise CannotServeError("position_ids of another shape than input_ids")
    return array


def _wanted(logits_to_keep: Any, num_columns: int) -> NDArray[np.int64]:
    columns = np.arange(num_columns)
    if logits_to_keep is None:
        return columns
    if isinstance(logits_to_keep, torch.Tensor):
        if logits_to_keep.dim() != 1:
            raise CannotServeError("a logits_to_keep that is not a vector")
        index = _numpy(logits_to_keep, "logits_to_keep")
        try:
            chosen: NDArray[np.int64] = columns[index]
            return chosen
        except IndexError as error:
            raise CannotServeError("a logits_to_keep beyond the input") from error
    return columns[-int(logits_to_keep) :] if logits_to_keep else columns


def _numpy(tensor: torch.Tensor, name: str) -> NDArray[Any]:
    """The tensor's memory."""
    if tensor.device.type != "cpu":
        raise CannotServeError(f"{name} that are not on the CPU")
    return tensor.detach().numpy()
