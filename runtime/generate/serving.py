"""One captured model with its caches: runs the tokens of one forward as one or two sub-batches.

A `TokenBlock` (what a forward was given) becomes rows for the executor:

    one new token in every row    -> the decode kernels, device rows before host rows, one or two sub-batches
    anything else                 -> one prefill chunk per row (prompts, continued contexts, verified candidates)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from neo_compile.config import StageKind
from neo_compile.errors import CapacityError
from neo_compile.runtime.batch import BatchTensors, ChunkRow, DecodeTable, assemble
from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.captured import captured_model
from neo_compile.runtime.cost_model import CostModel
from neo_compile.runtime.device import DeviceConfig, open_device
from neo_compile.runtime.executor import Executor
from neo_compile.runtime.generate.cells import find_cells
from neo_compile.runtime.generate.counters import GenerateStats
from neo_compile.runtime.generate.placement import BlockCopies, make_room
from neo_compile.runtime.generate.rows import TIERS, Bools, Int32s, PagedRows, SharedBlocks
from neo_compile.runtime.generate.strategy import Split, choose_split, observe
from neo_compile.runtime.kv_cache import CacheConfig, KVCache
from neo_compile.runtime.model_info import ModelInfo
from neo_compile.runtime.plan import Strategy
from neo_compile.runtime.profiler import load_or_measure_costs
from neo_compile.runtime.request import Tier
from neo_compile.runtime.scheduler_config import Policy, SchedulerConfig
from neo_compile.runtime.swap import LayerCopies
from neo_compile.runtime.tier_sizes import tier_sizes

Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How a model is served; see `enable`."""

    cache: CacheConfig
    policy: Policy
    device: DeviceConfig
    stages: StageKind
    cost_model: CostModel | None = None


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """The new tokens of one forward.

    Attributes:
        token_ids: int64 [B, S].
        positions: int64 [B, S] where position ids are not simply each row's next ones.
        valid: bool [B, S], False for padding; None is all True.
        wanted: int64 [K], columns whose logits are wanted.
    """

    token_ids: Int64s
    positions: Int64s | None
    valid: Bools | None
    wanted: Int64s


class Serving:
    """A captured model, its device, the memory of both tiers and who holds it.

    Raises:
        ConfigError: sizes or threads that cannot be had.
        UnsupportedModelError: the model cannot be captured exactly.
    """

    def __init__(
        self, model: torch.nn.Module, options: ServingOptions, stats: GenerateStats, lock: threading.RLock
    ) -> None:
        info = ModelInfo.of(model)
        cache = options.cache
        has_host = cache.host_blocks != 0 and cache.num_blocks("device", 1) is not None
        self.policy, self.stats = options.policy, stats
        self.has_host = has_host and Tier.HOST in self.policy.prefill_tiers
        self.device = open_device(options.device, has_host_cache=self.has_host)
        try:
            # What is made here outlives an `inference_mode` of the caller.
            with self.device.launching(), torch.inference_mode(False), torch.no_grad():
                self.staged = captured_model(model, options.stages, self.device.device_threads)
                dtype = cache.dtype or info.dtype
                sizes = tier_sizes(cache, SchedulerConfig(), self.staged.sites, dtype, info.max_model_len)
                if not self.has_host:
                    sizes[Tier.HOST] = 0
                self.memory = {
                    tier: KVCache(self.staged.sites, sizes[tier], cache.block_size, dtype, self.device.torch_device)
                    for tier in Tier
                }
                self.executor = Executor(self.staged, self.device, self.memory)
                self.cost_model = options.cost_model
                if self.cost_model is None and self.has_host:
                    self.cost_model = load_or_measure_costs(self.executor, info)
        except BaseException:
            self.device.close()
            raise
        self.vocab_size, self.memory_dtype = info.vocab_size, dtype
        self.blocks = SharedBlocks({tier: BlockPool(sizes[tier], cache.block_size, tier) for tier in Tier}, lock)
        self._tiers = [tier for tier in self.policy.prefill_tiers if tier is Tier.DEVICE or self.has_host]
        self._tiers = self._tiers or [Tier.DEVICE]
        windows = [site.window for site in self.staged.sites if site.window is not None]
        self.shortest_window = min(windows, default=None)

    def run(self, rows: PagedRows, block: TokenBlock) -> torch.Tensor:
        """Store the KV of `block` in `rows`, which grow by it, and return the wanted logits, [B, K, vocabulary].

        Logits of padding are 0.

        Raises:
            CapacityError: the rows do not fit; nothing has changed.
        """
        num_rows, num_columns = block.token_ids.shape
        if block.valid is None:
            num_new = np.full(num_rows, num_columns, dtype=np.int32)
        else:
            num_new = block.valid.sum(axis=1, dtype=np.int32)
        with self.device.launching():
            copies = self._make_room(rows, num_new)
            try:
                if num_columns == 1 and block.valid is None:
                    logits = self._decode(rows, block, copies)
                else:
                    logits = self._prefill(rows, block, copies)
            finally:
                if copies is not None:  # an interrupt before they were waited for: the tables already count on them
                    copies.finish()
        rows.append(block.valid, num_columns)
        return logits

    def store(self, rows: PagedRows, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], valid: Bools) -> None:
        """Fill empty `rows` with the KV of a dense cache.

        Args:
            layers: K and V, [B, num_kv_heads, columns, dim] each; a layer that has fewer columns than `valid` holds the
                last ones (a sliding window).
            valid: bool [B, columns].

        Raises:
            CapacityError: the rows do not fit; nothing has changed.
        """
        copies = self._make_room(rows, valid.sum(axis=1, dtype=np.int32))
        if copies is not None:
            copies.finish()
        rows.append(valid, valid.shape[1])
        for index, (keys, values) in enumerate(layers):
            first = valid.shape[1] - keys.shape[2]
            for tier, cells in find_cells(rows, first).items():
                self.memory[tier].write(index, cells.slots, cells.of(keys), cells.of(values))

    def _make_room(self, rows: PagedRows, num_new: Int32s) -> LayerCopies | None:
        """Blocks for new tokens, and the copies for it, under way."""
        try:
            room = make_room(rows, num_new, self._tiers)
            self.stats.num_swaps += room.num_moved_rows
            return self._start_copies(room.copies)
        except CapacityError:
            raise
        except BaseException:
            rows.clear()  # an interrupt: the tables may count on copies that nobody will make
            raise

    def _start_copies(self, copies: Sequence[BlockCopies]) -> LayerCopies | None:
        """Make all copies but the last, which may overlap the iteration: each may write what the one before reads."""
        started = None
        for copy in copies:
            if started is not None:
                started.finish()
            # The emulated link throttles what crosses it.
            max_gbps = self.device.swap_gbps if copy.source is not copy.target else None
            source, target = self.memory[copy.source], self.memory[copy.target]
            started = LayerCopies(source, target, copy.pairs, self.device.host_pool, max_gbps)
        return started

    def _decode(self, rows: PagedRows, block: TokenBlock, copies: LayerCopies | None) -> torch.Tensor:
        """One new token in every row."""
        context_lens = rows.lengths + 1
        on_host = rows.tiers != TIERS.index(Tier.DEVICE)
        device_rows, host_rows = np.flatnonzero(~on_host), np.flatnonzero(on_host)
        split = choose_split(
            context_lens[device_rows], context_lens[host_rows], self.cost_model, self.policy.strategies
        )
        batch_1 = host_rows[: split.num_batch_1]
        groups = [(device_rows, host_rows[split.num_batch_1 :])]
        if len(batch_1):
            groups.append((batch_1[:0], batch_1))
        batches = [self._decode_batch(rows, block, context_lens, group) for group in groups]
        parts, times = self.executor.run_batches(batches, copies)
        logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        observe(split, times, self.cost_model)
        self._count(split, len(host_rows))
        if len(host_rows):
            order = np.concatenate([*groups[0], *(row for group in groups[1:] for row in group)])
            logits = logits[torch.from_numpy(np.argsort(order))]
        return logits.unsqueeze(1)[:, block.wanted.tolist()] if len(block.wanted) != 1 else logits.unsqueeze(1)

    def _decode_batch(
        self, rows: PagedRows, block: TokenBlock, context_lens: Int32s, group: tuple[Int64s, Int64s]
    ) -> BatchTensors:
        decodes = {}
        for tier, members in zip(TIERS, group, strict=True):
            if not len(members):
                continue
            width = int(rows.num_blocks[members].max())
            positions = None if block.positions is None else block.positions[members, 0]
            table = rows.tables[:, :width]
            if len(members) < rows.num_rows:
                table = table[members]
            decodes[tier] = DecodeTable(block.token_ids[members, 0], context_lens[members], table, positions)
        return assemble((), decodes, self.executor.layout)

    def _count(self, split: Split, num_host_rows: int) -> None:
        stats = self.stats
        stats.num_host_row_decodes += num_host_rows
        if split.strategy is Strategy.PIPELINED:
            stats.num_pipelined += 1
        elif split.strategy is Strategy.UNSPLIT:
            stats.num_unsplit += 1
        else:
            stats.num_device_only += 1

    def _prefill(self, rows: PagedRows, block: TokenBlock, copies: LayerCopies | None) -> torch.Tensor:
        """Any number of new tokens in each row, as one batch of chunks."""
        num_rows, num_wanted = len(block.token_ids), len(block.wanted)
        shown = np.ones((num_rows, num_wanted), dtype=np.bool_)
        chunks = []
        for row in range(num_rows):
            token_ids, wanted = block.token_ids[row], block.wanted
            positions = None if block.positions is None else block.positions[row]
            if block.valid is not None:
                valid = block.valid[row]
                shown[row] = valid[wanted]
                token_ids, wanted = token_ids[valid], (np.cumsum(valid) - 1)[wanted[shown[row]]]
                positions = None if positions is None else positions[valid]
            if len(token_ids):
                tier, start = TIERS[rows.tiers[row]], int(rows.lengths[row])
                chunks.append(ChunkRow(tier, start, token_ids, rows.table(row), wanted, positions))
        (logits,), _ = self.executor.run_batches([assemble(chunks, {}, self.executor.layout)], copies)
        self.stats.num_prefills += 1
        if shown.all():
            return logits.view(num_rows, num_wanted, logits.shape[-1])
        padded = logits.new_zeros((num_rows, num_wanted, logits.shape[-1]))
        padded[torch.from_numpy(shown)] = logits
        return padded
