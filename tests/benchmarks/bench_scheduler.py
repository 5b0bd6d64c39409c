"""Time of one scheduling decision: `pytest tests/benchmarks/bench_scheduler.py --benchmark-only`.

Ids are policy-requests. A decision over 1,000 running requests must take less than a millisecond.
"""

import pytest

from neo_compile.runtime.request import Request
from neo_compile.runtime.scheduler_config import SchedulerConfig
from tests.helpers.virtual_engine import VirtualEngine, t4_llama2_7b


def steady_state(policy: str, num_requests: int) -> VirtualEngine:
    """A tenth of the requests on the device, the rest on the host, and as many again waiting."""
    virtual = VirtualEngine(
        SchedulerConfig(
            policy=policy,
            max_num_seqs=num_requests,
            max_num_batched_tokens=4 * num_requests + 2048,
            prefill_pace=1e6,  # to get there quickly
        ),
        t4_llama2_7b(host_tokens_per_ms=2e6),
        device_blocks=num_requests * 3,
        host_blocks=num_requests * 40,
        check=False,
    )
    for i in range(2 * num_requests):
        virtual.add(Request(f"r{i}", [0] * (200 + i % 300), 10_000))
    for _ in range(200):
        virtual.step()
    assert virtual.scheduler.num_running > 0.5 * num_requests or policy == "device-only"
    return virtual


@pytest.mark.parametrize("num_requests", [100, 1000])
@pytest.mark.parametrize("policy", ["neo", "device-only", "host-only", "symmetric"])
def test_decision(benchmark, policy, num_requests):
    virtual = steady_state(policy, num_requests)
    plans = []

    def decide():
        plans.append(virtual.scheduler.schedule())

    def advance():  # between decisions, untimed
        while plans:
            plan = plans.pop()
            for sub_batch in plan.sub_batches:
                sampling = [prefill.request for prefill in sub_batch.prefills if prefill.samples]
                for request in (*sampling, *sub_batch.device_decodes, *sub_batch.host_decodes):
                    request.output_token_ids.append(0)
            virtual.scheduler.complete(plan)

    benchmark.extra_info["num_running"] = virtual.scheduler.num_running
    benchmark.pedantic(decide, setup=advance, rounds=50)
