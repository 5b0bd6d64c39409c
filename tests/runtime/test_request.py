"""Requests and the plan's small types."""

import pytest

from neo_compile.runtime.plan import IterationPlan, ScheduledPrefill, Strategy, SubBatch
from neo_compile.runtime.request import Request, RequestStatus, Tier


def test_a_request_prefills_until_one_token_is_left_to_compute():
    request = Request("a", [1, 2, 3], max_tokens=4)
    assert request.is_prefilling
    request.num_computed_tokens = 3
    assert request.is_prefilling  # all computed, but nothing sampled yet
    request.output_token_ids.append(9)
    assert not request.is_prefilling
    assert request.num_tokens == 4
    assert request.all_token_ids == [1, 2, 3, 9]


def test_after_a_preemption_the_outputs_are_prefilled_too():
    request = Request("a", [1, 2, 3], max_tokens=4, output_token_ids=[7, 8])
    assert request.is_prefilling
    request.num_computed_tokens = 4
    assert not request.is_prefilling


def test_requests_are_compared_by_identity():
    assert Request("a", [1], 1) != Request("a", [1], 1)
    assert len({Request("a", [1], 1), Request("a", [1], 1)}) == 2


@pytest.mark.parametrize(("prompt", "max_tokens", "named"), [([], 1, "prompt is empty"), ([1], 0, "max_tokens=0")])
def test_impossible_requests_are_refused_by_name(prompt, max_tokens, named):
    with pytest.raises(ValueError, match=named):
        Request("a", prompt, max_tokens)


def test_tier_other():
    assert Tier.DEVICE.other is Tier.HOST
    assert Tier.HOST.other is Tier.DEVICE


def test_new_request_holds_nothing():
    request = Request("a", [1], 1)
    assert request.status is RequestStatus.WAITING
    assert (request.tier, request.block_ids, request.is_finished) == (None, [], False)


def test_plan_counts_tokens_and_requests():
    a, b, c = (Request(name, [1, 2, 3], 1) for name in "abc")
    prefill = ScheduledPrefill(a, 0, 2, Tier.DEVICE, samples=False)
    plan = IterationPlan(
        Strategy.PIPELINED, (SubBatch(prefills=(prefill,), device_decodes=(b,)), SubBatch(host_decodes=(c,)))
    )
    assert plan.num_tokens == 4
    assert list(plan.requests) == [a, b, c]
    assert [sub_batch.num_requests for sub_batch in plan.sub_batches] == [2, 1]
    assert not plan.is_empty
    assert IterationPlan(Strategy.DEVICE_ONLY).is_empty
