"""`neo bench throughput`: lengths of traces, metrics of a run, and the command on a tiny model."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from statistics import mean, stdev

import numpy as np
import pytest

from neo_compile.app.bench.paired import paired_ratio
from neo_compile.app.bench.serving_metrics import RequestTimes, percentile, serving_metrics
from neo_compile.app.bench.traces import TRACES, Lengths, read_lengths
from neo_compile.app.cli import main
from neo_compile.app.options import add_engine_options, open_engine
from neo_compile.errors import ConfigError
from tests.helpers.engines import balanced_costs, tiny_llama
from tests.helpers.smollm import save_tiny_llama

MEANS = {"osc": (372, 45), "azure-conv": (1155, 211), "azure-code": (2048, 28)}


@pytest.mark.parametrize("trace", TRACES)
def test_drawn_lengths_have_the_traces_means(trace):
    lengths = read_lengths(trace, 4000, seed=1)
    prompt, output = (mean(column) for column in zip(*lengths, strict=True))
    assert prompt == pytest.approx(MEANS[trace][0], rel=0.1)
    assert output == pytest.approx(MEANS[trace][1], rel=0.1)
    assert min(map(min, lengths)) >= 1
    assert read_lengths(trace, 5, seed=3) == read_lengths(trace, 5, seed=3) != read_lengths(trace, 5, seed=4)


def test_files(tmp_path):
    csv = tmp_path / "t.csv.gz"
    with gzip.open(csv, "wt") as out:
        out.write("TIMESTAMP,ContextTokens,GeneratedTokens\nx,5,6\nx,7,8\n")
    jsonl = tmp_path / "t.jsonl"
    jsonl.write_text('{"input_length": 3, "output_length": 4}\n')
    array = tmp_path / "t.json"
    array.write_text('[{"prompt": 1, "max_tokens": 2}]')
    assert read_lengths(str(csv), 2) == [Lengths(5, 6), Lengths(7, 8)]
    assert read_lengths(str(jsonl), 1) == [Lengths(3, 4)]
    assert read_lengths(str(array), 1) == [Lengths(1, 2)]


DAMAGED_TRACES = (
    ("t.json", "{"),
    ("t.json", "7"),
    ("t.json", '{"input_length": 3, "output_length": 4}'),
    ("t.json", "[5]"),
    ("t.json", '[{"input_length": null, "output_length": 4}]'),
    ("t.json", '[{"input_length": 3}]'),
    ("t.json", '[{"input_length": Infinity, "output_length": 4}]'),
    ("t.jsonl", '{"input_length": "many", "output_length": 4}'),
    ("t.csv", "ContextTokens,GeneratedTokens\n5\n"),
    ("t.json.gz", "[]"),
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,2\n", "ContextTokens and GeneratedTokens"),
        ("t.json", "[]", "holds 0 requests"),
        ("t.txt", "", "unknown kind"),
        (None, None, "azure-code"),
        *((name, text, name) for name, text in DAMAGED_TRACES),
    ],
)
def test_unusable_traces(tmp_path, name, text, message):
    path = tmp_path / (name or "absent.csv")
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_lengths(str(path), 1)


def test_metrics_of_two_requests():
    requests = [
        RequestTimes(num_prompt_tokens=10, arrival_s=0.0, token_times_s=[1.0, 1.5, 3.0]),
        RequestTimes(num_prompt_tokens=20, arrival_s=0.5, token_times_s=[2.0]),
        RequestTimes(num_prompt_tokens=99),  # failed
    ]
    metrics = serving_metrics(requests, 4.0)
    assert metrics["completed"] == 2
    assert metrics["output_throughput"] == 1.0
    assert metrics["request_throughput"] == 0.5
    assert metrics["total_token_throughput"] == 34 / 4
    assert metrics["seconds_per_token"] == pytest.approx((1.0 + 1.5) / 2)
    assert metrics["median_seconds_per_token"] == 1.25
    assert metrics["mean_ttft_ms"] == 1250
    assert metrics["mean_tpot_ms"] == 1000
    assert metrics["mean_itl_ms"] == 1000
    assert metrics["p99_e2el_ms"] == pytest.approx(2985)


def test_percentiles_are_numpys():
    values = [3.0, 1.0, 7.5, 2.0, 9.0]
    for percent in (0, 1, 50, 77, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert percentile([4.0], 99) == 4.0


@pytest.mark.parametrize(("num", "t"), [(2, 12.706), (7, 2.447), (12, 2.201), (31, 2.042), (121, 1.980)])
def test_bounds_of_ratios_are_students(num, t):
    logs = [0.01 * math.sin(i) for i in range(num)]
    ratio = paired_ratio([math.exp(each) for each in logs], [1.0] * num)
    assert ratio.value == pytest.approx(math.exp(mean(logs)))
    margin = t * stdev(logs) / math.sqrt(num)
    assert ratio.low == pytest.approx(math.exp(mean(logs) - margin), rel=1e-5)
    assert ratio.high == pytest.approx(math.exp(mean(logs) + margin), rel=1e-5)


def test_a_single_run_has_no_bounds():
    ratio = paired_ratio([3.0], [2.0])
    assert (ratio.value, ratio.low, ratio.high) == (1.5, None, None)
    assert str(ratio) == "1.50"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def assumed_costs(monkeypatch):
    """Costs as assumed, not measured: seconds less for every engine, and the same plans on every machine."""
    monkeypatch.setattr("neo_compile.runtime.engine_core.load_or_measure_costs", lambda *args: balanced_costs(2))


def test_the_command(folder, tmp_path, capsys):
    report = tmp_path / "report.json"
    options = f"--model {folder} --trace osc --num-requests 6 --max-model-len 500 --device-tokens 500 --stages eager"
    policies = "--policy device-only:recompute,device-only:reserve,neo,host-only"
    assert main(f"bench throughput {options} {policies} --runs 1 --cost-errors --json {report}".split()) == 0
    out = capsys.readouterr().out
    assert "host-only: given by the caller" in out
    assert "device-only:recompute" in out
    assert "(a single run)" in out
    document = json.loads(report.read_text())
    rows = document["rows"]
    assert [row["policy"] for row in rows] == ["device-only:recompute", "device-only:reserve", "neo", "host-only"]
    assert rows[2]["num_host_requests"] > 0
    assert rows[3]["num_host_requests"] == rows[3]["completed"]
    assert all(row["output_throughput"] > 0 and row["completed"] == rows[0]["completed"] > 1 for row in rows)
    (ratio,) = document["ratios"].values()
    best = max(row["output_throughput"] for row in rows[:2])
    assert ratio["value"] == pytest.approx(rows[2]["output_throughput"] / best)
    errors = document["cost_errors"]["host-only"]
    assert errors["all"]["num_iterations"] >= rows[3]["num_iterations"]
    assert 0 <= errors["all"]["p50"] <= errors["all"]["p90"] <= errors["all"]["p99"]
    assert "device-only" not in errors


def test_the_table_has_its_four_rows(folder, tmp_path):
    report, timeline = tmp_path / "report.json", tmp_path / "timeline.json"
    lengths = "--input-len 40 --output-len 6 --num-requests 5"
    options = f"--model {folder} {lengths} --device-tokens 96 --stages eager --runs 2"
    assert main(f"bench throughput --table osc {options} --json {report} --timeline {timeline}".split()) == 0
    document = json.loads(report.read_text())
    rows = document["rows"]
    assert [row["policy"] for row in rows[:6]] == [row["policy"] for row in rows[6:]]
    assert [key.partition(" : ")[2] for key in document["ratios"]][1:] == ["device-only:unlimited", "one-tier"]
    assert all(ratio["low"] <= ratio["value"] <= ratio["high"] for ratio in document["ratios"].values())
    unlimited = [row for row in rows if row["policy"] in ("device-only:unlimited", "one-tier")]
    assert all(row["num_swap_outs"] == row["num_preemptions"] == row["num_host_requests"] == 0 for row in unlimited)
    assert document["config"]["device_tokens"] == 96
    assert json.loads(timeline.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--runs 0", "--runs 0"),
        ("--policy magic", "magic"),
        ("--trace nowhere.csv", "nowhere.csv"),
        ("--num-requests 0", "--num-requests"),
        ("--trace osc --input-len 3 --output-len 4", "--trace"),
        ("--policy device-only --timeline t.json", "--timeline"),
    ],
)
def test_bad_options(options, message, folder, capsys):
    assert main(f"bench throughput --model {folder} {options}".split()) == 2
    assert message in capsys.readouterr().err


def test_settings_reach_the_engine():
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    text = (
        "--stages eager --device-tokens 64 --set device.swap_gbps=2.5 cache.block_size=8 --set scheduler.max_num_seqs=3"
    )
    with open_engine(tiny_llama(2), None, parser.parse_args(text.split())) as engine:
        assert engine._core.device.swap_gbps == 2.5
        assert engine.stats().block_size == 8
        assert engine.stats().device_blocks == 8
        assert engine._core.scheduler.config.max_num_seqs == 3
