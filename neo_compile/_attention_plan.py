"""What host attention prepares ahead of a call, and checks for native code, so that a submission costs microseconds.

LayerCache       a layer's K and V blocks                   once
AttentionPlan    block tables of some rows of a sub-batch   once per iteration
BlockPairs       the block copies of a swap                 once per iteration
TokenRows        what a linear stage hands over             once per layer; plans take ranges of its rows
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neo_compile import _C
from neo_compile._host_checks import (
    IntArray,
    address,
    check_is_tensor,
    check_tensor,
    dtype_code,
    int32_array,
    pairs_array,
    window_code,
)

__all__ = ["AttentionPlan", "BlockPairs", "LayerCache", "TokenRows", "plan_decode", "plan_varlen"]

# A span below this many bytes of KV is not worth waking another thread for.
_MIN_SHARE_BYTES = 64 * 1024


class LayerCache:
    """One layer's K and V views [num_blocks, Hkv, block_size, D], prepared once so that a submit costs little.

    Strides are arbitrary but for the innermost (contiguous); K and V may differ in head_dim, not in the rest. The
    tensors are kept alive.
    """

    __slots__ = ("dtype", "k_cache", "native", "num_blocks", "v_cache")

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        code = check_tensor("k_cache", k_cache, 4)
        if check_tensor("v_cache", v_cache, 4) != code:
            raise ValueError(f"v_cache is {v_cache.dtype}, k_cache is {k_cache.dtype}: they must agree")
        num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
        if v_cache.shape[:3] != k_cache.shape[:3]:
            raise ValueError(
                f"v_cache {tuple(v_cache.shape)} and k_cache {tuple(k_cache.shape)} differ beyond head_dim"
            )
        if 0 in k_cache.shape[1:] or v_cache.shape[3] == 0:
            raise ValueError(
                f"k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}: only num_blocks may be 0"
            )
        self.k_cache, self.v_cache = k_cache, v_cache
        self.dtype, self.num_blocks = k_cache.dtype, num_blocks
        self.native = _C.LayerCache(
            k_cache.data_ptr(),
            k_cache.stride()[:3],
            v_cache.data_ptr(),
            v_cache.stride()[:3],
            num_blocks,
            code,
            num_kv_heads,
            block_size,
            head_dim,
            v_cache.shape[3],
        )


class TokenRows:
    """Rows of all tokens of a sub-batch at one layer: q, new K and V, and the output.

    q [T, Hq, D], k_new [T, Hkv, D], v_new [T, Hkv, Dv] and out [T, Hq, Dv] are contiguous CPU tensors of one dtype.
    ValueError names the one that is not. They are kept alive.
    """

    __slots__ = ("native", "out", "tensors")

    def __init__(self, q: Tensor, k_new: Tensor, v_new: Tensor, out: Tensor) -> None:
        self.tensors = (q, k_new, v_new, out)
        try:
            num_tokens, num_q_heads, head_dim = q.shape
            _, num_kv_heads, v_head_dim = v_new.shape
            dtype = q.dtype
            addresses = [x.data_ptr() for x in self.tensors if x.dtype is dtype and x.is_contiguous() and x.is_cpu]
            fit = (
                k_new.shape == (num_tokens, num_kv_heads, head_dim)
                and v_new.shape[0] == num_tokens
                and out.shape == (num_tokens, num_q_heads, v_head_dim)
            )
        except (AttributeError, RuntimeError, TypeError, ValueError):
            raise self._refusal() from None
        code = dtype_code(dtype)
        is_usable = num_tokens == 0 or (num_kv_heads > 0 and all(addresses))
        if code is None or len(addresses) != 4 or not fit or not is_usable:
            raise self._refusal()
        q_address, k_address, v_address, out_address = addresses
        self.native = _C.TokenRows.contiguous(
            q_address,
            out_address,
            k_address,
            v_address,
            code,
            num_tokens,
            num_q_heads,
            num_kv_heads,
            head_dim,
            v_head_dim,
        )
        self.out = out

    def _refusal(self) -> ValueError:
        for name, x in zip(("q", "k_new", "v_new", "out"), self.tensors, strict=True):
            check_is_tensor(name, x)
        q, k_new, v_new, out = (_describe(x) for x in self.tensors)
        return ValueError(
            "rows of a layer must be contiguous CPU tensors [tokens, heads, dim] of one dtype and number of tokens, "
            f"with the heads and dims of each other, and have memory: q {q}, k_new {k_new}, v_new {v_new}, out {out}"
        )


def _describe(x: Tensor) -> str:
    if x.layout is not torch.strided or x.is_nested:
        return f"{'nested' if x.is_nested else x.layout}"
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}, strides {x.stride()}, on {x.device}"


class BlockPairs:
    """Block copies between two pools, dst[pairs[i, 1]] = src[pairs[i, 0]], the same in every layer.

    Args:
        pairs: int [N, 2]; no block of dst twice.
        num_blocks: of src and of dst. ValueError names a pair that is out of range.

    Attributes:
        array: int64 [N, 2].
        both: a block that is read as well as written, which the two pools must not share; None if there is none.
    """

    __slots__ = ("array", "both", "native", "num_blocks")

    def __init__(self, pairs: IntArray, num_blocks: tuple[int, int]) -> None:
        self.array = pairs_array(pairs, num_blocks)
        both = np.intersect1d(*self.array.T) if self.array.size else self.array
        self.both = int(both[0]) if both.size else None
        self.num_blocks = tuple(num_blocks)
        self.native = _C.BlockPairs(address(self.array), len(self.array))

    def __len__(self) -> int:
        return len(self.array)


class AttentionPlan:
    """Block tables, query tokens and partition of one sub-batch, good for every layer.

    Made by `plan_decode` or `plan_varlen`. It holds the workspace for partials: submissions of one plan go to one pool
    (where they run one after the other).
    """

    __slots__ = ("kv_new_shapes", "native", "num_requests", "num_tokens", "out_shape", "q_shape")

    def __init__(
        self,
        native: _C.AttentionPlan,
        num_requests: int,
        num_tokens: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
    ) -> None:
        self.native = native
        self.num_requests = num_requests
        self.num_tokens = num_tokens
        self.q_shape = (num_tokens, heads[0], dims[0])
        self.out_shape = (num_tokens, heads[0], dims[1])
        self.kv_new_shapes = ((num_tokens, heads[1], dims[0]), (num_tokens, heads[1], dims[1]))

    def tiles(self) -> list[tuple[int, int, int, int]]:
        """(request, first row of q, query tokens, tokens that the first one sees) of every tile.

        A decode plan's tiles are its requests.
        """
        return [(request, row, tokens, length) for request, row, tokens, length in self.native.tiles()]

    def tasks(self, window: int | None = None) -> list[tuple[int, int, int, int | None]]:
        """(tile, token_begin, token_end, partial index or None if the tile is whole) of every task."""
        tasks = self.native.tasks(window_code(window))
        return [(tile, begin, end, None if partial < 0 else partial) for tile, begin, end, partial in tasks]


def plan_decode(
    block_tables: IntArray,
    context_lens: IntArray,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_threads: int,
    v_head_dim: int | None = None,
    min_share_bytes: int = _MIN_SHARE_BYTES,
) -> AttentionPlan:
    """A plan for one query token per request, the last of its context; at most B + num_threads tasks.

    The requests' blocks are split evenly over `num_threads` (use `pool.parallelism`). block_tables int
    [B, max_blocks] (entries past a length are never read), context_lens int [B] counting the current token; both are
    copied. ValueError names the request whose length is negative or exceeds its table.
    """
    return _plan(
        block_tables,
        context_lens,
        None,
        (num_q_heads, num_kv_heads),
        (head_dim, head_dim if v_head_dim is None else v_head_dim),
        block_size=block_size,
        num_threads=num_threads,
        min_share_bytes=min_share_bytes,
    )


def plan_varlen(
    block_tables: IntArray,
    context_lens: IntArray,
    cu_seqlens: IntArray,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_threads: int,
    v_head_dim: int | None = None,
    min_share_bytes: int = _MIN_SHARE_BYTES,
) -> AttentionPlan:
    """A plan for any number of query tokens per request: speculated tokens, chunks of a prefill, mixed with decodes.

    Request b has the query rows cu_seqlens[b] to cu_seqlens[b + 1] (int [B + 1], from 0, ascending), which are the last
    tokens of its context; context_lens counts them. The rest as in `plan_decode`. ValueError also names the request
    with more query tokens than context.
    """
    return _plan(
        block_tables,
        context_lens,
        int32_array("cu_seqlens", cu_seqlens, 1),
        (num_q_heads, num_kv_heads),
        (head_dim, head_dim if v_head_dim is None else v_head_dim),
        block_size=block_size,
        num_threads=num_threads,
        min_share_bytes=min_share_bytes,
    )


def _plan(
    block_tables: IntArray,
    context_lens: IntArray,
    cu_seqlens: npt.NDArray[np.int32] | None,
    heads: tuple[int, int],
    dims: tuple[int, int],
    *,
    block_size: int,
    num_threads: int,
    min_share_bytes: int,
) -> AttentionPlan:
    (num_q_heads, num_kv_heads), (head_dim, v_head_dim) = heads, dims
    sizes = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "block_size": block_size,
        "num_threads": num_threads,
    }
    for name, value in sizes.items():
        if not 1 <= value < 2**20:
            raise ValueError(f"{name} = {value} must be at least 1 (and below 2**20)")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads = {num_q_heads} is not a multiple of num_kv_heads = {num_kv_heads}")
    lens = int32_array("context_lens", context_lens, 1)
    tables = int32_array("block_tables", block_tables, 2)
    num_requests = lens.shape[0]
    if tables.shape[0] != num_requests:
        raise ValueError(f"block_tables has {tables.shape[0]} rows, context_lens {num_requests} entries")
    if cu_seqlens is not None and cu_seqlens.shape[0] != num_requests + 1:
        raise ValueError(
            f"cu_seqlens has {cu_seqlens.shape[0]} entries, must be {num_requests + 1}: one more than context_lens"
        )
    native = _C.AttentionPlan(
        address(tables),
        tables.shape[1],
        tables.shape[1],
        address(lens),
        0 if cu_seqlens is None else address(cu_seqlens),
        num_requests,
        num_q_heads,
        num_kv_heads,
        head_dim,
        v_head_dim,
        block_size,
        num_threads,
        min_share_bytes,
    )
    num_tokens = num_requests if cu_seqlens is None else int(cu_seqlens[-1])
    return AttentionPlan(native, num_requests, num_tokens, heads, dims)
