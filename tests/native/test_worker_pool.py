"""The pool's promises: submit returns at once, FIFO, memory kept alive, drain on close, survives idling and forks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from decode_cases import DecodeCase

from neo_compile import _C
from neo_compile.host_attention import LayerCache, WorkerPool, plan_decode


def slow_copy(pool: WorkerPool, ms: float = 30.0) -> _C.Ticket:
    """Occupies the pool for about `ms`: a throttled copy."""
    blocks = torch.zeros(64, 1024, dtype=torch.uint8)
    pairs = [[i, i] for i in range(64)]
    return pool.submit_copy(blocks, torch.empty_like(blocks), pairs, max_gbps=64 * 1024 / (ms * 1e6))


def test_submit_returns_before_the_work_is_done(any_pool: WorkerPool) -> None:
    ticket = slow_copy(any_pool)
    assert not ticket.done()
    ticket.wait()
    assert ticket.done()


def test_times_are_on_the_perf_counter_clock(any_pool: WorkerPool) -> None:
    before = time.perf_counter_ns()
    ticket = slow_copy(any_pool, ms=20)
    with pytest.raises(RuntimeError, match="wait"):
        _ = ticket.end_ns
    any_pool.wait(ticket)
    after = time.perf_counter_ns()
    assert before <= ticket.start_ns < ticket.end_ns <= after
    assert ticket.end_ns - ticket.start_ns >= 19e6


def test_attention_sees_the_copy_before_it(pool: WorkerPool, seed: int) -> None:
    case = DecodeCase([40, 9], kv_dtype=torch.bfloat16, seed=seed)
    filled = case.k_cache._base
    assert filled is not None
    num_blocks = filled.shape[0]
    empty = torch.full_like(filled, float("nan"))
    case.k_cache, case.v_cache = empty[:, :, 0], empty[:, :, 1]
    pairs = torch.arange(num_blocks).view(-1, 1).expand(-1, 2)
    copy = pool.submit_copy(filled, empty, pairs, max_gbps=empty.nbytes / 10e6)  # 10 ms
    out = case.new_out()
    attention = case.submit(pool, out)
    attention.wait()
    assert copy.done()
    assert copy.end_ns <= attention.start_ns
    case.check(out)


def test_many_tickets_in_flight(pool: WorkerPool, seed: int) -> None:
    """Queued behind a slow copy, two plans interleaved, each used for several layers."""
    cases = [DecodeCase([40, 1], seed=seed), DecodeCase([90, 0, 5], kv_dtype=torch.float16, seed=seed + 1)]
    plans = [case.plan(4) for case in cases]
    slow_copy(pool, 5).done()
    jobs = []
    for _ in range(5):
        for case, plan in zip(cases, plans, strict=True):
            out = case.new_out()
            args = (plan, case.q, case.k_cache, case.v_cache, out)
            jobs.append((case, out, pool.submit(*args, scale=case.scale)))
    for case, out, ticket in reversed(jobs):
        ticket.wait()
        case.check(out)


@pytest.mark.parametrize("new_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_append_in_the_same_call(pool: WorkerPool, seed: int, kv_dtype: torch.dtype, new_dtype: torch.dtype) -> None:
    case = DecodeCase([40, 0, 1, 16, 17], head_dim=20, kv_dtype=kv_dtype, seed=seed)
    before = case.k_cache.clone(), case.v_cache.clone()
    k_new = torch.randn(5, 2, 20).to(new_dtype)
    v_new = torch.randn(2, 5, 20).to(new_dtype).transpose(0, 1)
    out = case.new_out()
    case.submit(pool, out, k_new=k_new, v_new=v_new).wait()
    for old, cache, new in zip(before, (case.k_cache, case.v_cache), (k_new, v_new), strict=True):
        for b, length in enumerate(case.context_lens):
            if length > 0:
                block, row = int(case.block_tables[b, (length - 1) // 16]), (length - 1) % 16
                assert torch.equal(cache[block, :, row], new[b].to(kv_dtype))
                old[block, :, row] = new[b].to(kv_dtype)
        assert torch.equal(old.nan_to_num(7.0), cache.nan_to_num(7.0)), "wrote elsewhere"
    case.check(out)


def test_several_layers_of_one_plan(pool: WorkerPool, seed: int) -> None:
    """The merge counters are ready again for every layer."""
    layers = [DecodeCase([200, 3], num_q_heads=4, head_dim=16, seed=seed) for _ in range(3)]
    plan = layers[0].plan(8)
    for case in layers * 4:
        out = case.new_out()
        pool.submit(plan, case.q, case.k_cache, case.v_cache, out, scale=case.scale).wait()
        case.check(out)


def test_windows_differ_between_layers(pool: WorkerPool, seed: int) -> None:
    case = DecodeCase([100, 30], seed=seed)
    plan = case.plan(4)
    for window in (None, 5, 40, None, 5):
        case.window, out = window, case.new_out()
        pool.submit(plan, case.q, case.k_cache, case.v_cache, out, scale=case.scale, window=window).wait()
        case.check(out)


def test_tensors_live_until_the_wait(any_pool: WorkerPool) -> None:
    case = DecodeCase([40])
    slow_copy(any_pool).done()  # dropped at once: dropping a ticket waits
    blocker = slow_copy(any_pool)
    case_out = case.new_out()
    ticket = case.submit(any_pool, case_out)
    q, expected = weakref.ref(case.q), case.reference()
    del case
    gc.collect()
    assert q() is not None
    ticket.wait()
    torch.testing.assert_close(case_out.double(), expected, atol=1e-5, rtol=1e-5)
    gc.collect()
    assert q() is None
    blocker.wait()


def test_dropping_a_ticket_waits(any_pool: WorkerPool) -> None:
    src, dst = torch.ones(8, 1024), torch.zeros(8, 1024)
    any_pool.submit_copy(src, dst, [[i, i] for i in range(8)], max_gbps=src.nbytes / 20e6)
    assert bool((dst == 1).all())


def test_close_runs_what_is_queued(seed: int) -> None:
    pool = WorkerPool(2)
    case = DecodeCase([50], seed=seed)
    outs = [case.new_out() for _ in range(5)]
    blocker = slow_copy(pool, 20)
    tickets = [case.submit(pool, out) for out in outs]
    pool.close()
    pool.close()
    assert blocker.done()
    for out, ticket in zip(outs, tickets, strict=True):
        assert ticket.done()
        ticket.wait()
        case.check(out)
    with pytest.raises(RuntimeError, match="closed"):
        case.submit(pool, outs[0])


@pytest.mark.parametrize("participate", [False, True])
def test_no_workers_runs_in_submit(seed: int, participate: bool) -> None:
    case = DecodeCase([50, 0, 3], seed=seed)
    with WorkerPool(0, participate=participate) as pool:
        assert (pool.num_threads, pool.parallelism) == (0, 1)
        out = case.new_out()
        ticket = case.submit(pool, out)
        assert ticket.done()
        case.check(out)
    with pytest.raises(RuntimeError, match="closed"):
        case.submit(pool, out)


def test_the_waiting_caller_participates(seed: int) -> None:
    case = DecodeCase([300, 4, 77], num_q_heads=4, head_dim=16, seed=seed)
    with WorkerPool(1, participate=True) as pool:
        assert (pool.num_threads, pool.parallelism) == (1, 2)
        plan = case.plan(pool.parallelism)
        for _ in range(10):
            outs = [case.new_out() for _ in range(3)]
            tickets = [pool.submit(plan, case.q, case.k_cache, case.v_cache, out, scale=case.scale) for out in outs]
            tickets[1].wait()
            assert tickets[0].done()
            tickets[2].wait()
            for out in outs:
                case.check(out)


def test_waiting_frees_the_gil(any_pool: WorkerPool) -> None:
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    slow_copy(any_pool, 60).wait()
    stop.set()
    thread.join()
    assert counted >= 5


def test_idle_workers_sleep_and_wake(any_pool: WorkerPool) -> None:
    slow_copy(any_pool, 1).wait()
    cpu_before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - cpu_before < 0.15
    slow_copy(any_pool, 1).wait()


def test_signals_reach_python_while_workers_exist(any_pool: WorkerPool) -> None:
    seen: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while not seen and time.monotonic() < deadline:
            time.sleep(0.001)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, old)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_hangs_nor_uses_the_pool() -> None:
    pool = WorkerPool(2)
    ticket = slow_copy(pool, 50)
    buffer = torch.zeros(8)  # torch's own threads do not survive a fork either: the child computes nothing
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.submit_read(buffer)
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 2
        pool.close()
        del pool, ticket
        os._exit(code)
    deadline = time.monotonic() + 10
    pid, status = 0, -1
    while pid == 0 and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if pid == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hung")
    assert status == 0
    ticket.wait()
    pool.close()


def test_pinning_failure_is_a_warning(seed: int) -> None:
    with pytest.warns(RuntimeWarning, match="1000"):
        pool = WorkerPool(1, cpus=[1000])
    case = DecodeCase([20], seed=seed)
    case.check(case.run(pool))
    pool.close()


def test_pinning() -> None:
    cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else pytest.skip("no affinity here")
    before = set(os.listdir("/proc/self/task"))
    with WorkerPool(2, cpus=[cpu]):
        workers = set(os.listdir("/proc/self/task")) - before
        assert len(workers) == 2
        assert all(os.sched_getaffinity(int(worker)) == {cpu} for worker in workers)
    assert os.sched_getaffinity(0) >= {cpu}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copies_are_exact(pool: WorkerPool, seed: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(seed)
    src = torch.randint(0, 256, (50, 3, 5, 8), generator=rng, dtype=torch.uint8).view(dtype)
    dst = torch.randint(0, 256, (40, 3, 5, 8), generator=rng, dtype=torch.uint8).view(dtype)
    expected = dst.clone()
    pairs = torch.stack([torch.randperm(50, generator=rng)[:30], torch.randperm(40, generator=rng)[:30]], dim=1)
    expected[pairs[:, 1]] = src[pairs[:, 0]]
    pool.submit_copy(src, dst, pairs).wait()
    assert torch.equal(dst.view(torch.uint8), expected.view(torch.uint8))
    pool.submit_copy(src, dst, []).wait()
    assert torch.equal(dst.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("streams", [1, 2, 8])
def test_read_reports_a_bandwidth(any_pool: WorkerPool, streams: int) -> None:
    for numel in (0, 1, 33, 2**20 + 3):
        ticket = any_pool.submit_read(torch.zeros(numel), streams)
        ticket.wait()
        assert ticket.end_ns >= ticket.start_ns


def test_read_refuses_streams_beyond_its_range(any_pool: WorkerPool) -> None:
    for streams in (0, 65):
        with pytest.raises(ValueError, match=f"streams = {streams} "):
            any_pool.submit_read(torch.zeros(8), streams)


def test_an_empty_batch_is_done_at_once_but_in_its_turn(any_pool: WorkerPool) -> None:
    case = DecodeCase([])
    plan, out = case.plan(), case.new_out()
    idle = any_pool.submit(plan, case.q, case.k_cache, case.v_cache, out, scale=1.0)
    assert idle.done()
    assert idle.start_ns == idle.end_ns
    copy = slow_copy(any_pool)
    behind = any_pool.submit(plan, case.q, case.k_cache, case.v_cache, out, scale=1.0)
    assert not behind.done()
    behind.wait()
    assert copy.done()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 4097, 2**21, 5 * 2**21 + 4097])
def test_first_touch_reaches_every_page_once(num_workers: int, num_bytes: int) -> None:
    buffer = torch.ones(num_bytes + 64, dtype=torch.uint8)
    with WorkerPool(num_workers) as pool:
        pool.submit_first_touch(buffer[:num_bytes]).wait()
    expected = torch.ones_like(buffer)
    expected[:num_bytes:4096] = 0
    assert torch.equal(buffer, expected)


def test_a_plan_belongs_to_one_pool(any_pool: WorkerPool) -> None:
    case = DecodeCase([20])
    plan, layer, out = case.plan(), LayerCache(case.k_cache, case.v_cache), case.new_out()
    any_pool.submit_layer(plan, layer, case.q, out, scale=1.0).wait()
    with WorkerPool(1) as other, pytest.raises(ValueError, match="another WorkerPool"):
        other.submit_layer(plan, layer, case.q, out, scale=1.0)


def test_a_plan_keeps_its_own_copies(any_pool: WorkerPool, seed: int) -> None:
    case = DecodeCase([40], seed=seed)
    expected = case.reference()
    plan, out = case.plan(), case.new_out()
    case.block_tables.fill_(0)
    any_pool.submit(plan, case.q, case.k_cache, case.v_cache, out, scale=case.scale).wait()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_plan_takes_numpy_lists_and_int64() -> None:
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 4, "num_threads": 1}
    tables, lens = torch.tensor([[3, 1], [2, 0]]), torch.tensor([5, 2])
    for convert in (torch.Tensor.int, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.t):
        table = convert(tables.t()).contiguous().t() if convert is torch.Tensor.t else convert(tables)
        plan = plan_decode(table, lens.tolist(), **sizes)
        assert [task[:3] for task in plan.tasks()] == [(0, 0, 5), (1, 0, 2)]


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_slowed_attention_is_right_and_takes_its_factor(num_threads: int, seed: int) -> None:
    """A lower bound only: a busy machine makes everything slower. The shortest of a few runs is the least disturbed."""
    case = DecodeCase([900, 300, 1], seed=seed)

    def shortest_ns(pool: WorkerPool) -> int:
        out = case.new_out()
        tickets = []
        for _ in range(5):
            tickets.append(case.submit(pool, out))
            tickets[-1].wait()
            case.check(out)
        return min(ticket.end_ns - ticket.start_ns for ticket in tickets)

    with WorkerPool(num_threads) as plain, WorkerPool(num_threads, slowdown=40.0) as slowed:
        assert shortest_ns(slowed) > 10 * shortest_ns(plain)


@pytest.mark.parametrize("slowdown", [0.5, 0.0, -1.0, float("nan"), float("inf")])
def test_a_slowdown_below_one_is_refused(slowdown: float) -> None:
    with pytest.raises(ValueError, match="slowdown"):
        WorkerPool(1, slowdown=slowdown)
