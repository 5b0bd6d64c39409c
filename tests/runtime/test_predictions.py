"""How errors of the cost model are summed up, and that an engine keeps them."""

import pytest

from neo_compile.runtime.executor import IterationTimes
from neo_compile.runtime.predictions import ErrorSummary, Prediction, error_summaries
from tests.helpers.engines import greedy, make_engine, random_prompts, tiny_llama


def test_errors_are_shares_of_the_measured_time():
    assert Prediction("unsplit", 90.0, 100.0).error == pytest.approx(0.1)
    assert Prediction("unsplit", 200.0, 100.0).error == pytest.approx(1.0)


def test_summary():
    predictions = [Prediction("unsplit", 100.0 + error, 100.0) for error in range(100)]
    summary = ErrorSummary.of(predictions)
    assert (summary.num_iterations, summary.p50, summary.p90, summary.p99) == (100, 0.5, 0.9, 0.99)
    assert summary.bias == pytest.approx(0.495)
    assert ErrorSummary.of(predictions[10:11]) == (1, 0.1, 0.1, 0.1, pytest.approx(0.1))


def test_summaries_are_by_strategy_and_of_all():
    summaries = error_summaries([Prediction("pipelined", 1.0, 1.0), Prediction("unsplit", 1.0, 2.0)])
    assert {name: each.num_iterations for name, each in summaries.items()} == {"all": 2, "pipelined": 1, "unsplit": 1}
    assert error_summaries([]) == {}


def test_an_engine_tells_its_errors_and_its_tables():
    with make_engine(tiny_llama()) as engine:
        before = engine.stats()
        engine.generate(random_prompts([30] * 6), greedy(5))
        after = engine.stats()
    assert not before.predictions
    assert len(after.predictions) == after.num_iterations
    assert sum(each.measured_ms for each in after.predictions) >= 1e3 * after.busy_s
    assert {each.strategy for each in after.predictions} == set(after.iterations_by_strategy)
    assert after.cost_tables == "given by the caller"


class TestParts:
    """Of an iteration with 20 ms of linear stages, 5 of device attention (3 prefills), 10 of host attention."""

    def times(self, **changes) -> IterationTimes:
        values = {
            "total_ms": 20.0 + 5.0 + 8.0,
            "device_attention_ms": [5.0],
            "prefill_attention_ms": [3.0],
            "host_attention_ms": [10.0],
            "wait_ms": 8.0,
            "sampling_ms": 1.0,
        }
        return IterationTimes(**(values | changes))

    def test_all_parts_of_one_sub_batch(self):
        assert self.times().parts() == {
            "linear": 20.0,
            "prefill_attention": 3.0,
            "device_attention": 2.0,
            "host_attention": 10.0,
            "launch": 3.0,  # 5 beside device attention and 8 waited for, of which 10 were attention
            "sampling": 1.0,
        }

    def test_waiting_for_copies_is_no_launch(self):
        parts = self.times(total_ms=37.0, wait_ms=12.0, copy_wait_ms=4.0).parts()
        assert (parts["linear"], parts["launch"]) == (20.0, 3.0)

    @pytest.mark.parametrize(
        "changes",
        [
            {"wait_ms": 0.5, "total_ms": 25.5},  # hidden: nobody knows when it was done
            {"host_attention_ms": [5.0, 5.0], "device_attention_ms": [5.0, 0.0]},  # pipelined
            {"host_attention_ms": [0.0], "wait_ms": 0.0},
        ],
        ids=["hidden", "pipelined", "none"],
    )
    def test_a_launch_that_is_not_seen_is_left_out(self, changes):
        assert "launch" not in self.times(**changes).parts()
