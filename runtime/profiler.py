"""Measures the cost tables of one model on this machine: a quick profile of a few seconds, kept on disk.

What is measured is what the executor runs: the captured linear stages (with attention left out), the prefill attention,
the decode kernels on either side's threads, the block copies. KV is spread over more memory than the last-level cache
holds, as it is when the layers of an iteration follow each other. All times are seen from the launching thread, so
submission and wake-up are included (`launch_ms` is 0).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import neo_compile
from neo_compile import _native
from neo_compile.attention import AttentionSite
from neo_compile.errors import ConfigError
from neo_compile.host_attention import plan_decode
from neo_compile.paths import cache_dir
from neo_compile.runtime.cost_tables import TableCostModel
from neo_compile.runtime.device import Workers
from neo_compile.runtime.executor import Executor
from neo_compile.runtime.kv_cache import KVCache
from neo_compile.runtime.model_info import ModelInfo
from neo_compile.runtime.prefill import attend_chunk
from neo_compile.runtime.request import Tier

logger = logging.getLogger(__name__)

LINEAR_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512)
PREFILL_TOKENS = (16, 64, 128, 256, 512)
DECODE_REQUESTS = (1, 4, 16, 64)
DECODE_KV_TOKENS = (64, 512, 4096, 16384)
SWAP_BLOCKS = (1, 16, 128)
MAX_SAMPLED_ROWS = 64  # rows of a large iteration are mostly prefill tokens, whose logits are not computed
_COLD_BYTES = 192 * 2**20  # well above the last-level cache
_NUM_REPEATS = 3


def load_or_measure_costs(executor: Executor, info: ModelInfo) -> TableCostModel:
    """The cost tables for this model on this machine, from the user's cache directory or measured now.

    Call inside `device.launching()`.
    """
    key = _key(executor, info)
    path = _path(key)
    try:
        return TableCostModel.from_json(path.read_text(), key=key)
    except FileNotFoundError:
        pass
    except (ConfigError, ValueError, KeyError) as error:
        logger.warning("cost tables at %s are not usable (%s): measuring again", path, error)
    logger.info("measuring the costs of %s (once; kept at %s)", info.fingerprint, path)
    costs = TableCostModel(measure_tables(executor), num_layers=len(executor.staged.sites), key=key)
    _store(path, costs.to_json())
    return costs


def measure_tables(executor: Executor) -> dict[str, Any]:
    """Milliseconds per layer of each part, as `TableCostModel` reads them."""
    site = executor.staged.sites[0]
    device, block_size = executor.device, executor.caches[Tier.DEVICE].block_size
    dtype = executor.caches[Tier.DEVICE].dtype
    bench = _KernelBench(site, block_size, dtype)
    return {
        "linear": _measure_linear(executor),
        "prefill_attention": _measure_prefill(site),
        "device_decode": bench.decode_table(device.attention_pool),
        "host_attention": bench.decode_table(device.host_pool),
        "swap": bench.swap_table(device.host_pool, device.swap_gbps),
    }


class _NoAttention:
    """An attention handler that costs nothing: linear stages by themselves."""

    def begin(self, site: AttentionSite, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any) -> torch.Tensor:
        return torch.zeros((q.shape[0], site.num_q_heads, site.v_head_dim), dtype=q.dtype)

    def finish(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket


def _measure_linear(executor: Executor) -> dict[str, list[float]]:
    num_layers = len(executor.staged.sites)
    times = []
    for num_tokens in LINEAR_TOKENS:
        input_ids = torch.ones((1, num_tokens), dtype=torch.int64)
        position_ids = torch.arange(num_tokens).unsqueeze(0)
        logit_rows = torch.arange(min(num_tokens, MAX_SAMPLED_ROWS))

        def run(
            ids: torch.Tensor = input_ids, positions: torch.Tensor = position_ids, rows: torch.Tensor = logit_rows
        ) -> None:
            executor.staged.run(_NoAttention(), input_ids=ids, position_ids=positions, logit_rows=rows)

        times.append(_median_ms(run) / num_layers)
    return {"tokens": list(map(float, LINEAR_TOKENS)), "ms": _increasing(times)}


def _measure_prefill(site: AttentionSite) -> dict[str, list[float]]:
    times = []
    for num_tokens in PREFILL_TOKENS:
        q = torch.randn(num_tokens, site.num_q_heads, site.head_dim).to(site.dtype)
        k = torch.randn(site.num_kv_heads, num_tokens, site.head_dim).to(site.dtype)
        v = torch.randn(site.num_kv_heads, num_tokens, site.v_head_dim).to(site.dtype)
        sinks = torch.zeros(site.num_q_heads) if site.has_sinks else None
        times.append(_median_ms(lambda q=q, k=k, v=v, s=sinks: attend_chunk(site, q, k, v, s)))
    return {"tokens": list(map(float, PREFILL_TOKENS)), "ms": _increasing(times)}


class _KernelBench:
    """Times decode attention and block copies on a pool of its own, one layer large enough to be cold."""

    def __init__(self, site: AttentionSite, block_size: int, dtype: torch.dtype) -> None:
        self._site, self._block_size = site, block_size
        block_bytes = site.num_kv_heads * (site.head_dim + site.v_head_dim) * block_size * dtype.itemsize
        largest = DECODE_KV_TOKENS[-1] // block_size + DECODE_REQUESTS[-1]
        num_blocks = max(_COLD_BYTES // block_bytes, 2 * largest)
        self._cache = KVCache([site], num_blocks, block_size, dtype, torch.device("cpu"))
        self._cache.pools[0].zero_()
        self._random = random.Random(0)

    def decode_table(self, pool: Workers) -> dict[str, Any]:
        """Decode attention by (requests, KV tokens in all), on `pool`."""
        rows = []
        for num_requests in DECODE_REQUESTS:
            row = [self._decode_ms(pool, num_requests, kv_tokens) for kv_tokens in DECODE_KV_TOKENS]
            rows.append(_increasing(row))
        return {
            "requests": list(map(float, DECODE_REQUESTS)),
            "kv_tokens": list(map(float, DECODE_KV_TOKENS)),
            "ms": rows,
        }

    def swap_table(self, pool: Workers, max_gbps: float | None) -> dict[str, list[float]]:
        """Block copies of one layer by number of blocks, one block beside its neighbour."""
        layer, times = self._cache.pools[0], []
        for num_blocks in SWAP_BLOCKS:

            def copy(n: int = num_blocks) -> None:
                start = self._random.randrange(self._cache.num_blocks - 2 * n + 1)
                pairs = np.stack([np.arange(start, start + n), np.arange(start + n, start + 2 * n)], axis=1)
                pool.submit_copy(layer, layer, pairs.astype(np.int64), max_gbps=max_gbps).wait()

            times.append(_median_ms(copy))
        return {"blocks": list(map(float, SWAP_BLOCKS)), "ms": _increasing(times)}

    def _decode_ms(self, pool: Workers, num_requests: int, kv_tokens: int) -> float:
        site = self._site
        context_len = max(1, kv_tokens // num_requests)
        blocks_each = -(-context_len // self._block_size)
        q = torch.randn(num_requests, site.num_q_heads, site.head_dim).to(site.dtype)
        out = torch.empty(num_requests, site.num_q_heads, site.v_head_dim, dtype=site.dtype)

        def plan() -> Any:
            chosen = self._random.sample(range(self._cache.num_blocks), num_requests * blocks_each)
            return plan_decode(
                np.array(chosen, dtype=np.int32).reshape(num_requests, blocks_each),
                np.full(num_requests, context_len, dtype=np.int32),
                num_q_heads=site.num_q_heads,
                num_kv_heads=site.num_kv_heads,
                head_dim=site.head_dim,
                v_head_dim=site.v_head_dim,
                block_size=self._block_size,
                num_threads=pool.parallelism,
            )

        def run(decode_plan: Any) -> None:
            layer = self._cache.layer(0)
            pool.submit_layer(decode_plan, layer, q, out, scale=site.scale, window=site.window).wait()

        return _median_ms(run, setup=plan)


def _median_ms(run: Callable[..., object], setup: Callable[[], object] | None = None) -> float:
    """Median of a few runs after one to warm up; `setup` makes each run's argument outside the timing."""
    times = []
    for _ in range(_NUM_REPEATS + 1):
        arguments = () if setup is None else (setup(),)
        start = time.perf_counter()
        run(*arguments)
        times.append((time.perf_counter() - start) * 1e3)
    return median(times[1:])


def _increasing(times: list[float]) -> list[float]:
    """Noise must not make more work look cheaper."""
    return [float(time_ms) for time_ms in np.maximum.accumulate(np.array(times))]


def _key(executor: Executor, info: ModelInfo) -> dict[str, Any]:
    """All that the tables depend on."""
    device, cache = executor.device, executor.caches[Tier.DEVICE]
    return {
        "model": info.fingerprint,
        "cache_dtype": str(cache.dtype),
        "block_size": cache.block_size,
        "device": device.kind,
        "device_threads": device.device_threads,
        "host_threads": device.host_threads,
        "swap_gbps": device.swap_gbps,
        "host_slowdown": device.host_slowdown,
        "stages": executor.staged.num_artifacts,
        "isa": _native.isa(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "neo_compile": neo_compile.__version__,
    }


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "costs" / f"{key['model']}-{digest}.json"


def _store(path: Path, text: str) -> None:
    """Write atomically; a cache directory that cannot be written is a warning, not an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        logger.warning("cannot keep the measured costs at %s: %s", path, error)
