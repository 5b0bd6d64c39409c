"""`neo bench rival` and `neo plot` on tiny models and small reports."""

from __future__ import annotations

import json
import sys

import pytest

from neo_compile.app.bench.rivals import RIVALS, _waves
from neo_compile.app.cli import main
from neo_compile.errors import ConfigError
from neo_compile.runtime.timeline import Timeline
from tests.helpers.engines import balanced_costs, hf_greedy, random_prompts, tiny_llama
from tests.helpers.smollm import save_tiny_llama

PNG = b"\x89PNG"


@pytest.mark.parametrize("rival", RIVALS)
def test_rivals_give_greedy_outputs_of_the_length_asked_for(rival):
    pytest.importorskip("psutil")
    model = tiny_llama(2)
    prompts, lengths = random_prompts((20, 33, 7, 25)), [5, 3, 8, 4]
    outputs = RIVALS[rival](model, prompts, lengths, 96)
    assert outputs == [hf_greedy(model, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


def test_waves_fit_the_budget():
    prompts, lengths = random_prompts((20, 33, 7, 25, 30, 12)), [5, 3, 8, 4, 20, 6]
    waves = list(_waves(prompts, lengths, 96))
    assert sorted(index for wave in waves for index in wave) == list(range(6))
    assert max(map(len, waves)) > 1
    for wave in waves:
        assert len(wave) * (max(len(prompts[i]) for i in wave) + max(lengths[i] for i in wave)) <= 96
    with pytest.raises(ConfigError, match="53 tokens does not fit the budget of 52"):
        list(_waves([[1] * 50], [3], 52))


def test_the_command(tmp_path, monkeypatch, capsys):
    pytest.importorskip("psutil")
    monkeypatch.setattr("neo_compile.runtime.engine_core.load_or_measure_costs", lambda *args: balanced_costs(2))
    report = tmp_path / "rival.json"
    lengths = "--input-len 24 --output-len 4 --num-requests 4 --device-tokens 96 --stages eager --runs 2"
    assert main(f"bench rival --model {save_tiny_llama(tmp_path / 'model')} {lengths} --json {report}".split()) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["policy"] for row in rows] == 2 * ["neo", *RIVALS]
    assert all(row["total_output_tokens"] == 16 and row["output_throughput"] > 0 for row in rows)
    assert "neo : " in capsys.readouterr().out
    assert main(["plot", str(report)]) == 0
    assert report.with_suffix(".png").read_bytes().startswith(PNG)


def latency_report() -> dict:
    rows = [
        {"policy": policy, "request_rate": rate, "median_seconds_per_token": rate * factor}
        for policy, factor in (("neo", 0.1), ("device-only", 0.3))
        for rate in (2.0, 1.0)
    ]
    return {"config": {"max_slowdown": 3.0}, "unloaded_seconds_per_token": 0.05, "rows": rows}


def sweep_report() -> dict:
    lengths = [(64, 4), (64, 32), (256, 4)]
    rows = [
        {"input_len": i, "output_len": o, "device_tokens": budget, "gain": 1.1, "low": 1.0, "high": 1.2}
        for budget in (1024, 2048)
        for i, o in lengths
    ]
    return {"rows": rows}


def simulate_report() -> dict:
    online = {"figure": "load-latency", "setup": "t4", "policy": "neo"}
    gains = [
        {"figure": figure, "setup": "t4", "policy": policy, "x": x, "gain": 1.5, "published_gain": None}
        for figure in ("kv-budget", "output-length")
        for policy in ("neo", "host-only")
        for x in (10, 100)
    ]
    latencies = [
        {**online, "x": 0.5, "seconds_per_token": 0.1, "published_seconds_per_token": 0.12},
        {**online, "x": 1.0, "seconds_per_token": 0.2, "published_seconds_per_token": None},
        {**online, "gain": 3.0, "published_gain": 6.0},
    ]
    return {"rows": [*latencies, *gains]}


@pytest.mark.parametrize(
    ("benchmark_name", "report"),
    [("latency", latency_report()), ("sweep", sweep_report()), ("simulate", simulate_report())],
)
def test_plots(benchmark_name, report, tmp_path, capsys):
    source, target = tmp_path / "report.json", tmp_path / "picture.png"
    source.write_text(json.dumps({"benchmark": benchmark_name, **report}))
    assert main(["plot", str(source), "-o", str(target)]) == 0
    assert target.read_bytes().startswith(PNG)
    assert capsys.readouterr().out.strip() == str(target)


def small_timeline() -> Timeline:
    timeline = Timeline()
    for iteration in (3, 4):
        start = iteration * 10_000_000
        timeline.add("device", "linear", start, start + 2_000_000, iteration, layer=0, sub_batch=0)
        timeline.add("host", "host attention", start + 500_000, start + 1_500_000, iteration, layer=0, sub_batch=1)
        timeline.add("device", "other", start + 2_000_000, start + 2_100_000, iteration, label="finish")
    return timeline


def test_a_timeline_is_drawn_from_its_trace(tmp_path, capsys):
    trace = tmp_path / "timeline.json"
    timeline = small_timeline()
    timeline.write_chrome_trace(trace)
    read = Timeline.from_chrome_trace(json.loads(trace.read_text()))
    origin = timeline.events[0].start_ns
    assert read.events == [e._replace(start_ns=e.start_ns - origin, end_ns=e.end_ns - origin) for e in timeline.events]
    assert main(["plot", str(trace), "--iteration", "4"]) == 0
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)
    assert main(["plot", str(trace), "--iteration", "9"]) == 2
    assert "3 to 4" in capsys.readouterr().err


def test_labels_of_a_trace_without_them_are_those_of_its_names(tmp_path):
    timeline = small_timeline()
    timeline.add("device", "wait", 50_000_000, 51_000_000, 4, layer=3, sub_batch=0, label="wait for swap")
    trace = tmp_path / "timeline.json"
    timeline.write_chrome_trace(trace)
    document = json.loads(trace.read_text())
    for event in document["traceEvents"]:
        event["args"].pop("label", None)
    read = Timeline.from_chrome_trace(document)
    assert [event.name for event in read.events] == [event.name for event in timeline.events]
    assert [event.label for event in read.events] == [event.label for event in timeline.events]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("{", "cannot read"),
        ("[]", "no report"),
        ('{"benchmark": "kernel", "rows": []}', "neither a timeline"),
        ('{"benchmark": "sweep", "rows": []}', "no rows"),
    ],
)
def test_files_that_cannot_be_drawn(text, message, tmp_path, capsys):
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    assert main(["plot", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["simulate", "--num-requests", "3", "--policy", "neo"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line for line in errors if line.startswith("neo: ")] == ["neo: [Errno 28] No space left on device"]
    assert "Traceback" not in "".join(errors)


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    def fail(path, *args, **options):
        raise OSError(28, "No space left on device", str(path))

    path = tmp_path / "report.json"
    monkeypatch.setattr("pathlib.Path.write_text", fail)
    assert main(["simulate", "--num-requests", "3", "--policy", "neo", "--json", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
