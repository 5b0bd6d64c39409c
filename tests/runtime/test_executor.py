"""What the executor records, measures, and does when something breaks."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from neo_compile.runtime.iteration_bound import bound_of
from tests.helpers.engines import balanced_costs, greedy, hf_greedy, make_engine, random_prompts, tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def engine(model):
    with make_engine(model, policy="neo", strategies=("pipelined",), cost_model=balanced_costs()) as engine:
        yield engine


def test_timeline_of_a_pipelined_iteration(engine, tmp_path):
    engine.start_timeline()
    engine.generate(random_prompts([30] * 8), greedy(6))
    timeline = engine.stop_timeline()
    pipelined = [
        iteration
        for iteration in timeline.iterations()
        if any(event.name.endswith("b1") for event in timeline.of_iteration(iteration))
    ]
    assert pipelined
    events = timeline.of_iteration(pipelined[-1])
    names = [event.name for event in events]
    for stage in range(4):
        assert f"linear {stage} b0" in names
        assert f"linear {stage} b1" in names
    order = [event.name for event in events if event.category == "linear"]
    assert order[:4] == ["linear 0 b0", "linear 0 b1", "linear 1 b0", "linear 1 b1"]
    assert all(event.start_ns <= event.end_ns for event in events)
    device = [event for event in events if event.lane == "device"]
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(device)), "the device does one thing"
    assert names[0] == "prepare"
    assert device[-1].name == "finish"
    bound = bound_of(events)
    assert 0 < bound.bound_ms <= bound.actual_ms
    assert bound.unaccounted_ms >= 0
    path = tmp_path / "trace.json"
    timeline.write_chrome_trace(path)
    assert len(json.loads(path.read_text())["traceEvents"]) > len(events)


def test_parts_do_not_exceed_the_whole(engine, monkeypatch):
    seen = []
    complete = engine._core.scheduler.complete

    def watch(plan, stop, measured_ms, measured_parts):
        seen.append((measured_ms, measured_parts))
        complete(plan, stop, measured_ms=measured_ms, measured_parts=measured_parts)

    monkeypatch.setattr(engine._core.scheduler, "complete", watch)
    engine.generate(random_prompts([30] * 8), greedy(6))
    assert all(0 < parts["linear"] <= total for total, parts in seen)
    assert any("host_attention" in parts for _, parts in seen)


def test_a_failure_in_the_model_leaves_no_work_behind(engine, model, monkeypatch):
    """The exception reaches the caller; attention in flight is waited for; after an abort the engine serves again."""
    from neo_compile.runtime.sub_batch_attention import SubBatchAttention

    ids = [engine.add_request(prompt, greedy(20)) for prompt in random_prompts([30] * 8)]
    for _ in range(4):
        engine.step()
    finish = SubBatchAttention.finish

    def broken(self, begun):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(SubBatchAttention, "finish", broken)
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.step()
    monkeypatch.setattr(SubBatchAttention, "finish", finish)
    for request_id in ids:
        engine.abort(request_id)
    assert engine.generate([5, 6, 7], greedy(5))[0].token_ids == hf_greedy(model, [5, 6, 7], 5)
