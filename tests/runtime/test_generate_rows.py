"""Block tables of `generate`'s rows: sharing, copy-on-write, moves between the tiers, and nothing lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from neo_compile.errors import CapacityError
from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.generate.placement import Room, make_room
from neo_compile.runtime.generate.rows import TIERS, PagedRows, SharedBlocks
from neo_compile.runtime.request import Tier

BLOCK_SIZE = 4


def shared_blocks(num_device: int, num_host: int) -> SharedBlocks:
    sizes = {Tier.DEVICE: num_device, Tier.HOST: num_host}
    return SharedBlocks({tier: BlockPool(num, BLOCK_SIZE, tier) for tier, num in sizes.items()})


class Model:
    """A cache of token values beside `PagedRows`, and the same values in flat lists."""

    def __init__(self, blocks: SharedBlocks, memory: dict[Tier, np.ndarray], num_rows: int) -> None:
        self.rows, self.memory = PagedRows(blocks, num_rows), memory
        self.values: list[list[int]] = [[] for _ in range(num_rows)]

    def append(self, new: list[list[int]]) -> Room:
        room = make_room(self.rows, np.array(list(map(len, new)), dtype=np.int32))
        for copy in room.copies:
            self.memory[copy.target][copy.pairs[:, 1]] = self.memory[copy.source][copy.pairs[:, 0]]
        for row, values in enumerate(new):
            for offset, value in enumerate(values, start=int(self.rows.lengths[row])):
                block = self.rows.table(row)[offset // BLOCK_SIZE]
                self.memory[TIERS[self.rows.tiers[row]]][block, offset % BLOCK_SIZE] = value
            self.values[row] += values
        width = max(map(len, new))
        valid = np.array([[column >= width - len(values) for column in range(width)] for values in new])
        self.rows.append(valid, width)
        return room

    def check(self) -> None:
        for row, values in enumerate(self.values):
            blocks = self.memory[TIERS[self.rows.tiers[row]]][self.rows.table(row)]
            assert blocks.reshape(-1)[: len(values)].tolist() == values, f"row {row}"
            assert self.rows.lengths[row] == len(values) == self.rows.valid[row].sum()


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_lose_nothing(seed):
    random = np.random.default_rng(seed)
    blocks = shared_blocks(10, 18)
    memory = {tier: np.zeros((pool.num_blocks, BLOCK_SIZE), dtype=np.int64) for tier, pool in blocks.pools.items()}
    models = [Model(blocks, memory, 3)]
    num_moved, num_copies, num_refused, value = 0, 0, 0, 0
    for _ in range(400):
        model = models[random.integers(len(models))]
        num_rows = model.rows.num_rows
        action = random.integers(8)
        if action == 0 and len(models) < 4:
            copied = Model(blocks, memory, 0)
            copied.rows, copied.values = model.rows.fork(), [list(values) for values in model.values]
            models.append(copied)
        elif action == 1:
            indices = random.integers(num_rows, size=random.integers(1, 5))
            model.rows.select(indices)
            model.values = [list(model.values[index]) for index in indices]
        elif action == 2:
            num_columns = int(random.integers(1, 6))
            kept = max(0, model.rows.num_columns - num_columns)
            lengths = model.rows.valid[:, :kept].sum(axis=1)
            model.rows.crop(num_columns)
            model.values = [values[:length] for values, length in zip(model.values, lengths, strict=True)]
        elif action == 3 and len(models) > 1:
            models.remove(model)
            model.rows.clear()
        else:
            longest = int(random.integers(1, 7)) if random.integers(3) == 0 else 1
            new = []
            for _ in range(num_rows):
                new.append(list(range(value, value + int(random.integers(0 if longest > 1 else 1, longest + 1)))))
                value += longest
            if any(new):
                try:
                    room = model.append(new)
                    num_moved += room.num_moved_rows
                    num_copies += len(room.copies)
                except CapacityError:
                    num_refused += 1
        for each in models:
            each.check()
        blocks.check_integrity()
    assert num_moved > 2
    assert num_copies > 20
    assert num_refused > 0
    for model in models:
        model.rows.clear()
    assert all(pool.num_taken == 0 for pool in blocks.pools.values())


def test_new_rows_fill_the_device_with_a_block_to_spare_then_the_host():
    rows = PagedRows(shared_blocks(6, 10), 4)
    make_room(rows, np.array([8, 4, 8, 8], dtype=np.int32))
    assert rows.tiers.tolist() == [0, 0, 0, 1]
    rows = PagedRows(shared_blocks(6, 10), 2)
    make_room(rows, np.array([8, 8], dtype=np.int32), [Tier.HOST])
    assert rows.tiers.tolist() == [1, 1]


def test_a_refusal_changes_nothing():
    blocks = shared_blocks(2, 3)
    rows = PagedRows(blocks, 2)
    make_room(rows, np.array([8, 8], dtype=np.int32))
    rows.append(None, 8)
    before = (rows.tiers.copy(), rows.tables.copy(), rows.num_blocks.copy())
    with pytest.raises(CapacityError) as error:
        make_room(rows, np.array([9, 1], dtype=np.int32))
    assert (error.value.need, error.value.limit, error.value.knob) == (8, 5, "host_cache")
    for old, new in zip(before, (rows.tiers, rows.tables, rows.num_blocks), strict=True):
        assert (old == new).all()
    blocks.check_integrity()


def test_the_last_holder_of_a_shared_block_keeps_it():
    blocks = shared_blocks(10, 0)
    rows = PagedRows(blocks, 1)
    make_room(rows, np.array([6], dtype=np.int32))
    rows.append(None, 6)
    rows.select(np.array([0, 0, 0]))
    room = make_room(rows, np.ones(3, dtype=np.int32))
    assert [len(copy.pairs) for copy in room.copies] == [2]
    assert blocks.pools[Tier.DEVICE].num_taken == 1 + 3
    assert not make_room(rows, np.ones(3, dtype=np.int32)).copies


@pytest.mark.parametrize(("num_device", "num_host", "tiers"), [(2, 0, [0, 0]), (1, 1, [0, 1]), (1, 2, [1, 1])])
def test_two_beams_that_write_into_one_block_need_one_copy(num_device, num_host, tiers):
    """With one block in each tier a beam moves, and alone there it shares nothing."""
    blocks = shared_blocks(num_device, num_host)
    rows = PagedRows(blocks, 1)
    make_room(rows, np.array([2], dtype=np.int32))
    rows.append(None, 2)
    rows.select(np.array([0, 0]))
    room = make_room(rows, np.ones(2, dtype=np.int32))
    assert [len(copy.pairs) for copy in room.copies] == [1]
    assert rows.tiers.tolist() == tiers
    assert blocks.pools[Tier.DEVICE].num_taken + blocks.pools[Tier.HOST].num_taken == 2
    blocks.check_integrity()


def test_a_block_that_another_cache_holds_too_is_copied_for_every_writer():
    blocks = shared_blocks(3, 0)
    rows = PagedRows(blocks, 1)
    make_room(rows, np.array([2], dtype=np.int32))
    rows.append(None, 2)
    other = rows.fork()
    rows.select(np.array([0, 0]))
    make_room(rows, np.ones(2, dtype=np.int32))
    assert blocks.num_free(Tier.DEVICE) == 0
    with pytest.raises(CapacityError):
        make_room(other, np.full(1, 3, dtype=np.int32))


def operations(blocks: SharedBlocks, memory: dict[Tier, np.ndarray]) -> Model:
    """Every way in which tables change: grow, share, copy, move, crop."""
    model = Model(blocks, memory, 2)
    model.append([[1] * 6, [2] * 3])
    model.rows.select(np.array([0, 0, 1]))
    model.values = [list(model.values[index]) for index in (0, 0, 1)]
    copied = model.rows.fork()
    model.append([[3] * 4] * 3)
    assert model.append([[4] * 4] * 3).num_moved_rows > 0
    copied.crop(2)
    copied.clear()
    return model


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that the runtime's block tables and pools execute."""

    FILES = ("generate/rows.py", "generate/placement.py", "runtime/block_pool.py")

    def __init__(self, at: int) -> None:
        self.num_left = at

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if event == "line":
            self.num_left -= 1
            if self.num_left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(work: Callable[[], object], at: int) -> bool:
    """Whether `work` was interrupted rather than done before."""
    tracer = sys.gettrace()
    try:
        sys.settrace(Interrupter(at))
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracer)
    return False


def test_an_interrupt_at_any_line_loses_no_block_and_frees_none_twice():
    blocks = shared_blocks(8, 12)
    memory = {tier: np.zeros((pool.num_blocks, BLOCK_SIZE), dtype=np.int64) for tier, pool in blocks.pools.items()}
    bystander = Model(blocks, memory, 2)
    bystander.append([[8] * 5, [9] * 2])
    at = 1
    while interrupted(lambda: operations(blocks, memory), at):
        blocks.check_integrity()
        assert sum(pool.num_taken for pool in blocks.pools.values()) == 3
        bystander.check()
        at += 7
    assert at > 200
    bystander.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.select(np.array([1, 0, 1])),
        lambda rows: rows.crop(3),
        lambda rows: rows.fork(),
        lambda rows: rows.append(None, 1),
    ],
    ids=["select", "crop", "fork", "append"],
)
def test_rows_whose_change_is_interrupted_are_what_they_were_or_what_they_become(change):
    def rows_before() -> PagedRows:
        rows = PagedRows(shared_blocks(12, 0), 2)
        make_room(rows, np.array([7, 4], dtype=np.int32))
        rows.append(np.arange(7) >= np.array([[0], [3]]), 7)
        return rows

    def state(rows: PagedRows) -> tuple[Any, ...]:
        return rows.num_columns, rows.lengths.tolist(), rows.valid.tolist()

    allowed = [rows_before(), rows_before()]
    change(allowed[1])
    at = 1
    while interrupted(partial(change, rows := rows_before()), at):
        rows.blocks.check_integrity()
        assert state(rows) in [state(each) for each in allowed]
        assert (rows.num_blocks >= rows.num_needed()).all()
        at += 1
    assert at > 2


def test_rows_that_move_together_go_on_sharing():
    """Apart, two beams of 6 blocks would not fit the host's 9."""
    blocks = shared_blocks(8, 9)
    rows = PagedRows(blocks, 1)
    make_room(rows, np.array([16], dtype=np.int32))
    rows.append(None, 16)
    rows.select(np.array([0, 0, 0, 0]))
    make_room(rows, np.full(4, 4, dtype=np.int32))
    rows.append(None, 4)
    assert blocks.pools[Tier.DEVICE].num_taken == 4 + 4
    room = make_room(rows, np.ones(4, dtype=np.int32))
    assert (rows.tiers.tolist(), room.num_moved_rows) == ([0, 0, 1, 1], 2)
    assert [len(copy.pairs) for copy in room.copies] == [4 + 2]
    assert (blocks.pools[Tier.DEVICE].num_taken, blocks.pools[Tier.HOST].num_taken) == (4 + 4, 4 + 4)
    assert (rows.table(2)[:4] == rows.table(3)[:4]).all()
    blocks.check_integrity()
