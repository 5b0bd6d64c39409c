"""The allocator: random traces, and the errors that must not be silent."""

import random

import pytest

from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.request import Tier


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_block_count_is_the_ceiling(tokens, blocks):
    assert BlockPool(4, 16, Tier.DEVICE).num_blocks_for(tokens) == blocks


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 7, 64])
def test_random_trace_keeps_integrity(num_blocks):
    rng = random.Random(num_blocks)
    pool = BlockPool(num_blocks, 16, Tier.HOST)
    held: list[list[int]] = []
    for _ in range(300):
        wanted = rng.randint(0, 5)
        if pool.can_allocate(wanted) and rng.random() < 0.6:
            held.append(pool.allocate(wanted))
        elif held:
            pool.free(held.pop(rng.randrange(len(held))))
        pool.check_integrity()
        taken = [block for blocks in held for block in blocks]
        assert len(set(taken)) == len(taken) == pool.num_taken
    for blocks in held:
        pool.free(blocks)
    assert pool.num_free == num_blocks
    pool.check_integrity()


def test_freeing_twice_is_caught():
    pool = BlockPool(2, 16, Tier.DEVICE)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_taking_more_than_there_is_is_caught():
    with pytest.raises(AssertionError, match="3 of 2 free device blocks"):
        BlockPool(2, 16, Tier.DEVICE).allocate(3)


def test_impossible_sizes_are_refused_by_name():
    with pytest.raises(ValueError, match="device_blocks=-1"):
        BlockPool(-1, 16, Tier.DEVICE)
    with pytest.raises(ValueError, match="block_size=0"):
        BlockPool(1, 0, Tier.DEVICE)


def test_integrity_check_sees_a_lost_block():
    pool = BlockPool(4, 16, Tier.DEVICE)
    pool.allocate(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="2 taken"):
        pool.check_integrity()
