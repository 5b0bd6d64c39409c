"""Several query tokens per request against float64, with every kernel set that this machine runs.

Everything that no query token may see is NaN (decode_cases): before the first one's window, beyond the context, in
blocks that nobody owns. So a causal or window edge that is off by one shows.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from decode_cases import DecodeCase, VarlenCase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neo_compile.host_attention import LayerCache, TokenRows, WorkerPool, paged_attention_varlen, plan_varlen

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A decode, speculated tokens, a chunk in the middle, a whole prompt, a request without a query token.
CONTEXTS = [40, 33, 70, 20, 25]
QUERIES = [1, 4, 37, 20, 0]


def mixed(**options: Any) -> VarlenCase:
    return VarlenCase(CONTEXTS, query_lens=QUERIES, **options)


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 2), (7, 1), (32, 8)], ids=str)
def test_head_ratios(pool: WorkerPool, seed: int, kv_dtype: torch.dtype, heads: tuple[int, int]) -> None:
    case = mixed(num_q_heads=heads[0], num_kv_heads=heads[1], kv_dtype=kv_dtype, seed=seed)
    case.check(case.run(pool))


@pytest.mark.parametrize("dims", [(64, 64), (24, 16), (16, 24), (192, 128), (5, 33), (256, 256)], ids=str)
def test_head_dims(pool: WorkerPool, seed: int, dims: tuple[int, int]) -> None:
    case = mixed(head_dim=dims[0], v_head_dim=dims[1], kv_dtype=torch.bfloat16, num_q_heads=4, seed=seed)
    case.check(case.run(pool))


@pytest.mark.parametrize("queries", [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("before", [0, 1, 15, 16, 50])
def test_chunk_lengths(pool: WorkerPool, seed: int, queries: int, before: int) -> None:
    """Around tiles and blocks, with and without a context before the chunk."""
    case = VarlenCase([before + queries], query_lens=[queries], num_q_heads=4, head_dim=16, seed=seed)
    for num_threads in (1, 4):
        case.check(case.run(pool, num_threads))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 36, 37, 38, 69, 70, 71, 1000])
def test_window_edges(pool: WorkerPool, seed: int, window: int) -> None:
    case = mixed(window=window, num_q_heads=4, head_dim=24, kv_dtype=torch.float16, seed=seed)
    for num_threads in (1, 5):
        case.check(case.run(pool, num_threads))


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_softcap_sinks_window_together(
    pool: WorkerPool, seed: int, kv_dtype: torch.dtype, softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    case = mixed(kv_dtype=kv_dtype, softcap=softcap, has_sinks=has_sinks, window=window, head_dim=40, seed=seed)
    case.check(case.run(pool))


@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
def test_block_sizes(pool: WorkerPool, seed: int, block_size: int) -> None:
    case = mixed(block_size=block_size, num_q_heads=4, head_dim=16, kv_dtype=torch.bfloat16, seed=seed)
    case.check(case.run(pool))


def test_one_token_each_is_decode(pool: WorkerPool, seed: int) -> None:
    """Bit for bit: it takes the same path."""
    case = DecodeCase([100, 3, 17], window=50, has_sinks=True, kv_dtype=torch.bfloat16, seed=seed)
    chunked = VarlenCase(
        **{f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.init}, query_lens=[1] * 3
    )
    assert chunked.plan().tasks(50) == case.plan().tasks(50)
    assert torch.equal(chunked.run(pool), case.run(pool))


def test_strided_q_and_out(pool: WorkerPool, seed: int) -> None:
    case = mixed(head_dim=40, q_dtype=torch.bfloat16, seed=seed)
    wide_q = torch.randn(8, case.num_rows, 50).bfloat16()
    wide_q[:, :, 5:45] = case.q.transpose(0, 1)
    case.q = wide_q[:, :, 5:45].transpose(0, 1)
    wide_out = torch.full((case.num_rows, 10, 41), 7.0)
    case.submit(pool, wide_out[:, 1:9, :40]).wait()
    case.check(wide_out[:, 1:9, :40])
    wide_out[:, 1:9, :40] = 7.0
    assert bool((wide_out == 7.0).all()), "wrote outside of out"


@pytest.mark.parametrize("new_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v_head_dim", [20, 300])
def test_append_in_the_same_call(
    pool: WorkerPool, seed: int, kv_dtype: torch.dtype, new_dtype: torch.dtype, v_head_dim: int
) -> None:
    """All new tokens are in the cache before any is attended to, and nothing else is written."""
    case = mixed(head_dim=20, v_head_dim=v_head_dim, num_q_heads=4, kv_dtype=kv_dtype, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    k_new = torch.randn(case.num_rows, 2, 20, generator=rng).to(new_dtype)
    v_new = torch.randn(2, case.num_rows, v_head_dim, generator=rng).to(new_dtype).transpose(0, 1)
    expected = [case.k_cache.clone(), case.v_cache.clone()]
    for b, (length, queries) in enumerate(zip(CONTEXTS, QUERIES, strict=True)):
        row = int(case.cu_seqlens[b])
        for i, token in enumerate(range(length - queries, length)):
            block = int(case.block_tables[b, token // 16])
            for cache, new in zip(expected, (k_new, v_new), strict=True):
                cache[block, :, token % 16] = new[row + i].to(kv_dtype)
            case.k_cache[block, :, token % 16] = case.v_cache[block, :, token % 16] = float("nan")
    out = case.new_out()
    case.submit(pool, out, k_new=k_new, v_new=v_new).wait()
    for cache, wanted in zip((case.k_cache, case.v_cache), expected, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), wanted.nan_to_num(7.0))
    case.check(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v_head_dim", [16, 40])
def test_plans_of_ranges_of_one_layers_rows(pool: WorkerPool, seed: int, dtype: torch.dtype, v_head_dim: int) -> None:
    """As a sub-batch submits: chunks and decodes, each from its own row on, and nothing else is read or written."""
    shared = {"head_dim": 16, "num_q_heads": 4, "kv_dtype": dtype, "q_dtype": dtype, "out_dtype": dtype}
    shared |= {"v_head_dim": v_head_dim, "has_sinks": True, "window": 30}
    cases = [mixed(seed=seed, **shared), DecodeCase([40, 3, 17], seed=seed + 1, **shared)]
    first_rows = [2, 2 + cases[0].num_rows + 1]
    num_tokens = first_rows[1] + cases[1].num_rows + 2
    rng = torch.Generator().manual_seed(seed)
    q, k, v, out = (
        torch.full((num_tokens, heads, dim), float("nan"), dtype=dtype)
        for heads, dim in ((4, 16), (2, 16), (2, v_head_dim), (4, v_head_dim))
    )
    untouched = torch.ones(num_tokens, dtype=torch.bool)
    tickets = []
    for case, first_row in zip(cases, first_rows, strict=True):
        span = slice(first_row, first_row + case.num_rows)
        untouched[span] = False
        q[span] = case.q
        for rows, cache in ((k, case.k_cache), (v, case.v_cache)):
            rows[span] = torch.randn(case.num_rows, *rows.shape[1:], generator=rng).to(dtype)
            queries = case.query_lens if isinstance(case, VarlenCase) else [1] * case.num_rows
            row = first_row
            for b, (length, count) in enumerate(zip(case.context_lens, queries, strict=True)):
                for token in range(length - count, length):
                    cache[int(case.block_tables[b, token // 16]), :, token % 16] = rows[row]
                    row += 1
    for case, first_row in zip(cases, first_rows, strict=True):
        # the reference reads the new tokens in the cache; the kernel must bring them itself
        expected = case.reference()
        for b, length in enumerate(case.context_lens):
            count = case.query_lens[b] if isinstance(case, VarlenCase) else 1
            for token in range(length - count, length):
                block = int(case.block_tables[b, token // 16])
                case.k_cache[block, :, token % 16] = case.v_cache[block, :, token % 16] = float("nan")
        layer = LayerCache(case.k_cache, case.v_cache)
        options = {"scale": case.scale, **case.options}
        ticket = pool.submit_rows(case.plan(), layer, TokenRows(q, k, v, out), first_row, **options)
        tickets.append((ticket, case, first_row, expected))
    for ticket, case, first_row, _ in tickets:
        ticket.wait()
        case.check(out[first_row : first_row + case.num_rows])
    assert bool(out[untouched].isnan().all())
    for _, case, _, expected in tickets:
        assert torch.equal(case.reference(), expected)  # K and V arrived


def test_appends_in_flight(pool: WorkerPool, seed: int) -> None:
    """Layers queued behind each other, one plan: appends and attention stay in order; tickets may be dropped."""
    cases = [mixed(num_q_heads=4, head_dim=16, seed=seed + i) for i in range(4)]
    plan = cases[0].plan(4)
    outs = [case.new_out() for case in cases]
    tickets = []
    for case, out in zip(cases, outs, strict=True):
        case.block_tables = cases[0].block_tables
        new = [torch.randn(case.num_rows, 2, 16) for _ in range(2)]
        cache = [torch.zeros_like(case.k_cache.contiguous()) for _ in range(2)]
        case.k_cache, case.v_cache = cache
        options = {"scale": case.scale, "k_new": new[0], "v_new": new[1]}
        tickets.append(pool.submit(plan, case.q, case.k_cache, case.v_cache, out, **options))
    tickets[2].wait()
    assert tickets[0].done()
    assert tickets[1].start_ns <= tickets[1].end_ns <= tickets[2].end_ns
    del tickets
    for case, out in zip(cases, outs, strict=True):
        case.check(out)


def test_windows_and_layers_of_one_plan(pool: WorkerPool, seed: int) -> None:
    case = mixed(seed=seed)
    plan = case.plan(4)
    for window in (None, 5, 40, None, 5):
        case.window, out = window, case.new_out()
        pool.submit(plan, case.q, case.k_cache, case.v_cache, out, scale=case.scale, window=window).wait()
        case.check(out)


def test_huge_logits_and_empty_spans(pool: WorkerPool, seed: int) -> None:
    """Logits of +-1e5, and a context whose only visible keys give -inf: zeros, not NaN."""
    case = VarlenCase([40], query_lens=[20], num_q_heads=2, num_kv_heads=1, head_dim=16, seed=seed)
    case.q *= 1e5
    # fp32 cannot tell logits of 1e5 apart that differ by less than about 0.1: rows where two nearly tie prove nothing
    positions = torch.arange(40)
    k_TD = case.k_cache[case.block_tables[0, positions // 16].long(), 0, positions % 16].double()
    logits_QHT = case.q.double() @ k_TD.T * case.scale
    logits_QHT.masked_fill_((positions > torch.arange(20, 40)[:, None])[:, None], float("-inf"))
    first, second = logits_QHT.topk(2).values.unbind(-1)
    is_clear = first - second > 10
    assert is_clear.float().mean() > 0.5
    torch.testing.assert_close(case.run(pool).double()[is_clear], case.reference()[is_clear], atol=1e-5, rtol=1e-5)
    case.q = torch.ones_like(case.q)
    case.k_cache[...] = case.k_cache.nan_to_num(0.0)
    case.k_cache[..., 0] = float("-inf")
    assert bool((case.run(pool) == 0).all())


@given(
    requests=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 100)), max_size=6),
    block_size=st.integers(1, 20),
    num_threads=st.integers(1, 12),
    window=st.none() | st.integers(1, 150),
)
def test_tiles_and_tasks_cover_every_row_once(
    requests: list[tuple[int, int]], block_size: int, num_threads: int, window: int | None
) -> None:
    queries, lens = [n for n, _ in requests], [n + before for n, before in requests]
    plan = plan_varlen(
        torch.zeros(len(lens), max([1, *(-(-n // block_size) for n in lens)]), dtype=torch.int32),
        lens,
        list(itertools.accumulate(queries, initial=0)),
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=block_size,
        num_threads=num_threads,
        min_share_bytes=1,
    )
    tiles = plan.tiles()
    assert [row for _, first, count, _ in tiles for row in range(first, first + count)] == list(range(sum(queries)))
    assert all(1 <= count <= 16 for _, _, count, _ in tiles)
    rows = list(itertools.accumulate(queries, initial=0))
    for request, first, _, length in tiles:
        assert length == lens[request] - queries[request] + (first - rows[request]) + 1
    tasks = plan.tasks(window)
    assert len(tasks) <= len(tiles) + num_threads
    assert [tile for tile, _ in itertools.groupby(tasks, key=lambda task: task[0])] == list(range(len(tiles)))
    for index, group in itertools.groupby(tasks, key=lambda task: task[0]):
        spans = [(begin, end) for _, begin, end, _ in group]
        _, _, count, length = tiles[index]
        assert spans[0][0] == min(length, max(0, length + count - 1 - window) if window else 0)
        assert spans[-1][1] == length
        assert all(a[1] == b[0] and b[0] % block_size == 0 for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_work_is_split_evenly(num_threads: int) -> None:
    """A chunk beside decodes: shares are equal in blocks times query tokens, within one block of a tile."""
    lens, queries = [16 * 100, 16 * 40, 16 * 3], [64, 1, 1]
    plan = plan_varlen(
        torch.zeros(3, 100, dtype=torch.int32),
        lens,
        [0, 64, 65, 66],
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=16,
        num_threads=num_threads,
        min_share_bytes=1,
    )
    tiles, tasks = plan.tiles(), plan.tasks()
    assert [count for _, _, count, _ in tiles] == [16] * 4 + [1, 1]
    assert queries == [sum(count for request, _, count, _ in tiles if request == r) for r in range(3)]
    cut = sum(partial is not None for _, _, _, partial in tasks)
    assert num_threads - 1 <= cut <= 2 * num_threads
    work = [tiles[tile][2] * -(-(end - begin) // 16) for tile, begin, end, _ in tasks]
    assert max(work) <= sum(work) / num_threads + 16


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes(pool: WorkerPool, data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 3), label="kv_heads")
    queries = data.draw(st.lists(st.integers(0, 64), max_size=4), label="query_lens")
    case = VarlenCase(
        [n + data.draw(st.integers(0, 50), label="before") for n in queries],
        query_lens=queries,
        num_q_heads=kv_heads * data.draw(st.integers(1, 9), label="group"),
        num_kv_heads=kv_heads,
        head_dim=data.draw(st.integers(1, 70), label="head_dim"),
        v_head_dim=data.draw(st.none() | st.integers(1, 70), label="v_head_dim"),
        block_size=data.draw(st.integers(1, 33), label="block_size"),
        kv_dtype=data.draw(st.sampled_from(DTYPES), label="kv_dtype"),
        window=data.draw(st.none() | st.integers(1, 130), label="window"),
        softcap=data.draw(st.none() | st.sampled_from([1.0, 20.0]), label="softcap"),
        has_sinks=data.draw(st.booleans(), label="has_sinks"),
        seed=data.draw(st.integers(0, 2**32 - 1), label="seed"),
    )
    case.check(case.run(pool, data.draw(st.integers(1, 6), label="num_threads")))


@pytest.mark.parametrize("num_threads", [None, 1])
def test_the_synchronous_call(seed: int, num_threads: int | None) -> None:
    case = mixed(kv_dtype=torch.bfloat16, softcap=9.0, has_sinks=True, window=30, seed=seed)
    args = (case.q, case.k_cache, case.v_cache, case.block_tables, case.lens, case.cu_seqlens, case.scale)
    case.check(paged_attention_varlen(*args, **case.options, num_threads=num_threads))
    new = [torch.randn(case.num_rows, 2, 64) for _ in range(2)]
    out = case.new_out()
    call = {**case.options, "k_new": new[0], "v_new": new[1], "out": out}
    assert paged_attention_varlen(*args, **call, num_threads=num_threads) is out
    case.check(out)  # the reference reads what was appended
    assert torch.equal(case.k_cache[int(case.block_tables[3, 0]), :, 0], new[0][42].bfloat16())
    with pytest.raises(ValueError, match="out overlaps k_new"):
        paged_attention_varlen(*args, k_new=out[:, :2], v_new=new[1], out=out)


BAD = {
    "not from 0": ({"cu_seqlens": [1, 3, 5]}, r"cu_seqlens\[0\] = 1 must be 0"),
    "descending": ({"cu_seqlens": [0, 6, 5]}, r"cu_seqlens\[2\] = 5 is below cu_seqlens\[1\] = 6"),
    "entries": ({"cu_seqlens": [0, 5]}, "cu_seqlens has 2 entries, must be 3"),
    "floats": ({"cu_seqlens": [0.0, 3.0, 5.0]}, "cu_seqlens must be integers"),
    "rows of q": ({"cu_seqlens": [0, 3, 6]}, r"q has shape \(5, 4, 8\), the plan and cache say \(6, 4, 8\)"),
    "more queries than context": ({"context_lens": [9, 1]}, r"request 1 has 2 query tokens.*context_lens\[1\] = 1"),
    "block beyond the pool": ({"context_lens": [9, 9]}, r"block_tables\[1, 2\] = 99 .* 6 blocks"),
    "k_new alone": ({"k_new": torch.zeros(5, 2, 8)}, "go together"),
    "k_new rows": ({"k_new": torch.zeros(4, 2, 8), "v_new": torch.zeros(5, 2, 8)}, r"k_new has shape \(4, 2, 8\)"),
    "same slot": (
        {"k_new": torch.zeros(5, 2, 8), "v_new": torch.zeros(5, 2, 8), "block_tables": [[0, 1, 2], [0, 1, 2]]},
        "requests 0 and 1 would both append to slot",
    ),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_refused(changed: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {
        "q_THD": torch.randn(5, 4, 8),
        "k_cache": torch.randn(6, 2, 4, 8),
        "v_cache": torch.randn(6, 2, 4, 8),
        "block_tables": [[0, 1, 2], [3, 4, 99]],
        "context_lens": [9, 8],
        "cu_seqlens": [0, 3, 5],
        "scale": 1.0,
    }
    assert paged_attention_varlen(**args).shape == (5, 4, 8)
    with pytest.raises(ValueError, match=message):
        paged_attention_varlen(**{**args, **changed})


def test_no_requests_and_no_query_tokens(pool: WorkerPool) -> None:
    empty = VarlenCase([], query_lens=[])
    assert empty.run(pool).shape == (0, 8, 64)
    idle = VarlenCase([20, 30], query_lens=[0, 0])
    assert idle.run(pool).shape == (0, 8, 64)
