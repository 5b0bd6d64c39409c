"""`neo bench latency` and `neo bench sweep`: arrivals, the search for a rate, and the commands on a tiny model."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from statistics import mean, stdev

import pytest

from neo_compile.app.bench.latency import OnlineLoad
from neo_compile.app.bench.loads import poisson_arrivals
from neo_compile.app.bench.rate_search import find_highest_rate
from neo_compile.app.bench.traces import Lengths
from neo_compile.app.cli import main
from neo_compile.app.serving import serve
from neo_compile.errors import ConfigError, NeoError
from tests.helpers.engines import balanced_costs, greedy, make_engine, random_prompts, tiny_llama
from tests.helpers.smollm import save_tiny_llama

LENGTHS = "--input-len 24 --output-len 4 --stages eager"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def assumed_costs(monkeypatch):
    """Costs as assumed, not measured: seconds less for every engine, and the same plans on every machine."""
    monkeypatch.setattr("neo_compile.runtime.engine_core.load_or_measure_costs", lambda *args: balanced_costs(2))


def test_arrivals_are_poisson_and_scale_with_the_rate():
    arrivals = poisson_arrivals(20_001, 5.0, seed=1)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert stdev(gaps) == pytest.approx(0.2, rel=0.03)  # exponential: mean and deviation are equal
    assert poisson_arrivals(9, 5.0, seed=1) == arrivals[:9]
    assert poisson_arrivals(9, 10.0, seed=1) == pytest.approx([seconds / 2 for seconds in arrivals[:9]])
    assert poisson_arrivals(9, 5.0, seed=2) != arrivals[:9]


def test_arrivals_end_after_the_duration():
    load = OnlineLoad([Lengths(5, 5)] * 100, duration_s=10.0, seed=0)
    assert 2 < len(load.arrivals(2.0)) < 40
    assert load.arrivals(2.0)[-1] <= 10.0
    assert len(load.arrivals(1e-6)) == 2
    with pytest.raises(ConfigError, match="--num-requests"):
        load.arrivals(100.0)


@pytest.mark.parametrize("start", [0.01, 1.0, 5.2, 300.0])
def test_the_highest_rate_is_found_to_five_percent(start):
    tried = []

    def latency(rate: float) -> float:
        tried.append(rate)
        return 1 / (1 - rate / 8) if rate < 8 else math.inf

    search = find_highest_rate(latency, 3.0, start)  # 3 = 1 / (1 - r / 8) at 16 / 3
    assert 16 / 3 / 1.05 <= search.rate <= 16 / 3
    assert list(search.measured) == tried


@pytest.mark.parametrize(("latency", "side"), [(1.0, "below"), (9.0, "above")])
def test_a_latency_that_never_crosses_the_limit(latency, side):
    with pytest.raises(NeoError, match=side):
        find_highest_rate(lambda rate: latency, 3.0, 1.0)


def test_latency_counts_from_the_arrival():
    with make_engine(tiny_llama(2), cost_model=balanced_costs(2)) as engine:
        prompts = random_prompts((20, 20, 20))
        served = serve(engine, prompts, greedy(5, ignore_eos=True), arrivals_s=[0.0, 0.6, 0.601])
    assert [len(times) for times in served.token_times_s] == [5, 5, 5]
    for arrival, times in zip(served.arrivals_s, served.token_times_s, strict=True):
        assert arrival < times[0] <= times[-1] <= served.seconds


def test_rates_side_by_side(folder, tmp_path, capsys):
    path = tmp_path / "latency.json"
    rates = "--request-rate 20,40 --duration 0.4 --num-unloaded 2"
    options = f"--model {folder} {LENGTHS} --device-tokens 64 --policy device-only,neo {rates}"
    assert main(f"bench latency {options} --json {path}".split()) == 0
    document = json.loads(path.read_text())
    assert document["benchmark"] == "latency"
    assert document["unloaded_seconds_per_token"] > 0
    rows = {(row["policy"], row["request_rate"]): row for row in document["rows"]}
    assert set(rows) == {(policy, rate) for policy in ("device-only", "neo") for rate in (20.0, 40.0)}
    assert rows["neo", 20.0]["completed"] == rows["device-only", 20.0]["completed"]
    for row in rows.values():
        for name in ("ttft", "tpot", "itl", "e2el"):
            assert 0 < row[f"median_{name}_ms"] <= row[f"p99_{name}_ms"]
    assert "x alone" in capsys.readouterr().out


def test_bisection(folder, tmp_path, monkeypatch, capsys):
    """Every measurement is a real run; only its latency is replaced by a curve, as a tiny model's own is noise."""
    monkeypatch.setattr("neo_compile.app.bench.latency.OnlineLoad.measure_alone", lambda *args: 1.0)
    monkeypatch.setattr(
        "neo_compile.app.bench.serving_metrics.percentile", lambda values, percent: 0.5 + len(values) / 8
    )
    path = tmp_path / "latency.json"
    options = f"--model {folder} {LENGTHS} --device-tokens 64 --policy neo --duration 0.5 --request-rate 10 --bisect"
    assert main(f"bench latency {options} --max-slowdown 2 --json {path}".split()) == 0
    document = json.loads(path.read_text())
    highest = document["highest_rates"]["neo"]
    assert highest["median_seconds_per_token"] <= 2.0
    beyond = [row["request_rate"] for row in document["rows"] if row["median_seconds_per_token"] > 2.0]
    assert 1 < min(beyond) / highest["request_rate"] <= 1.05
    assert "median <= 2.0000 s per token" in capsys.readouterr().out


def test_sweep_goes_on_where_it_was(folder, tmp_path, capsys):
    path = tmp_path / "sweep.json"
    points = "--output-len 2 --device-tokens 64,128 --runs 2 --load-tokens 100"
    options = f"--model {folder} --stages eager {points} --json {path}"
    assert main(f"bench sweep {options} --input-len 20".split()) == 0
    first = json.loads(path.read_text())["rows"]
    assert [(row["output_len"], row["device_tokens"]) for row in first] == [(2, 64), (2, 128)]
    for row in first:
        assert row["low"] <= row["gain"] <= row["high"]
        assert [len(values) for values in row["output_throughput"].values()] == [2, 2]
    assert "lowest lower bound" in capsys.readouterr().out
    assert main(f"bench sweep {options} --input-len 20,60".split()) == 0  # 60 fits 128 only
    rows = json.loads(path.read_text())["rows"]
    assert rows[:2] == first
    assert [(row["input_len"], row["device_tokens"]) for row in rows[2:]] == [(60, 128)]
    assert main(f"bench sweep {options} --input-len 20 --seed 5".split()) == 2
    assert "seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("latency --request-rate fast", "--request-rate fast"),
        ("latency --request-rate 0", "--request-rate 0"),
        ("latency --request-rate 1,nan", "--request-rate 1,nan: each must be a finite number above 0"),
        ("latency --request-rate inf", "--request-rate inf"),
        ("latency --num-unloaded 0", "--num-unloaded"),
        ("sweep --runs 1", "--runs 1"),
        ("sweep --policy neo", "two systems"),
        ("sweep --input-len 5000 --device-tokens 100", "--device-tokens 100"),
    ],
)
def test_bad_options(command, message, capsys):
    assert main(f"bench {command}".split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "nan", "inf", "long"])
@pytest.mark.parametrize("option", ["--duration", "--max-slowdown", "--host-slowdown"])
def test_bad_numbers(option, number, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "latency", option, number])
    assert stop.value.code == 2
    assert f"argument {option}: '{number}', must be a finite number" in capsys.readouterr().err


def test_a_damaged_sweep_is_not_gone_on_with(tmp_path, capsys):
    path = tmp_path / "sweep.json"
    path.write_text("{")
    assert main(["bench", "sweep", "--quick", "--json", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
