"""A Hugging Face `DynamicCache` whose KV lies in our blocks: its layers are views that know the block tables.

    DynamicCache.layers   [PagedLayer 0, PagedLayer 1, ...]  ->  PagedCache  ->  PagedRows, KVCache of each tier

What `generate` does to a cache (reorder, repeat, select, crop) happens to the block tables, once for all layers.
Whoever reads a view's `keys` gets a dense copy; whoever calls `update` (a forward that is not served) gets the whole
cache back in its dense form first. When the last view dies its blocks are free.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from neo_compile.runtime.generate.cells import find_cells
from neo_compile.runtime.generate.counters import GenerateStats
from neo_compile.runtime.generate.rows import Bools, PagedRows
from neo_compile.runtime.kv_cache import KVCache
from neo_compile.runtime.request import Tier

Dense = tuple[torch.Tensor, torch.Tensor]


class PagedCache:
    """What the views of one cache share.

    Args:
        rows: its block tables; owned from now on.
        memory: both tiers' KV.
        layers: the dense layers that the views stand for. Their data is dropped; they come back in `densify`.
    """

    def __init__(
        self,
        rows: PagedRows,
        memory: Mapping[Tier, KVCache],
        layers: Sequence[DynamicLayer],
        stats: GenerateStats,
    ) -> None:
        self.rows, self.memory, self.stats = rows, memory, stats
        self.layers = [_emptied(layer) for layer in layers]
        self.num_lost_columns = 0
        self._owner: weakref.ref[DynamicCache] | None = None
        # Views hold this object and so the rows, also those that outlive their cache or lie in a shallow copy of it.

    def attach(self, cache: DynamicCache) -> None:
        """Put views into `cache`."""
        self._owner = weakref.ref(cache)
        cache.layers[:] = [PagedLayer(self, index) for index in range(len(self.layers))]

    def densify(self) -> list[DynamicLayer]:
        """Give the cache its dense layers back, filled, and free the rows; the layers."""
        with self.rows.blocks.lock:
            dense = self.to_dense()
            owner = self._owner() if self._owner is not None else None
            if owner is not None:
                owner.layers[:] = dense
            self.rows.clear()
            self.stats.num_densified += 1
            return dense

    def to_dense(self) -> list[DynamicLayer]:
        """Dense layers with this cache's KV; columns of padding are 0."""
        with self.rows.blocks.lock:
            layers = [_emptied(layer) for layer in self.layers]
            if self.rows.num_columns:
                for index, layer in enumerate(layers):
                    _fill(layer, *self.read(index), self.rows.num_columns)
            return layers

    def read(self, index: int) -> Dense:
        """K and V of a layer, [B, heads, columns, dim] each; a sliding layer has the columns that a dense one has."""
        with self.rows.blocks.lock:
            rows, layer = self.rows, self.layers[index]
            first = 0
            if isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past:
                first = max(0, rows.num_columns - layer.sliding_window + 1)
            k, v = (self.memory[Tier.DEVICE].k(index), self.memory[Tier.DEVICE].v(index))
            shape = (rows.num_rows, k.shape[1], rows.num_columns - first)
            keys, values = k.new_zeros((*shape, k.shape[3])), v.new_zeros((*shape, v.shape[3]))
            for tier, cells in find_cells(rows, first).items():
                block_ids, offsets = cells.slots.block_ids, cells.slots.offsets
                keys[cells.rows, :, cells.columns] = self.memory[tier].k(index)[block_ids, :, offsets]
                values[cells.rows, :, cells.columns] = self.memory[tier].v(index)[block_ids, :, offsets]
            return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """As `DynamicLayer.crop` of the installed transformers, for all layers at once.

        Raises:
            RuntimeError: sliding layers no longer have what the cropped cache would need.
            ValueError: a positive number, where transformers refuses it.
        """
        if tokens_to_remove > 0:
            # Once the length to keep, now an error: whichever it is here, an empty layer tells.
            num_columns = _legacy_crop_length(tokens_to_remove, self.rows.num_columns)
        else:
            num_columns = -tokens_to_remove
        if num_columns and self.num_lost_columns:
            raise RuntimeError(
                "`crop` was called, but this cache came from one whose sliding-window layers had already dropped "
                f"{self.num_lost_columns} tokens. Call `activate_past_recording` before its first forward."
            )
        self.rows.crop(num_columns)

    def copy_for(self, cache: DynamicCache) -> PagedCache:
        """The same KV for a copy of the cache; blocks are shared until somebody writes."""
        with self.rows.blocks.lock:
            copied = PagedCache(self.rows.fork(), self.memory, self.layers, self.stats)
            copied.num_lost_columns = self.num_lost_columns
            copied._owner = weakref.ref(cache)
            return copied


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `DynamicCache`, as a view of block tables. See `DynamicLayer` for the methods."""

    is_compileable = False
    is_croppable = True

    def __init__(self, paged: PagedCache, index: int) -> None:
        # The base class would set keys and values, which are computed here.
        self.paged = paged
        self.index = index
        self.device = torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.paged.memory[Tier.DEVICE].dtype

    @property
    def keys(self) -> torch.Tensor | None:
        """A dense copy."""
        return self.paged.read(self.index)[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """A dense copy."""
        return self.paged.read(self.index)[1] if self.is_initialized else None

    @property
    def is_initialized(self) -> bool:
        return self.paged.rows.num_columns > 0

    @property
    def is_sliding(self) -> bool:
        return bool(self._dense.is_sliding)

    @property
    def record_past(self) -> bool:
        return bool(getattr(self._dense, "record_past", False))

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if hasattr(self._dense, "record_past"):
            self._dense.record_past = value

    @property
    def _dense(self) -> DynamicLayer:
        return self.paged.layers[self.index]

    def activate_past_recording(self) -> None:
        self.record_past = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: rows are there from the first served forward on."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A forward that is not served: the cache becomes dense, and goes on as such."""
        layer = self.paged.densify()[self.index]
        updated: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, *args, **kwargs)
        return updated

    def get_seq_length(self, *_: Any) -> int:
        return self.paged.rows.num_columns

    def get_max_length(self) -> int:
        return int(self._dense.get_max_length())

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # Of the dense layer that `update` would fill.
        layer = _emptied(self._dense)
        num_columns = self.paged.rows.num_columns
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = num_columns
            sizes: tuple[int, int] = layer.get_mask_sizes(query_length)
            return sizes
        return num_columns + query_length, 0

    # The methods below change the tables, which all layers share: the cache calls them on every layer, the first acts.

    def reset(self) -> None:
        if self.index == 0:
            self.paged.rows.clear()
            self.paged.num_lost_columns = 0

    def crop(self, tokens_to_remove: int) -> None:
        if self.index == 0:
            self.paged.crop(int(tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.index == 0:
            self.paged.rows.select(beam_idx.to("cpu", torch.int64).numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.index == 0:
            self.paged.rows.select(np.repeat(np.arange(self.paged.rows.num_rows), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.index == 0:
            # Any index of torch's: numbers, negative ones, a mask.
            self.paged.rows.select(torch.arange(self.paged.rows.num_rows)[indices.cpu()].numpy())

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheLayerMixin:
        """Copies of one cache share blocks; a layer by itself becomes dense."""
        owner = self.paged._owner() if self.paged._owner is not None else None
        copied_cache = memo.get(id(owner)) if owner is not None else None
        if copied_cache is None:
            return self.paged.to_dense()[self.index]
        key = id(self.paged)
        if key not in memo:
            memo[key] = self.paged.copy_for(copied_cache)
        return PagedLayer(memo[key], self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the dense layer."""
        return copy.copy, (self.paged.to_dense()[self.index],)


def paged_cache_of(cache: object) -> PagedCache | None:
    """What the layers of `cache` are views of; None for a dense or foreign cache."""
    layers = getattr(cache, "layers", None)
    first = layers[0] if isinstance(layers, list) and layers else None
    return first.paged if isinstance(first, PagedLayer) else None


def to_dynamic_cache(cache: DynamicCache) -> DynamicCache:
    """A plain `DynamicCache` with the KV of `cache`, which stays as it is. A cache that is already plain comes back."""
    paged = paged_cache_of(cache)
    if paged is None:
        return cache
    plain = copy.copy(cache)
    plain.layers = paged.to_dense()
    return plain


def is_served(cache: Any) -> bool:
    """Whether `cache` is of a kind that can be a view, or become one."""
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    return all(type(layer) in (PagedLayer, DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def name_cache(cache: Any) -> str:
    """What `cache` is, in words."""
    kind = type(cache).__name__
    if getattr(cache, "offloading", False):
        return f"an offloading {kind}"
    layers = sorted({type(layer).__name__ for layer in getattr(cache, "layers", ())})
    return f"a {kind}" + (f" of {', '.join(layers)}" if layers and kind == "DynamicCache" else "")


def dense_layers(cache: DynamicCache, num_layers: int) -> list[DynamicLayer] | None:
    """The layers of a dense `DynamicCache` of that many layers, which are made if need be; None if it is not one."""
    if not is_served(cache):
        return None
    factory = cache.layer_class_to_replicate
    if factory is DynamicLayer:
        while len(cache.layers) < num_layers:
            cache.layers.append(factory())
    is_dense = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return cache.layers if is_dense and len(cache.layers) == num_layers else None


def _emptied(layer: DynamicLayer) -> DynamicLayer:
    """A layer of the same kind and settings without KV."""
    empty = copy.copy(layer)
    empty.keys = empty.values = None
    empty.is_initialized = False
    if isinstance(empty, DynamicSlidingWindowLayer):
        empty.cumulative_length = 0
    return empty


def _fill(layer: DynamicLayer, keys: torch.Tensor, values: torch.Tensor, num_columns: int) -> None:
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = num_columns


def _legacy_crop_length(argument: int, num_columns: int) -> int:
    """How many columns `crop` of a positive number drops, if the installed transformers allows it."""
    layer = DynamicLayer()
    _fill(layer, torch.empty(1, 1, num_columns, 1), torch.empty(1, 1, num_columns, 1), num_columns)
    layer.crop(argument)
    return num_columns - int(layer.get_seq_length())


def valid_columns(mask: Bools | None, num_rows: int, num_columns: int) -> Bools:
    """The first columns of an attention mask; all, where there is none."""
    if mask is None:
        return np.ones((num_rows, num_columns), dtype=np.bool_)
    return mask[:, :num_columns]
