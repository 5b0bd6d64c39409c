"""Random loads on the virtual clock, checked every iteration: everything finishes, nothing leaks, nobody starves."""

import random
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neo_compile.errors import CapacityError
from neo_compile.runtime.request import Request
from neo_compile.runtime.scheduler_config import SchedulerConfig
from tests.helpers.virtual_engine import VirtualEngine, t4_llama2_7b

# Every policy, and every answer of device-only to a full cache.
VARIANTS = (
    {"policy": "neo"},
    {"policy": "neo", "strategies": ("device-only", "pipelined")},
    {"policy": "neo", "strategies": ("pipelined",)},
    {"policy": "neo", "strategies": ("unsplit",)},
    {"policy": "neo", "chunked_prefill": False},
    {"policy": "host-only"},
    {"policy": "symmetric"},
    {"policy": "device-only", "full_cache": "swap"},
    {"policy": "device-only", "full_cache": "recompute"},
    {"policy": "device-only", "full_cache": "reserve"},
)


def variant_id(variant: dict) -> str:
    return "-".join(str(value) for value in variant.values()).replace("'", "").replace(" ", "")


def drive(virtual: VirtualEngine, rng: random.Random, num_requests: int, max_tokens: int, abort_rate: float) -> None:
    """Requests arrive at random, some are aborted at random; runs to the end."""
    accepted: dict[str, Request] = {}
    to_come = num_requests
    while to_come or virtual.scheduler.has_unfinished:
        while to_come and (rng.random() < 0.5 or not virtual.scheduler.has_unfinished):
            to_come -= 1
            request = Request(f"r{to_come}", [0] * rng.randint(1, max_tokens), rng.randint(1, max_tokens))
            with suppress(CapacityError):  # refused at once: it could never fit
                virtual.add(request)
                accepted[request.request_id] = request
        if accepted and rng.random() < abort_rate:
            virtual.scheduler.abort(rng.choice(list(accepted)))
        virtual.step()
        assert virtual.result.num_iterations < 20_000, virtual.scheduler.queues.dump()
    for request in accepted.values():
        assert request.is_finished, request
        if request.finish_reason == "length":
            assert len(request.output_token_ids) == request.max_tokens
        else:
            assert request.finish_reason in ("cache_full", "abort")
    assert virtual.device_pool.num_free == virtual.device_pool.num_blocks
    assert virtual.host_pool.num_free == virtual.host_pool.num_blocks


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    device_blocks=st.integers(0, 24),
    host_blocks=st.integers(0, 24),
    block_size=st.sampled_from([1, 3, 16]),
    budget=st.sampled_from([1, 7, 64, 2048]),
    max_num_seqs=st.sampled_from([1, 4, 256]),
    host_tokens_per_ms=st.sampled_from([0.5, 50.0, 5000.0]),
    abort_rate=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 10_000),
)
def test_everything_finishes_and_no_block_leaks(
    variant, device_blocks, host_blocks, block_size, budget, max_num_seqs, host_tokens_per_ms, abort_rate, seed
):
    config = SchedulerConfig(
        max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_idle_iterations=20, swap_cooldown=4, **variant
    )
    virtual = VirtualEngine(
        config,
        t4_llama2_7b(host_tokens_per_ms=host_tokens_per_ms),
        device_blocks=max(device_blocks, 1),
        host_blocks=max(host_blocks, 1),
        block_size=block_size,
    )
    max_tokens = max(2, max(device_blocks, host_blocks) * block_size // 2)
    drive(virtual, random.Random(seed), num_requests=12, max_tokens=min(max_tokens, 60), abort_rate=abort_rate)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize(("device_blocks", "host_blocks"), [(1, 1), (1, 3), (3, 1), (2, 0), (0, 2)])
def test_from_one_block_up(variant, device_blocks, host_blocks):
    virtual = VirtualEngine(
        SchedulerConfig(**variant), t4_llama2_7b(), device_blocks=device_blocks, host_blocks=host_blocks, block_size=4
    )
    drive(virtual, random.Random(0), num_requests=10, max_tokens=4, abort_rate=0.0)


@pytest.mark.parametrize("bound", [5, 50])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v["policy"] != "device-only"], ids=variant_id)
def test_every_admitted_request_advances_within_the_bound(variant, bound):
    config = SchedulerConfig(max_idle_iterations=bound, min_gain_margin=0.3, **variant)
    virtual = VirtualEngine(config, t4_llama2_7b(host_tokens_per_ms=2.0), device_blocks=40, host_blocks=90)
    drive(virtual, random.Random(1), num_requests=40, max_tokens=60, abort_rate=0.02)
    assert virtual.result.longest_idle <= bound


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v["policy"] != "device-only"], ids=variant_id)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    budget=st.integers(2, 12),
    prefill_pace=st.sampled_from([0.0, 8.0]),
    bound=st.integers(1, 12),
    num_blocks=st.tuples(st.integers(4, 60), st.integers(4, 60)),
    host_tokens_per_ms=st.sampled_from([0.5, 5000.0]),
    seed=st.integers(0, 10_000),
)
def test_the_bound_holds_for_prefills_that_share_a_tiny_budget(
    variant, budget, prefill_pace, bound, num_blocks, host_tokens_per_ms, seed
):
    """Decodes leave few tokens, and several long prompts are under way: none waits for another to end."""
    config = SchedulerConfig(
        max_num_batched_tokens=budget, prefill_pace=prefill_pace, max_idle_iterations=bound, **variant
    )
    virtual = VirtualEngine(
        config,
        t4_llama2_7b(host_tokens_per_ms=host_tokens_per_ms),
        device_blocks=num_blocks[0],
        host_blocks=num_blocks[1],
        block_size=4,
    )
    max_tokens = min(100, max(num_blocks) * 2)
    drive(virtual, random.Random(seed), num_requests=12, max_tokens=max_tokens, abort_rate=0.01)
    assert virtual.result.longest_idle <= bound


@pytest.mark.parametrize("seed", range(3))
def test_swaps_per_request_are_few(seed):
    """The device cache is always a little too small; each swap-in of a request doubles the time to its next."""
    config = SchedulerConfig(swap_cooldown=2)
    virtual = VirtualEngine(config, t4_llama2_7b(), device_blocks=30, host_blocks=400, block_size=4)
    rng = random.Random(seed)
    requests = [Request(f"r{i}", [0] * rng.randint(8, 40), rng.randint(100, 400)) for i in range(12)]
    virtual.run(requests)
    for request in requests:
        assert request.num_swaps <= 2 * (1 + len(request.output_token_ids).bit_length())


def test_waiting_requests_are_served_in_order_of_arrival():
    virtual = VirtualEngine(SchedulerConfig(), t4_llama2_7b(), device_blocks=20, host_blocks=20, block_size=4)
    requests = [Request(f"r{i}", [0] * 30, 5) for i in range(12)]
    for request in requests:
        virtual.add(request)
    started: list[str] = []
    while virtual.scheduler.has_unfinished:
        for request in virtual.step().requests:
            if request.request_id not in started:
                started.append(request.request_id)
    assert started == [request.request_id for request in requests]


def test_a_prefill_kept_off_the_host_by_choice_is_forced_in_the_end():
    """Host-bound prefills never pay here; the device request runs for ever."""
    config = SchedulerConfig(max_idle_iterations=10, min_gain_margin=1000.0)
    virtual = VirtualEngine(config, t4_llama2_7b(), device_blocks=40, host_blocks=40, block_size=4)
    hog, waiting = Request("hog", [0] * 60, 100), Request("waiting", [0] * 120, 5)
    virtual.add(hog)
    virtual.add(waiting)
    for _ in range(40):
        virtual.step()
    assert waiting.output_token_ids
    assert not hog.is_finished
