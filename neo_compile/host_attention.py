"""Attention on the host: a pool of native threads, plans made once per iteration, one submission per layer.

    plan = plan_decode(block_tables, context_lens, ...)      once per sub-batch and iteration
    for each layer:
        ticket = pool.submit(plan, q, k_cache, v_cache, out, scale=...)   returns at once
        ...                                                  the device runs the other sub-batch's linear stage
        ticket.wait()                                        GIL free; then `out` is valid

`plan_varlen` in place of `plan_decode` serves several query tokens per request (speculation, chunks of a prefill).
`paged_decode` and `paged_attention_varlen` are all of it in one synchronous, fully validated call. Legend: B requests,
T query tokens, Hq / Hkv query / KV heads, D head_dim. Everything a kernel could trip over (dtype, shape, stride, block
id, device) is checked before native code runs.

Attention is causal softmax attention with an optional sliding window, soft cap and sinks. ALiBi and other biases that
are added to the logits are not supported: there is no argument for them, and models that need one are refused when
they are captured.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from neo_compile import _C, _native
from neo_compile._attention_plan import AttentionPlan, BlockPairs, LayerCache, TokenRows, plan_decode, plan_varlen
from neo_compile._C import Ticket
from neo_compile._host_checks import (
    IntArray,
    check_out,
    check_tensor,
    rows,
    sinks_address,
    softcap_code,
    window_code,
)

__all__ = [
    "AttentionPlan",
    "BlockPairs",
    "LayerCache",
    "Ticket",
    "TokenRows",
    "WorkerPool",
    "paged_attention_varlen",
    "paged_decode",
    "plan_decode",
    "plan_varlen",
]

_SPIN_US = 50.0
_NO_ROWS = _C.Rows()


class WorkerPool:
    """Persistent native threads that run attention and block copies in the order of submission.

    num_threads = 0 runs everything inside `submit`. `participate` lets the thread that waits take tasks as well, so D
    cores are D - 1 workers and the caller. `cpus` pins worker i to cpus[i % len(cpus)]; where that is not permitted
    there is a RuntimeWarning and the workers float. Idle workers spin for `spin_us`, then sleep. `isa` overrides the
    kernels (see `_native.available_isas`). slowdown > 1 makes attention take that many times as long, by threads that
    idle after each of their tasks: it plays a host whose memory is so much slower. Copies have a throttle of their own.
    """

    def __init__(
        self,
        num_threads: int,
        cpus: Sequence[int] | None = None,
        *,
        participate: bool = False,
        isa: str | None = None,
        spin_us: float = _SPIN_US,
        slowdown: float = 1.0,
    ) -> None:
        if not 0 <= num_threads <= 4096:
            raise ValueError(f"num_threads = {num_threads} must be between 0 and 4096")
        if cpus is not None and (len(cpus) == 0 or min(cpus) < 0):
            raise ValueError(f"cpus = {list(cpus)} must be CPU ids, at least one")
        if spin_us < 0:
            raise ValueError(f"spin_us = {spin_us} must not be negative")
        if not 1.0 <= slowdown < 1e6:
            raise ValueError(f"slowdown = {slowdown} must be at least 1")
        kernels = _native.isa() if isa is None else _native.resolve_isa(isa)
        self._native = _C.Pool(num_threads, list(cpus or ()), participate, int(spin_us * 1000), kernels)
        if slowdown > 1.0:
            self._native.slow_attention(slowdown)
        if self._native.pin_failures:
            failed = self._native.pin_failures
            warnings.warn(f"could not pin host workers to CPUs {failed}; they float", RuntimeWarning, stacklevel=2)

    @property
    def num_threads(self) -> int:
        """Worker threads, the participating caller not counted."""
        return self._native.num_threads

    @property
    def parallelism(self) -> int:
        """Threads that take tasks: what `plan_decode` should split for."""
        return self._native.parallelism

    @property
    def isa(self) -> str:
        """The kernel set this pool runs."""
        return self._native.isa

    def submit(
        self,
        plan: AttentionPlan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
    ) -> Ticket:
        """`submit_layer` on the two views of a layer; prepare a `LayerCache` once where microseconds matter."""
        layer = LayerCache(k_cache, v_cache)
        return self.submit_layer(
            plan, layer, q, out, scale=scale, window=window, softcap=softcap, sinks=sinks, k_new=k_new, v_new=v_new
        )

    def submit_layer(
        self,
        plan: AttentionPlan,
        layer: LayerCache,
        q: Tensor,
        out: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
    ) -> Ticket:
        """Queues one layer's attention: out [T, Hq, Dv] = softmax(scale q K^T) V over the cached tokens, causal.

        q [T, Hq, D] (T = B for a decode plan), out and k_new / v_new [T, Hkv, D] may be fp32, fp16 or bf16, strided but
        for the innermost dimension. With k_new and v_new, the query tokens' rows are first written to their positions,
        the last ones of each context. window: the last w tokens, the current included; softcap: s = cap * tanh(s /
        cap); sinks fp32 [Hq]: an extra logit in the softmax's denominator. Tensors stay alive until the ticket is
        waited for (or dropped, which waits). ValueError names what does not fit.
        """
        q_rows, out_rows = rows("q", q, plan.q_shape), rows("out", out, plan.out_shape)
        if (k_new is None) != (v_new is None):
            raise ValueError("k_new and v_new go together: one of them is None")
        k_shape, v_shape = plan.kv_new_shapes
        k_rows = _NO_ROWS if k_new is None else rows("k_new", k_new, k_shape)
        v_rows = _NO_ROWS if v_new is None else rows("v_new", v_new, v_shape)
        heads, dims = (plan.q_shape[1], k_shape[1]), (k_shape[2], v_shape[2])
        token_rows = _C.TokenRows(q_rows, out_rows, k_rows, v_rows, plan.num_tokens, heads, dims)
        options = (scale, window_code(window), softcap_code(softcap), sinks_address(sinks, plan.q_shape[1]))
        refs = (plan, layer, q, out, sinks, k_new, v_new)
        return self._native.submit_attention(plan.native, layer.native, token_rows, 0, *options, refs)

    def submit_rows(
        self,
        plan: AttentionPlan,
        layer: LayerCache,
        rows: TokenRows,
        first_row: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Ticket:
        """As `submit_layer` for the plan's tokens from `first_row` of `rows` on, whose K and V it appends.

        It costs half of `submit_layer` on slices, with the cold caches that a linear stage leaves.
        """
        if type(first_row) is not int or abs(first_row) >= 2**31:
            raise ValueError(f"first_row = {first_row!r} must be a row's number")
        options = (scale, window_code(window), softcap_code(softcap), sinks_address(sinks, plan.q_shape[1]))
        refs = (plan, layer, rows.tensors, sinks)
        return self._native.submit_attention(plan.native, layer.native, rows.native, first_row, *options, refs)

    def submit_copy(
        self, src: Tensor, dst: Tensor, pairs: IntArray | BlockPairs, max_gbps: float | None = None
    ) -> Ticket:
        """Queues block copies dst[pairs[i, 1]] = src[pairs[i, 0]]; `BlockPairs` for several layers are checked once.

        src, dst: contiguous pools [num_blocks, ...] of one dtype and block shape. max_gbps throttles the whole copy (an
        emulated link). ValueError names the pair that is out of range, a block written twice, or (src and dst being one
        pool) a block both read and written.
        """
        for name, pool in (("src", src), ("dst", dst)):
            if not isinstance(pool, Tensor) or not pool.is_cpu or not pool.is_contiguous() or pool.dim() == 0:
                raise ValueError(f"{name} must be a contiguous CPU tensor [num_blocks, ...]")
        if src.dtype != dst.dtype or src.shape[1:] != dst.shape[1:]:
            raise ValueError(
                f"blocks differ: src {src.dtype} {tuple(src.shape[1:])}, dst {dst.dtype} {tuple(dst.shape[1:])}"
            )
        if max_gbps is not None and not max_gbps > 0:
            raise ValueError(f"max_gbps = {max_gbps} must be positive (None: no throttle)")
        num_blocks = (src.shape[0], dst.shape[0])
        if not isinstance(pairs, BlockPairs):
            pairs = BlockPairs(pairs, num_blocks)
        elif pairs.num_blocks != num_blocks:
            raise ValueError(f"the pairs were made for pools of {pairs.num_blocks} blocks, these have {num_blocks}")
        src_address, dst_address = src.data_ptr(), dst.data_ptr()
        if len(pairs) and not (src_address and dst_address) and src.numel():
            raise ValueError("src or dst has no memory (a fake tensor, or one whose storage was freed)")
        if pairs.both is not None and src_address == dst_address and src.numel():
            raise ValueError(f"pairs read and write block {pairs.both} of the same pool")
        block_bytes = math.prod(src.shape[1:]) * src.element_size()
        gbps = max_gbps or 0.0
        return self._native.submit_copy(src_address, dst_address, block_bytes, pairs.native, gbps, (src, dst))

    def submit_first_touch(self, buffer: Tensor) -> Ticket:
        """Queues that the workers touch a fresh contiguous buffer, whose pages then lie on their memory nodes.

        It is interleaved among them by 2 MiB. A byte of every page becomes 0, so call it before anything is stored.
        """
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError("buffer must be a contiguous CPU tensor")
        return self._native.submit_first_touch(buffer.data_ptr(), buffer.numel() * buffer.element_size(), buffer)

    def submit_read(self, buffer: Tensor, streams: int = 1) -> Ticket:
        """Queues a read of a contiguous buffer by all workers: bytes / (end_ns - start_ns) is the bandwidth.

        streams: places far apart at which every worker reads by turns, at most 64 (a core that reads one place only
        does not get all that the memory gives). Up to 128 bytes of each may be left out at its end.
        """
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError("buffer must be a contiguous CPU tensor")
        if not 1 <= streams <= 64:
            raise ValueError(f"streams = {streams} must be between 1 and 64")
        return self._native.submit_read(buffer.data_ptr(), buffer.numel() * buffer.element_size(), streams, buffer)

    def wait(self, ticket: Ticket) -> None:
        """Same as `ticket.wait()`."""
        ticket.wait()

    def close(self) -> None:
        """Finishes what is queued, then ends the threads. Tickets stay valid; further submits raise RuntimeError."""
        self._native.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def paged_decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: IntArray,
    context_lens: IntArray,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Decode attention of B requests over a paged cache, synchronous; returns `out` [B, Hq, Dv] (default: q's dtype).

    k_cache / v_cache [num_blocks, Hkv, block_size, D], fp32 / fp16 / bf16, any outer strides; the rest as in
    `plan_decode` and `WorkerPool.submit_layer`. A request of length 0 gives zeros. num_threads None: all usable CPUs.
    ValueError names the offending value.
    """
    plan = functools.partial(plan_decode, block_tables, context_lens)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    return _attend(plan, q_BHD, k_cache, v_cache, options, out, num_threads)


def paged_attention_varlen(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: IntArray,
    context_lens: IntArray,
    cu_seqlens: IntArray,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """`paged_decode` for any number of query tokens per request, causal; returns `out` [T, Hq, Dv].

    Rows cu_seqlens[b] to cu_seqlens[b + 1] of q are the last tokens of request b's context, which context_lens counts:
    of n rows, row i sees the positions up to context_lens[b] - n + i, and with a window the last w of those. k_new and
    v_new [T, Hkv, D] are written to these positions first; without them the caches hold the tokens already. The rest
    as in `plan_varlen` and `WorkerPool.submit_layer`.
    """
    plan = functools.partial(plan_varlen, block_tables, context_lens, cu_seqlens)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "k_new": k_new, "v_new": v_new}
    return _attend(plan, q_THD, k_cache, v_cache, options, out, num_threads)


def _attend(
    make_plan: Callable[..., AttentionPlan],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    options: dict[str, Any],
    out: Tensor | None,
    num_threads: int | None,
) -> Tensor:
    layer = LayerCache(k_cache, v_cache)
    check_tensor("q", q, 3)
    if q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[2]}, k_cache {k_cache.shape[3]}")
    pool = _shared_pool(len(_native.usable_cpus()) if num_threads is None else num_threads, os.getpid(), _native.isa())
    plan = make_plan(
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=k_cache.shape[3],
        v_head_dim=v_cache.shape[3],
        block_size=k_cache.shape[2],
        num_threads=pool.parallelism,
    )
    if out is None:
        out = torch.empty(plan.out_shape, dtype=q.dtype)
    else:
        inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **options}
        check_out(out, {name: x for name, x in inputs.items() if isinstance(x, Tensor)})
    pool.submit_layer(plan, layer, q, out, **options).wait()
    return out


@functools.cache
def _shared_pool(num_threads: int, pid: int, isa: str) -> WorkerPool:
    """Pools of the synchronous calls, per process (threads do not survive a fork)."""
    if num_threads < 1:
        raise ValueError(f"num_threads = {num_threads} must be at least 1")
    return WorkerPool(num_threads - 1, participate=True, isa=isa)
