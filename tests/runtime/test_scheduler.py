"""One decision at a time: the six steps."""

import pytest

from neo_compile.errors import CapacityError
from neo_compile.runtime.plan import Strategy
from neo_compile.runtime.request import Tier
from tests.helpers.scheduling import engine, names, request, step_until_running
from tests.helpers.virtual_engine import t4_llama2_7b


class TestPrefills:
    def test_a_prompt_fills_the_device_first(self):
        virtual = engine()
        first = request("a", 5)
        virtual.add(first)
        plan = virtual.step()
        (prefill,) = plan.sub_batches[0].prefills
        assert (prefill.start, prefill.num_tokens, prefill.tier, prefill.samples) == (0, 5, Tier.DEVICE, True)
        assert plan.strategy is Strategy.DEVICE_ONLY
        assert len(first.block_ids) == 2
        assert len(first.output_token_ids) == 1

    def test_what_does_not_fit_the_device_goes_to_the_host(self):
        virtual = engine(device_blocks=4)
        a, b = request("a", 12, 8), request("b", 12, 8)
        for r in (a, b):
            virtual.add(r)
        step_until_running(virtual, a, b)
        assert (a.tier, b.tier) == (Tier.DEVICE, Tier.HOST)

    def test_a_long_prompt_is_chunked_and_samples_once(self):
        virtual = engine(device_blocks=40, max_num_batched_tokens=16)
        long = request("a", 50, 1)
        virtual.add(long)
        chunks = []
        while virtual.scheduler.has_unfinished:
            chunks += [(p.start, p.num_tokens, p.samples) for p in virtual.step().sub_batches[0].prefills]
        assert chunks == [(0, 16, False), (16, 16, False), (32, 16, False), (48, 2, True)]

    def test_chunks_keep_their_tier(self):
        virtual = engine(device_blocks=8, host_blocks=40, max_num_batched_tokens=16)
        a, long = request("a", 20, 4), request("b", 60, 4)
        virtual.add(a)
        virtual.add(long)
        tiers = set()
        while not long.is_finished:
            for sub_batch in virtual.step().sub_batches:
                tiers |= {p.tier for p in sub_batch.prefills if p.request is long}
        assert tiers == {Tier.HOST}

    def test_without_chunking_prompts_share_an_iteration_only_whole(self):
        virtual = engine(device_blocks=40, max_num_batched_tokens=16, chunked_prefill=False)
        for name in "ab":
            virtual.add(request(name, 10))
        (prefill,) = virtual.step().sub_batches[0].prefills
        assert prefill.num_tokens == 10
        assert names(virtual.scheduler.queues.waiting.values()) == ["b"]

    def test_without_chunking_a_prompt_beyond_any_budget_is_still_served(self):
        virtual = engine(device_blocks=40, max_num_batched_tokens=16, chunked_prefill=False)
        long = request("a", 50, 2)
        virtual.add(long)
        virtual.run([])
        assert long.finish_reason == "length"

    @pytest.mark.parametrize(("pace", "expected"), [(1.0, 64), (2.0, 161), (1000.0, 299)])
    def test_prefills_are_paced_while_requests_decode(self, pace, expected):
        """The T4's linear stage takes 42 ms up to 64 tokens and 0.43 ms for each more."""
        virtual = engine(device_blocks=200, block_size=16, prefill_pace=pace, max_num_batched_tokens=300)
        a, b = request("a", 8, 20), request("b", 1000, 2)
        virtual.add(a)
        virtual.step()
        virtual.add(b)
        (prefill,) = virtual.step().sub_batches[0].prefills
        assert prefill.num_tokens == expected

    def test_without_decodes_prefills_take_the_whole_budget(self):
        virtual = engine(device_blocks=200, block_size=16, prefill_pace=1.0, max_num_batched_tokens=300)
        virtual.add(request("b", 1000, 2))
        (prefill,) = virtual.step().sub_batches[0].prefills
        assert prefill.num_tokens == 300

    def test_max_num_seqs_bounds_the_running_requests(self):
        virtual = engine(device_blocks=40, max_num_seqs=2)
        for name in "abc":
            virtual.add(request(name, 4))
        virtual.step()
        assert (virtual.scheduler.num_running, virtual.scheduler.num_waiting) == (2, 1)


class TestRefusal:
    @pytest.mark.parametrize(("policy", "knob"), [("neo", "device_blocks or host_blocks"), ("device-only", "device")])
    def test_a_prompt_that_never_fits_is_refused_with_both_numbers(self, policy, knob):
        virtual = engine(device_blocks=4, host_blocks=3, policy=policy)
        with pytest.raises(
            CapacityError, match=f"16 prompt tokens.*need 5 KV blocks.*at most 4.*raise {knob}"
        ) as error:
            virtual.add(request("a", 16))
        assert (error.value.need, error.value.limit) == (5, 4)
        virtual.add(request("b", 15))
        assert virtual.run([]).finished[0].request_id == "b"

    def test_host_only_counts_the_host(self):
        with pytest.raises(CapacityError, match="raise host_blocks"):
            engine(device_blocks=100, host_blocks=1, policy="host-only").add(request("a", 4))

    def test_an_id_in_use_is_refused(self):
        virtual = engine()
        virtual.add(request("a", 4))
        with pytest.raises(ValueError, match="'a' is in use"):
            virtual.add(request("a", 4))


class TestFullCaches:
    def test_a_device_request_moves_to_the_host_when_it_outgrows_the_device(self):
        virtual = engine(device_blocks=2, host_blocks=8)
        a = request("a", 6, 12)
        virtual.add(a)
        virtual.run([])
        assert a.finish_reason == "length"
        assert len(a.output_token_ids) == 12
        assert a.num_swaps == 1

    def test_the_newest_leaves_first(self):
        virtual = engine(device_blocks=5, host_blocks=8, strategies=("device-only", "unsplit"))
        a, b = request("a", 7, 12), request("b", 7, 12)
        virtual.add(a)
        virtual.add(b)
        outs = []
        while virtual.scheduler.has_unfinished:
            outs += names(swap.request for swap in virtual.step().swap_outs)
        assert outs[:1] == ["b"]

    def test_both_tiers_full_preempts_the_newest_and_recomputes_its_outputs(self):
        virtual = engine(device_blocks=5, host_blocks=0)
        a, b = request("a", 7, 10), request("b", 7, 10)
        virtual.add(a)
        virtual.add(b)
        result = virtual.run([])
        assert b.num_preemptions >= 1
        assert a.num_preemptions == 0
        assert names(result.finished) == ["a", "b"]
        assert len(b.output_token_ids) == 10

    def test_outgrowing_every_tier_ends_alone_with_cache_full(self):
        virtual = engine(device_blocks=3, host_blocks=2)
        a, b = request("a", 6, 100), request("b", 5, 3)
        virtual.add(a)
        virtual.add(b)
        result = virtual.run([])
        assert (a.finish_reason, b.finish_reason) == ("cache_full", "length")
        assert a.num_tokens == 13  # 12 slots, and the last token's KV is never needed
        assert len(result.finished) == 2
        assert (virtual.device_pool.num_free, virtual.host_pool.num_free) == (3, 2)

    @pytest.mark.parametrize("host_blocks", [0, 20])
    @pytest.mark.parametrize("full_cache", ["swap", "recompute", "reserve"])
    def test_the_answers_of_device_only(self, full_cache, host_blocks):
        virtual = engine(device_blocks=6, host_blocks=host_blocks, policy="device-only", full_cache=full_cache)
        result = virtual.run([request(name, 7, 10) for name in "abc"])
        assert {r.finish_reason for r in result.finished} == {"length"}
        assert result.iterations[Strategy.DEVICE_ONLY] == result.num_iterations
        swaps = full_cache == "swap" and host_blocks > 0
        assert (result.num_swaps > 0) == swaps
        assert (result.num_preemptions > 0) == (full_cache != "reserve" and not swaps)

    def test_reserve_admits_only_what_fits_to_the_end(self):
        virtual = engine(device_blocks=6, policy="device-only", full_cache="reserve")
        virtual.add(request("a", 7, 10))
        virtual.add(request("b", 7, 10))
        virtual.step()
        assert (virtual.scheduler.num_running, virtual.scheduler.num_waiting) == (1, 1)


class TestSwaps:
    def test_host_requests_come_back_when_the_device_is_free(self):
        virtual = engine(device_blocks=16, host_blocks=16)
        a, b = request("a", 40, 4), request("b", 40, 30)
        virtual.add(a)
        virtual.add(b)
        ins = []
        while virtual.scheduler.has_unfinished:
            ins += names(swap.request for swap in virtual.step().swap_ins)
        assert ins == ["b"]

    def test_host_requests_come_back_although_a_request_waits_that_cannot_have_the_room(self):
        virtual = engine(device_blocks=16, host_blocks=40)
        a, b, c = request("a", 40, 4), request("b", 40, 40), request("c", 70, 40)
        for r in (a, b, c):
            virtual.add(r)
        ins = []
        while virtual.scheduler.has_unfinished:
            ins += names(swap.request for swap in virtual.step().swap_ins)
        assert ins[0] == "b"

    @pytest.mark.parametrize(("cooldown", "expected"), [(0, True), (10_000, False)])
    def test_a_request_just_swapped_out_stays_out_for_the_cooldown(self, cooldown, expected):
        virtual = engine(device_blocks=8, host_blocks=32, swap_cooldown=cooldown)
        a, b = request("a", 12, 8), request("b", 12, 60)
        virtual.add(a)
        virtual.add(b)
        came_back = False
        for _ in range(30):
            came_back |= any(swap.request is b for swap in virtual.step().swap_ins)
        assert b.num_swaps >= 1
        assert came_back == expected

    def test_the_threshold_keeps_device_blocks_free(self):
        def num_swap_ins(threshold: float) -> int:
            virtual = engine(device_blocks=32, host_blocks=32, swap_in_threshold=threshold)
            for r in (request("a", 40, 60), request("b", 70, 3), request("c", 40, 60)):
                virtual.add(r)
            total = 0
            while virtual.scheduler.has_unfinished:
                total += len(virtual.step().swap_ins)
                if not virtual.scheduler.queues.running[Tier.DEVICE]:
                    break
            return total

        assert num_swap_ins(0.95) > num_swap_ins(0.3)


class TestHostDecodes:
    def test_a_lone_host_request_runs(self):
        virtual = engine(device_blocks=0, host_blocks=8)
        a = request("a", 6, 5)
        virtual.add(a)
        result = virtual.run([])
        assert a.finish_reason == "length"
        assert result.num_iterations == 5

    def test_host_only_iterations_may_be_pipelined(self):
        virtual = engine(device_blocks=0, host_blocks=400, strategies=("pipelined",))
        result = virtual.run([request(f"r{i}", 20, 6) for i in range(8)])
        assert result.iterations[Strategy.PIPELINED] > 0

    @pytest.mark.parametrize("bound", [3, 10])
    def test_no_admitted_request_idles_longer_than_the_bound(self, bound):
        slow_host = t4_llama2_7b(host_tokens_per_ms=0.01)
        virtual = engine(
            device_blocks=30, host_blocks=60, model=slow_host, max_idle_iterations=bound, min_gain_margin=0.5
        )
        result = virtual.run([request(f"r{i}", 40, 30) for i in range(6)])
        assert 1 < result.longest_idle <= bound

    def test_the_margin_must_be_promised(self):
        def device_only_share(margin: float) -> float:
            virtual = engine(device_blocks=60, host_blocks=200, block_size=16, min_gain_margin=margin)
            result = virtual.run([request(f"r{i}", 300, 30) for i in range(12)])
            return result.iterations[Strategy.DEVICE_ONLY] / result.num_iterations

        assert device_only_share(100.0) > device_only_share(0.0)

    def test_host_only_never_uses_the_device_cache(self):
        virtual = engine(policy="host-only", host_blocks=60)
        for r in [request(f"r{i}", 20, 6) for i in range(5)]:
            virtual.add(r)
        while virtual.scheduler.has_unfinished:
            assert all(r.tier is not Tier.DEVICE for r in virtual.step().requests)

    def test_symmetric_halves_have_the_same_mixture(self):
        virtual = engine(policy="symmetric", device_blocks=16, host_blocks=40)
        requests = [request(f"r{i}", 10, 20) for i in range(8)]
        for r in requests:
            virtual.add(r)
        step_until_running(virtual, *requests)
        first, second = virtual.step().sub_batches
        assert abs(len(first.device_decodes) - len(second.device_decodes)) <= 1
        assert abs(len(first.host_decodes) - len(second.host_decodes)) <= 1
