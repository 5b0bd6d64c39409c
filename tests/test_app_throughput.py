"""`neo bench throughput`: lengths of traces, metrics of a run, and the command on a tiny model."""

from __future__ import annotations

import gzip
import json
from statistics import mean

import pytest

from neo_compile.app.bench.serving_metrics import TokenTimes, serving_metrics
from neo_compile.app.bench.traces import TRACES, Lengths, read_lengths
from neo_compile.app.cli import main
from neo_compile.app.serving import ServedRun
from neo_compile.errors import ConfigError
from neo_compile.runtime.outputs import RequestMetrics, RequestOutput
from tests.helpers.engines import tiny_llama

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


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,2\n", "ContextTokens and GeneratedTokens"),
        ("t.json", "[]", "holds 0 requests"),
        ("t.txt", "", "unknown kind"),
        (None, None, "azure-code"),
    ],
)
def test_unusable_traces(tmp_path, name, text, message):
    path = tmp_path / (name or "absent.csv")
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_lengths(str(path), 1)


def test_metrics_of_two_requests():
    outputs = [
        RequestOutput("a", 0, [1] * 10, [1, 2, 3], "", None, "length", None, RequestMetrics(0.0, 1.0, 3.0, 0, 0)),
        RequestOutput("b", 0, [1] * 20, [1], "", None, "length", None, RequestMetrics(0.0, 2.0, 2.0, 0, 0)),
    ]
    times = TokenTimes()
    for index, seconds in ((0, 1.0), (0, 1.5), (0, 3.0), (1, 2.0)):
        times.add(index, seconds, 1)
    metrics = serving_metrics(ServedRun(outputs, 4.0, {}, {}), times)
    assert metrics["output_throughput"] == 1.0
    assert metrics["request_throughput"] == 0.5
    assert metrics["total_token_throughput"] == 34 / 4
    assert metrics["seconds_per_token"] == pytest.approx((1.0 + 2.0) / 2)
    assert metrics["mean_ttft_ms"] == 1500
    assert metrics["mean_tpot_ms"] == 1000
    assert metrics["mean_itl_ms"] == 1000
    assert metrics["p99_e2el_ms"] == 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_layers=2).save_pretrained(path)
    return str(path)


def test_the_command(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NEO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("neo_compile.app.models.load_model", lambda name, dtype: (tiny_llama(2, dtype), None))
    report = tmp_path / "report.json"
    options = f"--model {folder} --trace osc --num-requests 6 --max-model-len 500 --device-tokens 500 --stages eager"
    policies = "--policy device-only:recompute,device-only:reserve,neo"
    assert main(f"bench throughput {options} {policies} --runs 1 --json {report}".split()) == 0
    assert "device-only:recompute" in capsys.readouterr().out
    rows = json.loads(report.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["device-only:recompute", "device-only:reserve", "neo"]
    assert rows[2]["num_host_requests"] > 0
    assert all(row["output_throughput"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [("--runs 0", "--runs 0"), ("--policy magic", "magic"), ("--trace nowhere.csv", "nowhere.csv")],
)
def test_bad_options(options, message, monkeypatch, capsys):
    monkeypatch.setattr("neo_compile.app.models.load_model", lambda name, dtype: (tiny_llama(2, dtype), None))
    assert main(f"bench throughput {options}".split()) == 2
    assert message in capsys.readouterr().err
