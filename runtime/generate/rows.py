"""Block tables of the rows of one Hugging Face cache, over blocks that rows share by reference counts.

A row is a line of `input_ids`. Hugging Face's cache is as long as its padded rows; here a row holds its real tokens
only, and `valid` remembers which columns they came from:

    valid      . . t t t t | t t t        length 7, in blocks  [t t t t] [t t t .]
               t t t t t t | t t .        length 8             [t t t t] [t t t t]

Beams and copies share blocks: repeating, reordering and copying rows moves no KV. Whoever writes into a block that
others share copies it first (`placement`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.request import Tier

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]

TIERS = (Tier.DEVICE, Tier.HOST)
"""`PagedRows.tiers` holds positions in this tuple."""

_SPARE_COLUMNS = 64


class SharedBlocks:
    """The blocks of both tiers, each with the number of rows that hold it.

    Attributes:
        lock: held by whoever changes rows; the same as the enabled model's.
    """

    def __init__(self, pools: Mapping[Tier, BlockPool], lock: threading.RLock | None = None) -> None:
        self.pools = dict(pools)
        self.block_size = self.pools[Tier.DEVICE].block_size
        self.lock = lock or threading.RLock()
        self._counts = {tier: np.zeros(pool.num_blocks, dtype=np.int32) for tier, pool in pools.items()}

    def num_free(self, tier: Tier) -> int:
        """Blocks that nobody holds."""
        return self.pools[tier].num_free

    def counts(self, tier: Tier, block_ids: Int32s) -> Int32s:
        """How many rows hold each block."""
        return self._counts[tier][block_ids]

    def all_counts(self, tier: Tier) -> Int32s:
        """How many rows hold each of the tier's blocks (a copy)."""
        return self._counts[tier].copy()

    def take(self, tier: Tier, num_blocks: int) -> Int32s:
        """Free blocks, now held once. Ask `num_free` first."""
        block_ids = np.array(self.pools[tier].allocate(num_blocks), dtype=np.int32)
        self._counts[tier][block_ids] = 1
        return block_ids

    def share(self, tier: Tier, block_ids: Int32s) -> None:
        """Hold blocks once more; a block may come several times."""
        np.add.at(self._counts[tier], block_ids, 1)

    def release(self, tier: Tier, block_ids: Int32s) -> None:
        """Hold blocks once less, and free those that nobody holds any more."""
        counts = self._counts[tier]
        np.subtract.at(counts, block_ids, 1)
        held = counts[block_ids]
        assert not len(held) or held.min() >= 0, f"{tier.value} blocks {block_ids[held < 0]} released too often"
        self.pools[tier].free(np.unique(block_ids[held == 0]).tolist())

    def check_integrity(self) -> None:
        """Raises AssertionError unless a block is taken exactly if somebody holds it."""
        for tier, pool in self.pools.items():
            pool.check_integrity()
            held = int((self._counts[tier] > 0).sum())
            assert held == pool.num_taken, f"{tier.value}: {held} blocks held, {pool.num_taken} taken"


class PagedRows:
    """The rows of one cache. Its methods move references, never KV.

    Attributes:
        tiers: int8 [B], where each row is (see `TIERS`).
        lengths: int32 [B], tokens whose KV is stored.
        num_blocks: int32 [B], blocks held; they may reach beyond the length (after a failed forward).
        tables: int32 [B, W], block ids; entries from `num_blocks` on mean nothing.
        num_columns: length of the padded rows.
    """

    def __init__(self, blocks: SharedBlocks, num_rows: int) -> None:
        self.blocks = blocks
        self.tiers = np.zeros(num_rows, dtype=np.int8)
        self.lengths = np.zeros(num_rows, dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self.tables = np.zeros((num_rows, 8), dtype=np.int32)
        self.num_columns = 0
        self._valid = np.zeros((num_rows, _SPARE_COLUMNS), dtype=np.bool_)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def valid(self) -> Bools:
        """bool [B, num_columns], a view: columns that are tokens rather than padding."""
        return self._valid[:, : self.num_columns]

    def append(self, valid: Bools | None, num_columns: int) -> None:
        """The KV of further columns is stored: those of `valid` (bool [B, num_columns]; None is all)."""
        end = self.num_columns + num_columns
        if end > self._valid.shape[1]:
            grown = np.zeros((self.num_rows, end + max(end, _SPARE_COLUMNS)), dtype=np.bool_)
            grown[:, : self.num_columns] = self.valid
            self._valid = grown
        self._valid[:, self.num_columns : end] = True if valid is None else valid
        self.lengths += num_columns if valid is None else valid.sum(axis=1, dtype=np.int32)
        self.num_columns = end

    def extend(self, row: int, block_ids: Int32s) -> None:
        """A row holds further blocks (taken for it)."""
        first, end = int(self.num_blocks[row]), int(self.num_blocks[row]) + len(block_ids)
        if end > self.tables.shape[1]:
            grown = np.zeros((self.num_rows, max(end, 2 * self.tables.shape[1])), dtype=np.int32)
            grown[:, : self.tables.shape[1]] = self.tables
            self.tables = grown
        self.tables[row, first:end] = block_ids
        self.num_blocks[row] = end

    def table(self, row: int) -> Int32s:
        """The row's blocks, a view."""
        return self.tables[row, : self.num_blocks[row]]

    def select(self, indices: NDArray[np.int64]) -> None:
        """Row i becomes what row indices[i] is; rows that nobody wants are let go."""
        if len(indices) == self.num_rows and (indices == np.arange(self.num_rows)).all():
            return
        with self.blocks.lock:
            self._trim()
            before = self._held()
            self.tiers, self.lengths = self.tiers[indices], self.lengths[indices]
            self.num_blocks, self.tables = self.num_blocks[indices], self.tables[indices]
            self._valid = self._valid[indices]
            for tier, block_ids in self._held().items():
                self.blocks.share(tier, block_ids)
            for tier, block_ids in before.items():
                self.blocks.release(tier, block_ids)

    def fork(self) -> PagedRows:
        """A copy that shares every block."""
        with self.blocks.lock:
            self._trim()
            copied = PagedRows(self.blocks, 0)
            copied.tiers, copied.lengths = self.tiers.copy(), self.lengths.copy()
            copied.num_blocks, copied.tables = self.num_blocks.copy(), self.tables.copy()
            copied._valid, copied.num_columns = self._valid.copy(), self.num_columns
            for tier, block_ids in copied._held().items():
                self.blocks.share(tier, block_ids)
            return copied

    def crop(self, num_columns: int) -> None:
        """Drop the last columns."""
        with self.blocks.lock:
            kept = max(0, self.num_columns - num_columns)
            self.lengths -= self._valid[:, kept : self.num_columns].sum(axis=1, dtype=np.int32)
            self.num_columns = kept
            self._trim()

    def clear(self) -> None:
        """Drop all columns and let go of all blocks. Idempotent."""
        with self.blocks.lock:
            self.lengths[:] = 0
            self.num_columns = 0
            self._trim()

    def num_needed(self, num_new: Int32s | int = 0) -> Int32s:
        """Blocks that `lengths + num_new` tokens take, int32 [B]."""
        return -(-(self.lengths + num_new) // self.blocks.block_size)

    def _trim(self) -> None:
        """Let go of blocks beyond the lengths."""
        needed = self.num_needed()
        if (self.num_blocks > needed).any():
            for tier, block_ids in self._held(needed).items():
                self.blocks.release(tier, block_ids)
            self.num_blocks = np.minimum(self.num_blocks, needed).astype(np.int32)

    def _held(self, first: Int32s | int = 0) -> dict[Tier, Int32s]:
        """All blocks of each tier from each row's `first` on, as often as rows hold them."""
        columns = np.arange(self.tables.shape[1])
        held = (columns < self.num_blocks[:, None]) & (columns >= np.reshape(first, (-1, 1)))
        if not self.tiers.any():
            return {Tier.DEVICE: self.tables[held]}
        return {tier: self.tables[held & (self.tiers == code)[:, None]] for code, tier in enumerate(TIERS)}
