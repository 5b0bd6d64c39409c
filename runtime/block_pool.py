"""Ids of the KV-cache blocks of one tier: which are free, which are taken. Owns no memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neo_compile.runtime.request import Tier


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each.

    Freed blocks are reused last-in first-out, so that a small working set stays warm.
    """

    def __init__(self, num_blocks: int, block_size: int, tier: Tier) -> None:
        if num_blocks < 0:
            raise ValueError(f"{tier.value}_blocks={num_blocks}, must not be negative")
        if block_size < 1:
            raise ValueError(f"block_size={block_size}, must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tier = tier
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_taken = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_block_ids(self) -> tuple[int, ...]:
        """Free blocks; the last one is given out next."""
        return tuple(self._free)

    @property
    def num_taken(self) -> int:
        return self.num_blocks - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, rounded up."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks; ask `can_allocate` first."""
        assert 0 <= num_blocks <= len(self._free), f"{num_blocks} of {len(self._free)} free {self.tier.value} blocks"
        if num_blocks == 0:
            return []
        taken = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        for block_id in taken:
            self._is_taken[block_id] = 1
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        """Gives blocks back; each must be taken."""
        for block_id in block_ids:
            assert 0 <= block_id < self.num_blocks, f"{self.tier.value} block {block_id} of {self.num_blocks}"
            assert self._is_taken[block_id], f"{self.tier.value} block {block_id} freed twice"
            self._is_taken[block_id] = 0
            self._free.append(block_id)

    def reset(self, is_taken: Sequence[bool]) -> None:
        """From now on exactly these blocks are taken, whatever was before."""
        self._is_taken = bytearray(is_taken)
        self._free = [block_id for block_id in range(self.num_blocks - 1, -1, -1) if not self._is_taken[block_id]]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either free, once, or taken."""
        assert len(set(self._free)) == len(self._free), f"{self.tier.value}: a block is free twice"
        assert not any(self._is_taken[block_id] for block_id in self._free), f"{self.tier.value}: free and taken"
        num_taken = sum(self._is_taken)
        assert num_taken + len(self._free) == self.num_blocks, (
            f"{self.tier.value}: {num_taken} taken + {len(self._free)} free != {self.num_blocks}"
        )
