"""Room for the next tokens of some rows: which tier each row lives in, new blocks, copies of shared blocks.

A row is wholly in one tier. New rows go to the device while it has room for them and one more block each, then to the
host. When the device fills in the middle of a generation whole rows move to the host, the last ones first, and the
other way round when the host fills and the device has room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neo_compile.errors import CapacityError
from neo_compile.runtime.generate.rows import TIERS, Bools, Int32s, PagedRows
from neo_compile.runtime.request import Tier

Ints = NDArray[np.integer[Any]]

_DEVICE, _HOST = 0, 1  # positions in TIERS


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks to copy before the next attention: pairs int64 [N, 2] of (source, target) block ids."""

    source: Tier
    target: Tier
    pairs: NDArray[np.int64]


@dataclass(slots=True)
class Room:
    """What `make_room` has done.

    Attributes:
        copies: to be made in this order.
        num_moved_rows: rows that change tiers.
    """

    copies: list[BlockCopies] = field(default_factory=list)
    num_moved_rows: int = 0


def make_room(rows: PagedRows, num_new: Int32s, tiers: Sequence[Tier] = TIERS) -> Room:
    """Blocks for `num_new[i]` further tokens of row i, none of which others share.

    Args:
        tiers: where new rows may go, best first.

    Raises:
        CapacityError: the tiers cannot hold the rows; nothing has changed.
    """
    with rows.blocks.changing():
        if (rows.num_needed(num_new) <= rows.num_blocks).all() and not _is_shared(rows, num_new).any():
            return Room()  # most decode iterations
        placed = _place(rows, num_new, [TIERS.index(tier) for tier in tiers])
        room = Room()
        for code in (_HOST, _DEVICE):  # rows leave for the host first: what they free may be taken at once
            _move(rows, np.flatnonzero((placed != rows.tiers) & (placed == code)), code, room)
        _grow(rows, num_new)
        _unshare(rows, num_new, room)
        return room


def _place(rows: PagedRows, num_new: Int32s, codes: Sequence[int]) -> NDArray[np.int8]:
    """The tier of each row such that everything fits; changes nothing."""
    blocks = rows.blocks
    total = np.maximum(rows.num_needed(num_new), rows.num_blocks)
    growth = total - rows.num_blocks
    writers, written = _written(rows, num_new)
    free = [blocks.num_free(tier) for tier in TIERS]
    placed = rows.tiers.copy()
    is_new = rows.num_blocks == 0
    for code, tier in enumerate(TIERS):
        block_ids, num_writers = np.unique(written[placed[writers] == code], return_counts=True)
        free[code] -= int(growth[~is_new & (placed == code)].sum())
        free[code] -= int(_num_copies(blocks.counts(tier, block_ids), num_writers).sum())
    for row in np.flatnonzero(is_new):
        need = int(total[row])
        headroom = min(1, need)
        # Without headroom, if need be: the row may move later.
        roomy = (c for wanted in (need + headroom, need) for c in codes if free[c] >= wanted)
        code = next(roomy, codes[0])
        placed[row] = code
        free[code] -= need
    written_by = dict(zip(writers.tolist(), written.tolist(), strict=True))
    for code, other in ((_DEVICE, _HOST), (_HOST, _DEVICE)):
        if free[code] < 0 and other in codes:
            _relieve(rows, placed, free, growth, written_by, code, other)
    if min(free) < 0:
        raise _does_not_fit(rows, total)
    return placed


def _relieve(
    rows: PagedRows,
    placed: NDArray[np.int8],
    free: list[int],
    growth: Int32s,
    written_by: Mapping[int, int],
    code: int,
    other: int,
) -> None:
    """Move rows from one tier to the other, the last first, until the one has no debt, as far as the other has room."""
    num_holders = rows.blocks.all_counts(TIERS[code])
    members = np.flatnonzero(placed == code).tolist()
    written = [written_by[row] for row in members if row in written_by]
    staying = _Group(num_holders, np.bincount(written, minlength=len(num_holders)))
    moving = _Group(np.zeros_like(num_holders), np.zeros_like(num_holders))
    for row in members[::-1]:
        if free[code] >= 0:
            return
        held, block = rows.table(row), written_by.get(row)
        need = int(growth[row]) + moving.add(held, block, 1)
        if free[other] < need:
            moving.add(held, block, -1)
            continue
        placed[row] = other
        free[other] -= need
        free[code] += int(growth[row]) - staying.add(held, block, -1)


def _does_not_fit(rows: PagedRows, total: Int32s) -> CapacityError:
    blocks = rows.blocks
    limits = {tier: blocks.pools[tier].num_blocks for tier in TIERS}
    taken = sum(pool.num_taken for pool in blocks.pools.values()) - int(rows.num_blocks.sum())
    need, limit = int(total.sum()), sum(limits.values())
    others = f", of which {taken} hold the caches of other calls" if taken > 0 else ""
    return CapacityError(
        f"{rows.num_rows} rows need {need} KV blocks of {blocks.block_size} tokens (the longest {int(total.max())}; a "
        f"row is wholly in one tier), but there are {limits[Tier.DEVICE]} on the device and {limits[Tier.HOST]} on the "
        f"host{others}: raise device_cache or host_cache, or generate with fewer rows",
        need=need,
        limit=limit,
        knob="host_cache",
    )


def _written(rows: PagedRows, num_new: Int32s) -> tuple[NDArray[np.int64], Int32s]:
    """Rows whose next token goes into a block that they hold already, a partly filled one, and that block's id."""
    writers = np.flatnonzero((num_new > 0) & (rows.lengths % rows.blocks.block_size != 0))
    return writers, rows.tables[writers, rows.lengths[writers] // rows.blocks.block_size]


def _is_shared(rows: PagedRows, num_new: Int32s) -> NDArray[np.bool_]:
    """Rows whose next token goes into a block that others share."""
    shared = np.zeros(rows.num_rows, dtype=np.bool_)
    writers, written = _written(rows, num_new)
    for code, tier in enumerate(TIERS):
        mine = rows.tiers[writers] == code
        shared[writers[mine]] = rows.blocks.counts(tier, written[mine]) > 1
    return shared


def _num_copies(num_holders: Ints, num_writers: Ints) -> Ints:
    """Copies of each block so that all that write into it have one of their own: the last holder keeps the block."""
    is_kept: Bools = (num_writers > 0) & (num_writers == num_holders)
    return num_writers - is_kept


@dataclass(slots=True)
class _Group:
    """Rows that live in one tier, together with the copies that their writing takes.

    Attributes:
        num_holders, num_writers: rows that hold, and that write, each block of the tier where the rows are now.
    """

    num_holders: Ints
    num_writers: Ints

    def add(self, held: Int32s, written: int | None, count: int) -> int:
        """A row joins (count 1) or leaves (-1); how many more blocks the group takes. Rows share as they do now."""
        before = self._num_blocks(held)
        self.num_holders[held] += count
        if written is not None:
            self.num_writers[written] += count
        return self._num_blocks(held) - before

    def _num_blocks(self, block_ids: Int32s) -> int:
        num_holders, num_writers = self.num_holders[block_ids], self.num_writers[block_ids]
        return int((num_holders > 0).sum() + _num_copies(num_holders, num_writers).sum())


def _move(rows: PagedRows, moving: NDArray[np.int64], code: int, room: Room) -> None:
    """Move rows to tier `code`, and blocks that they share once; the blocks that nobody holds any more are free."""
    source, target = TIERS[1 - code], TIERS[code]
    held = [rows.table(row).copy() for row in moving]
    tiers, tables = rows.tiers.copy(), rows.tables.copy()
    tiers[moving] = code
    room.num_moved_rows += sum(len(old) > 0 for old in held)
    old_ids, positions = np.unique(np.concatenate(held) if held else np.empty(0, np.int32), return_inverse=True)
    if not len(old_ids):
        rows.tiers = tiers
        return
    new_ids = rows.blocks.take(target, len(old_ids))
    start = 0
    for row, old in zip(moving, held, strict=True):
        tables[row, : len(old)] = new_ids[positions[start : start + len(old)]]
        start += len(old)
    rows.become(tiers=tiers, tables=tables)
    rows.blocks.share(target, new_ids[positions])
    rows.blocks.release(target, new_ids)  # `take` held them once, for nobody
    rows.blocks.release(source, np.concatenate(held))
    room.copies.append(BlockCopies(source, target, np.stack([old_ids, new_ids], axis=1).astype(np.int64)))


def _grow(rows: PagedRows, num_new: Int32s) -> None:
    growth = rows.num_needed(num_new) - rows.num_blocks
    for row in np.flatnonzero(growth > 0):
        rows.extend(int(row), rows.blocks.take(TIERS[rows.tiers[row]], int(growth[row])))


def _unshare(rows: PagedRows, num_new: Int32s, room: Room) -> None:
    """Give each row that would write into a shared block a copy; the last holder keeps the block."""
    pairs: dict[int, list[tuple[int, int]]] = {_DEVICE: [], _HOST: []}
    for row in np.flatnonzero(_is_shared(rows, num_new)):
        code, column = int(rows.tiers[row]), rows.lengths[row] // rows.blocks.block_size
        tier, old = TIERS[code], rows.tables[row, column : column + 1].copy()
        if rows.blocks.counts(tier, old)[0] > 1:
            new = rows.blocks.take(tier, 1)
            rows.tables[row, column] = new[0]
            rows.blocks.release(tier, old)
            pairs[code].append((int(old[0]), int(new[0])))
    for code, tier in enumerate(TIERS):
        if pairs[code]:
            room.copies.append(BlockCopies(tier, tier, np.array(pairs[code], dtype=np.int64)))
