"""What the method is for, on the virtual clock: throughput of a whole run against device-only."""

import pytest

from neo_compile.runtime.cost_model import AnalyticCostModel
from neo_compile.runtime.plan import Strategy
from neo_compile.runtime.scheduler_config import SchedulerConfig
from tests.helpers.virtual_engine import (
    VirtualEngine,
    VirtualRun,
    a10g_llama3_8b,
    around,
    random_requests,
    t4_llama2_7b,
)

T4 = (54, 2400)  # device and host blocks: 864 and 38,400 tokens
A10G = (1650, 60_000)


def run(
    model: AnalyticCostModel,
    blocks: tuple[int, int],
    lengths: tuple[int, int],
    num: int,
    true_model: AnalyticCostModel | None = None,
    **options,
) -> VirtualRun:
    virtual = VirtualEngine(
        SchedulerConfig(**options),
        model,
        device_blocks=blocks[0],
        host_blocks=blocks[1],
        true_model=true_model,
        check=False,
    )
    prompt, output = lengths
    result = virtual.run(random_requests(num, around(prompt), around(output), seed=num))
    assert {request.finish_reason for request in result.finished} == {"length"}
    assert len(result.finished) == num
    return result


def best_device_only(model, blocks, lengths, num) -> float:
    return max(
        run(model(), blocks, lengths, num, policy="device-only", full_cache=answer).requests_per_s
        for answer in ("swap", "recompute", "reserve")
    )


def gain(model, blocks, lengths, num, **options) -> float:
    return run(model(), blocks, lengths, num, **options).requests_per_s / best_device_only(model, blocks, lengths, num)


def test_memory_bound_device_gains_much():
    assert gain(t4_llama2_7b, T4, (372, 45), 100) > 2.5


def test_gain_shrinks_as_the_device_cache_grows():
    gains = [gain(t4_llama2_7b, (blocks, 2400), (372, 45), 100) for blocks in (54, 108, 216, 432)]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("output", [100, 200])
def test_a10g_gains_at_middle_outputs(output):
    assert gain(a10g_llama3_8b, A10G, (1000, output), 200) > 1.05


@pytest.mark.parametrize(
    ("model", "blocks", "lengths"),
    [
        (t4_llama2_7b, T4, (372, 1)),
        (t4_llama2_7b, T4, (50, 5)),
        (a10g_llama3_8b, A10G, (1000, 1)),
        (a10g_llama3_8b, A10G, (1000, 10)),
        (a10g_llama3_8b, A10G, (100, 20)),
    ],
    ids=["t4-372-1", "t4-50-5", "a10g-1000-1", "a10g-1000-10", "a10g-100-20"],
)
def test_never_much_worse_than_device_only_at_short_outputs(model, blocks, lengths):
    assert gain(model, blocks, lengths, 150) > 0.97


@pytest.mark.parametrize("host_speed", [0.1, 0.02])
def test_never_much_worse_on_a_slow_host(host_speed):
    def model() -> AnalyticCostModel:
        return a10g_llama3_8b(host_tokens_per_ms=11_000 * host_speed)

    assert gain(model, A10G, (1000, 50), 150) > 0.95


def test_a_price_for_prefills_keeps_the_host_busy():
    with_price = run(t4_llama2_7b(), T4, (372, 45), 100)
    without = run(t4_llama2_7b(), T4, (372, 45), 100, prefill_price=0.0)
    assert with_price.requests_per_s > 1.3 * without.requests_per_s


def test_both_host_strategies_are_used_where_they_are_best():
    result = run(a10g_llama3_8b(), A10G, (1000, 100), 300)
    assert all(result.iterations[strategy] > 0 for strategy in Strategy)


@pytest.mark.parametrize("error", [0.5, 2.0])
def test_a_wrong_host_table_is_corrected_by_what_is_measured(error):
    """The scheduler believes the host to be faster or slower than it is; the run is nearly as good as with the truth.

    Only the start is lost, which is a large part of so short a run.
    """
    wrong = run(
        t4_llama2_7b(host_tokens_per_ms=1_465 * error), T4, (372, 45), 100, true_model=t4_llama2_7b()
    ).requests_per_s
    assert wrong > 0.93 * run(t4_llama2_7b(), T4, (372, 45), 100).requests_per_s
