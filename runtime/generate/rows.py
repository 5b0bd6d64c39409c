"""Block tables of the rows of one Hugging Face cache, over blocks that rows share by reference counts.

A row is a line of `input_ids`. Hugging Face's cache is as long as its padded rows; here a row holds its real tokens
only, and `valid` remembers which columns they came from:

    valid      . . t t t t | t t t        length 7, in blocks  [t t t t] [t t t .]
               t t t t t t | t t .        length 8             [t t t t] [t t t t]

Beams and copies share blocks: repeating, reordering and copying rows moves no KV. Whoever writes into a block that
others share copies it first (`placement`).

The tables of the rows that live are what counts. How many rows hold a block, and which blocks are free, is kept beside
them (`SharedBlocks`), and counted anew when it may be wrong: a change was interrupted, or rows died.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.request import Tier

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]

TIERS = (Tier.DEVICE, Tier.HOST)
"""`PagedRows.tiers` holds positions in this tuple."""

_SPARE_COLUMNS = 64
_ARRAYS = ("tiers", "lengths", "num_blocks", "tables", "_valid")


class SharedBlocks:
    """The blocks of both tiers, each with the number of rows that hold it.

    Attributes:
        lock: held by whoever changes rows; the same as the enabled model's.
        is_in_doubt: tables and counts may disagree.
    """

    def __init__(self, pools: Mapping[Tier, BlockPool], lock: threading.RLock | None = None) -> None:
        self.pools = dict(pools)
        self.block_size = self.pools[Tier.DEVICE].block_size
        self.lock = lock or threading.RLock()
        self._counts = {tier: np.zeros(pool.num_blocks, dtype=np.int32) for tier, pool in pools.items()}
        self._rows: list[weakref.ref[PagedRows]] = []
        self.is_in_doubt = False

    def watch(self, rows: PagedRows) -> None:
        """Count what `rows` holds, as long as it lives."""
        with self.lock:
            self._rows.append(weakref.ref(rows))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of tables and counts. If it does not come to its end, the next one counts anew first.

        Ctrl-C may come between any two lines. So a table changes in one step, it names only blocks that are taken, and
        a block is released after no table names it any more.
        """
        with self.lock:
            self.settle()
            self.is_in_doubt = True
            yield
            self.is_in_doubt = False

    def settle(self) -> None:
        """Count anew who holds what, if a change was interrupted or rows died."""
        with self.lock:
            # Asked of each: a callback of theirs would run in any thread, in the middle of anything.
            if not self.is_in_doubt and all(ref() is not None for ref in self._rows):
                return
            self.is_in_doubt = True
            self._rows = [ref for ref in self._rows if ref() is not None]
            self._counts = self._recounted()
            for tier, counts in self._counts.items():
                self.pools[tier].reset((counts > 0).tolist())
            self.is_in_doubt = False

    def _recounted(self) -> dict[Tier, Int32s]:
        counts = {tier: np.zeros(pool.num_blocks, dtype=np.int32) for tier, pool in self.pools.items()}
        for rows in filter(None, (ref() for ref in self._rows)):
            for tier, block_ids in rows.held().items():
                np.add.at(counts[tier], block_ids, 1)
        return counts

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
        """Raises AssertionError unless the counts are the tables', and exactly the held blocks are taken."""
        self.settle()
        recounted = self._recounted()
        for tier, pool in self.pools.items():
            pool.check_integrity()
            counts = self._counts[tier]
            wrong = np.flatnonzero(counts != recounted[tier])
            assert not len(wrong), (
                f"{tier.value} blocks {wrong}: {counts[wrong]} counted, {recounted[tier][wrong]} held"
            )
            held = int((counts > 0).sum())
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
        blocks.watch(self)

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
        added = np.int32(num_columns) if valid is None else valid.sum(axis=1, dtype=np.int32)
        self.become(lengths=self.lengths + added, num_columns=end)

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
        with self.blocks.changing():
            self._trim()
            before = self.held()
            self.become(**{name: getattr(self, name)[indices] for name in _ARRAYS})
            for tier, block_ids in self.held().items():
                self.blocks.share(tier, block_ids)
            for tier, block_ids in before.items():
                self.blocks.release(tier, block_ids)

    def fork(self) -> PagedRows:
        """A copy that shares every block."""
        with self.blocks.changing():
            self._trim()
            copied = PagedRows(self.blocks, 0)
            copied.become(num_columns=self.num_columns, **{name: getattr(self, name).copy() for name in _ARRAYS})
            for tier, block_ids in copied.held().items():
                self.blocks.share(tier, block_ids)
            return copied

    def crop(self, num_columns: int) -> None:
        """Drop the last columns."""
        with self.blocks.changing():
            kept = max(0, self.num_columns - num_columns)
            dropped = self._valid[:, kept : self.num_columns].sum(axis=1, dtype=np.int32)
            self.become(lengths=self.lengths - dropped, num_columns=kept)
            self._trim()

    def clear(self) -> None:
        """Drop all columns and let go of all blocks. Idempotent, and right after an interrupt too."""
        with self.blocks.lock:
            self.blocks.is_in_doubt = True
            none = np.zeros(self.num_rows, dtype=np.int32)
            self.become(lengths=none, num_blocks=none.copy(), num_columns=0)
            self.blocks.settle()

    def num_needed(self, num_new: Int32s | int = 0) -> Int32s:
        """Blocks that `lengths + num_new` tokens take, int32 [B]."""
        return -(-(self.lengths + num_new) // self.blocks.block_size)

    def become(self, **attributes: Any) -> None:
        """Change several attributes in one step, which no interrupt divides."""
        self.__dict__.update(attributes)

    def _trim(self) -> None:
        """Let go of blocks beyond the lengths."""
        needed = self.num_needed()
        if (self.num_blocks > needed).any():
            released = self.held(needed)
            self.num_blocks = np.minimum(self.num_blocks, needed).astype(np.int32)
            for tier, block_ids in released.items():
                self.blocks.release(tier, block_ids)

    def held(self, first: Int32s | int = 0) -> dict[Tier, Int32s]:
        """All blocks of each tier from each row's `first` on, as often as rows hold them."""
        columns = np.arange(self.tables.shape[1])
        held = (columns < self.num_blocks[:, None]) & (columns >= np.reshape(first, (-1, 1)))
        if not self.tiers.any():
            return {Tier.DEVICE: self.tables[held]}
        return {tier: self.tables[held & (self.tiers == code)[:, None]] for code, tier in enumerate(TIERS)}
