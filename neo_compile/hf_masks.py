"""Which keys a token of a Hugging Face model attends to, read off the predicate that the model builds its masks from.

transformers hands a mask function (query position, key position) -> allowed to whoever builds masks for an attention
implementation. For ours that is a `MaskRecorder`, while a model runs once before its capture. The predicate is
evaluated row by row around the edge of the window, so a window of 4096 is as certain as one of 6; chunks, blocks and
prefixes that attend in both directions are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from neo_compile.errors import UnsupportedModelError
from neo_compile.probe import causal_mask

# Query positions at which a predicate is evaluated, beside those around the window that the model names.
_POSITIONS = (0, 1, 2, 5, 63, 4097, 131073)

# (batch, head, query position, key position), broadcastable index tensors -> allowed
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]


class MaskRecorder:
    """Builds the masks of one run and knows them again when attention is called with them.

    Attributes:
        windows: of each mask built; None for a plain causal one.
    """

    def __init__(self) -> None:
        self.windows: list[int | None] = []
        self._masks: list[torch.Tensor] = []

    def __call__(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: MaskFunction,
        device: torch.device,
        local_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The mask [batch, 1, q_length, kv_length], boolean.

        Raises:
            UnsupportedModelError: it is neither causal nor a causal window of `local_size` tokens.
        """
        window = window_of(mask_function, local_size, device)
        mask = causal_mask(q_length, kv_length, window, device).expand(batch_size, 1, -1, -1)
        self.windows.append(window)
        self._masks.append(mask)
        return mask

    def recall(self, mask: torch.Tensor | None) -> tuple[bool, int | None]:
        """Whether `mask` is one of this run (or there is none, which means causal), and its window."""
        if mask is None:
            return True, None
        for known, window in zip(self._masks, self.windows, strict=True):
            if mask.shape == known.shape and mask.data_ptr() == known.data_ptr() and mask.dtype == known.dtype:
                return True, window
        return False, None


def window_of(mask_function: MaskFunction, local_size: int | None, device: torch.device) -> int | None:
    """The window of a causal mask function, or None if it has none.

    Args:
        local_size: the size that the model names, of a window or of something else.

    Raises:
        UnsupportedModelError: it is something else.
    """
    positions = list(_POSITIONS)
    if local_size is not None:
        positions += [local_size - 1, local_size, local_size + 1, 2 * local_size + 3]
    rows = {query: _row(mask_function, query, device) for query in positions}
    for window in (None, local_size):
        expected = {query: causal_mask(1, query + 1, window, device)[0] for query in rows}
        if all(torch.equal(row[:-2], expected[query]) and not row[-2:].any() for query, row in rows.items()):
            return window
    size = "" if local_size is None else f" of {local_size} tokens"
    raise UnsupportedModelError(f"its attention mask is neither causal nor a sliding window{size}")


def _row(mask_function: MaskFunction, query: int, device: torch.device) -> torch.Tensor:
    """Boolean [query + 3]: the keys that the token at position `query` attends to, two beyond its own included."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    keys = torch.arange(query + 3, device=device).view(1, 1, 1, -1)
    try:
        allowed = torch.as_tensor(mask_function(zero, zero, zero + query, keys), device=device)
    except Exception as error:
        raise UnsupportedModelError(
            f"its mask depends on more than positions ({type(error).__name__} when asked beyond the input: {error})"
        ) from error
    return allowed.expand(1, 1, 1, query + 3).reshape(-1)
