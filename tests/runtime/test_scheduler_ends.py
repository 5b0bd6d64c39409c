"""Every way in which a request ends."""

import pytest

from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.composition import Composition
from neo_compile.runtime.plan import IterationPlan, Strategy
from neo_compile.runtime.request import RequestStatus, Tier
from neo_compile.runtime.scheduler import Scheduler, SchedulerStallError
from neo_compile.runtime.scheduler_config import POLICIES, SchedulerConfig
from tests.helpers.scheduling import engine, request, step_until_running
from tests.helpers.virtual_engine import t4_llama2_7b


class TestEnds:
    @pytest.mark.parametrize("state", ["waiting", "device", "host", "prefilling", "unknown", "finished"])
    def test_abort_in_every_state_gives_all_blocks_back(self, state):
        virtual = engine(device_blocks=6, host_blocks=12, max_num_batched_tokens=24)
        a, b, c = request("a", 12, 50), request("b", 12, 50), request("c", 36, 50)
        for r in (a, b, c):
            virtual.add(r)
        if state != "waiting":
            step_until_running(virtual, a, b)
        victim = {"device": "a", "host": "b", "prefilling": "c", "unknown": "z"}.get(state, "a")
        if state == "finished":
            virtual.scheduler.abort("a")
        assert virtual.scheduler.abort(victim) == (state not in ("unknown", "finished"))
        virtual.scheduler.check_integrity()
        for r in (a, b, c):
            virtual.scheduler.abort(r.request_id)
        assert {r.status for r in (a, b, c)} == {RequestStatus.FINISHED}
        assert {r.finish_reason for r in (a, b, c)} == {"abort"}
        assert (virtual.device_pool.num_free, virtual.host_pool.num_free) == (6, 12)
        assert virtual.step().is_empty

    def test_abort_while_an_iteration_runs(self):
        scheduler = Scheduler(
            SchedulerConfig(), BlockPool(8, 4, Tier.DEVICE), BlockPool(8, 4, Tier.HOST), t4_llama2_7b()
        )
        a = request("a", 4)
        scheduler.add(a)
        plan = scheduler.schedule()
        scheduler.abort("a")
        a.output_token_ids.append(1)
        scheduler.complete(plan, {"a": "stop"})
        assert (a.finish_reason, a.num_computed_tokens) == ("abort", 0)
        scheduler.check_integrity()

    def test_the_engine_may_end_a_request_for_any_reason(self):
        virtual = engine()
        a, b = request("a", 4, 9), request("b", 4, 9)
        virtual.add(a)
        virtual.add(b)
        plan = virtual.scheduler.schedule()
        a.output_token_ids.append(1)  # b failed: nothing was sampled
        virtual.scheduler.complete(plan, {"a": "stop", "b": "error"})
        assert (a.finish_reason, b.finish_reason) == ("stop", "error")
        assert not virtual.scheduler.has_unfinished

    def test_forgetting_to_append_a_token_is_caught(self):
        virtual = engine()
        virtual.add(request("a", 4))
        plan = virtual.scheduler.schedule()
        with pytest.raises(AssertionError, match="no sampled token was appended"):
            virtual.scheduler.complete(plan)

    def test_a_standstill_raises_with_a_dump(self, monkeypatch):
        virtual = engine()
        virtual.add(request("stuck", 4))
        monkeypatch.setattr(type(virtual.scheduler._admission), "admit_waiting", lambda self, decision: None)
        for _ in range(8):
            assert virtual.scheduler.schedule().is_empty
        with pytest.raises(SchedulerStallError, match="stuck: waiting"):
            virtual.scheduler.schedule()

    @pytest.mark.parametrize("policy", list(POLICIES))
    def test_a_composer_that_never_runs_anything_is_found_out(self, policy):
        class Lazy:
            def compose(self, work, prices):
                return Composition(Strategy.DEVICE_ONLY, (), 0.0)

        virtual = engine(policy=policy)
        virtual.scheduler._composer = Lazy()
        virtual.add(request("stuck", 4))
        with pytest.raises(SchedulerStallError, match=rf"nothing scheduled .*policy='{policy}'(.|\n)*stuck: "):
            virtual.run([])

    def test_prefills_computed_over_and_over_are_found_out(self, monkeypatch):
        """A request is preempted whenever its prompt is half computed."""
        virtual = engine(max_num_batched_tokens=4)
        virtual.check = False

        def thrash(decision, tier):
            for victim in list(virtual.scheduler.queues.running[tier].values()):
                if victim.num_computed_tokens >= 8:
                    virtual.scheduler.queues.preempt(victim)
                    decision.preempted.append(victim)

        monkeypatch.setattr(virtual.scheduler._tiering, "grow_or_evict", thrash)
        stuck = request("stuck", 16)
        virtual.add(stuck)
        with pytest.raises(SchedulerStallError, match=r"3\d tokens computed since(.|\n)*stuck: "):
            virtual.run([], max_iterations=100)
        assert stuck.num_preemptions > 1

    def test_a_long_prompt_in_tiny_chunks_is_not_a_standstill(self):
        virtual = engine(device_blocks=100, max_num_batched_tokens=1)
        (finished,) = virtual.run([request("a", 300, 2)]).finished
        assert finished.finish_reason == "length"

    def test_nothing_to_do_is_not_a_standstill(self):
        virtual = engine()
        assert all(virtual.step().is_empty for _ in range(20))

    def test_measured_times_correct_the_model(self):
        virtual = engine()
        virtual.true_model = t4_llama2_7b(linear_floor_ms=3.0)
        virtual.run([request("a", 8, 20)])
        assert virtual.scheduler.cost_model.strategy_correction[Strategy.DEVICE_ONLY] > 1.5

    def test_plans_are_frozen(self):
        with pytest.raises(AttributeError):
            IterationPlan(Strategy.DEVICE_ONLY).predicted_ms = 1.0
