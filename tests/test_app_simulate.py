"""`neo simulate`: the paper's curves on the virtual clock, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from neo_compile.app.bench.loads import poisson_arrivals
from neo_compile.app.bench.systems import parse_systems
from neo_compile.app.bench.traces import read_lengths
from neo_compile.app.cli import main
from neo_compile.app.simulate.figures import BASELINES, FIGURES, HOST_ONLY, NEO, QUICK, Study
from neo_compile.app.simulate.load import lengths_around, metrics_of, simulate
from neo_compile.app.simulate.setups import SETUPS
from neo_compile.runtime.cost_tables import TableCostModel


def gain(setup, lengths, system=NEO) -> float:
    """Throughput over the best of device-only's answers to a full cache."""
    best = max(simulate(setup, each, lengths).requests_per_s for each in BASELINES)
    return simulate(setup, system, lengths).requests_per_s / best


def rows_of(figure: str, study: Study) -> list[dict]:
    return list(FIGURES[figure](study, lambda text: None))


@pytest.mark.parametrize(
    ("name", "prompt", "outputs", "num", "peak"),
    [
        ("t4", 372, (1, 60, 450), 40, 2.5),
        ("a10g-8xlarge", 1000, (1, 150, 400), 150, 1.05),
        ("h100", 2000, (1, 50, 150), 60, 1.05),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gain_rises_peaks_and_falls_back_with_the_output_length(name, prompt, outputs, num, peak):
    first, middle, last = (gain(SETUPS[name], lengths_around(prompt, output, num)) for output in outputs)
    assert first < middle > last
    assert first < 1.1
    assert middle > peak


def test_host_only_loses_where_the_paper_says():
    """A host that serves everything is below 0.6 of device-only at long outputs."""
    lengths = lengths_around(1000, 400, 120)
    assert gain(SETUPS["a10g-2xlarge"], lengths, HOST_ONLY) < 0.6
    assert gain(SETUPS["a10g-2xlarge"], lengths) > 1.0


def test_a_faster_host_gains_more():
    lengths = lengths_around(1000, 200, 150)
    gains = [gain(SETUPS[f"a10g-{size}xlarge"], lengths) for size in (4, 8, 16)]
    assert gains == sorted(gains)
    assert gains[-1] > gains[0] + 0.05


def test_figures_have_published_values_beside_ours():
    study = replace(QUICK, num_requests=20)
    rows = [row for figure in ("cpu-sensitivity", "kv-budget") for row in rows_of(figure, study)]
    assert len(rows) == 3 * (4 * 5 + 5)
    published = [row for row in rows if row["published_gain"] is not None]
    assert [row["policy"] for row in published] == ["neo"] * 20
    assert all(row["gain"] == 1.0 for row in rows if row["policy"] == "device-only")
    budgets = [row["gain"] for row in rows if row["figure"] == "kv-budget" and row["policy"] == "neo"]
    assert budgets[0] > budgets[1] > budgets[-1]


def test_online_neo_serves_a_rate_that_device_only_cannot():
    """T4 with OSC at 2 requests a second: the paper's wall for device-only is at 0.53, for neo beyond 3."""
    lengths = read_lengths("osc", 150)
    arrivals = poisson_arrivals(150, 2.0, seed=0)
    latency = {
        system.name: metrics_of(simulate(SETUPS["t4"], system, lengths, arrivals))["median_seconds_per_token"]
        for system in (*BASELINES, NEO)
    }
    assert latency.pop("neo") < 0.3
    assert min(latency.values()) > 0.6


def test_latency_counts_from_the_arrival_and_idle_time_passes():
    (system,) = parse_systems("neo")
    lengths = lengths_around(100, 10, 2, spread=0.0)
    run = simulate(SETUPS["t4"], system, lengths, [0.0, 1000.0])
    metrics = metrics_of(run)
    assert run.elapsed_ms > 1e6
    assert run.token_times_ms["1"][0] > 1e6
    assert metrics["completed"] == 2
    assert metrics["mean_ttft_ms"] < 500
    assert metrics["seconds_per_token"] == pytest.approx(metrics["mean_e2el_ms"] / 1e3 / 10)


@pytest.mark.slow
def test_load_latency_figure():
    rows = [row for row in rows_of("load-latency", QUICK) if row["setup"] == "t4"]
    highest = {row["policy"]: row for row in rows if "request_rate" in row}
    assert highest["neo"]["gain"] > 2.5
    assert highest["neo"]["published_gain"] == 6.63
    curve = {row["x"]: row["seconds_per_token"] for row in rows if row["policy"] == "neo" and "x" in row}
    assert curve[0.5] < curve[2.5] < curve[3.7]
    assert curve[2.5] == pytest.approx(0.28, rel=0.4)  # as published


# Points of the grid that miss 0.99, and what they reach: requests whose time is mostly prefill, and loads that end
# while the host still holds requests: a host decode that one iteration hides is paid for at the end.
KNOWN_LOSSES = {("h100", 100, 10, 9000): 0.95, ("h100", 2000, 100, 72_000): 0.98, ("h100", 2000, 400, 72_000): 0.975}
GRID = {
    "t4": ((50, 372, 800), (1, 10, 45, 200), (864, 3456, 6912, 16_000)),
    "a10g-4xlarge": ((100, 1000, 4000), (1, 10, 100, 400), (6600, 26_400, 105_600)),
    "a10g-16xlarge": ((100, 1000, 4000), (1, 10, 100, 400), (6600, 26_400)),
    "h100": ((100, 2000), (1, 10, 100, 400), (9000, 18_000, 72_000)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_never_below_device_only(name):
    """Whole runs of 100 requests over prompt x output lengths x device budgets."""
    too_low = {}
    for prompt, output, budget in product(*GRID[name]):
        if 1.3 * (prompt + output) < budget:
            setup = replace(SETUPS[name], device_tokens=budget)
            value = gain(setup, lengths_around(prompt, output, 100))
            if value < KNOWN_LOSSES.get((name, prompt, output, budget), 0.99):
                too_low[prompt, output, budget] = round(value, 3)
    assert too_low == {}


def test_the_command(tmp_path, capsys):
    path = tmp_path / "rows.json"
    options = "--num-requests 20 --setup a10g-8xlarge --host-gbps 100 --request-rate 3 --set scheduler.max_num_seqs=8"
    policies = "--policy device-only,neo,device-only:unlimited"
    assert main(f"simulate {options} {policies} --json {path}".split()) == 0
    document = json.loads(path.read_text())
    assert document["benchmark"] == "simulate"
    assert [row["policy"] for row in document["rows"]] == ["device-only", "neo", "device-only:unlimited"]
    assert all(row["completed"] == 20 and row["median_tpot_ms"] > 0 for row in document["rows"])
    assert "a10g" in capsys.readouterr().out.lower()


def test_options_have_an_effect(tmp_path):
    def tokens_per_s(*options: str) -> float:
        path = tmp_path / "rows.json"
        lengths = ["--input-len", "300", "--output-len", "40", "--num-requests", "30", "--policy", "neo"]
        assert main(["simulate", *lengths, "--json", str(path), *options]) == 0
        return json.loads(path.read_text())["rows"][0]["output_throughput"]

    usual = tokens_per_s()
    assert tokens_per_s("--host-gbps", "5") < usual < tokens_per_s("--device-tokens", "20000")
    assert tokens_per_s("--launch-ms", "5") < usual
    assert tokens_per_s("--set", "scheduler.max_num_seqs=1") < usual


def test_the_figure_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("neo_compile.app.simulate.command.QUICK", replace(QUICK, num_requests=10))
    path = tmp_path / "figure.json"
    assert main(f"simulate --figure kv-budget --quick --json {path}".split()) == 0
    assert "host-only" in capsys.readouterr().out
    assert {row["figure"] for row in json.loads(path.read_text())["rows"]} == {"kv-budget"}


PROFILE_KEY = {"block_size": 8, "cache_dtype": "torch.float32", "cpu": "some CPU", "device": "emulated"}


def test_a_measured_profile(tmp_path, capsys):
    key = {**PROFILE_KEY, "device_threads": 1, "host_threads": 3, "model": "tiny"}
    tables = {
        "linear": {"tokens": [1, 1000], "ms": [1.0, 1000.0]},
        "prefill_attention": {"tokens": [1, 1000], "starts": [0, 1000], "ms": [[0.0, 0.0], [0.0, 0.0]]},
        "device_decode": {"requests": [1, 100], "kv_tokens": [1, 1000], "ms": [[0.0, 0.0], [0.0, 0.0]]},
        "host_attention": {"requests": [1, 100], "kv_tokens": [1, 1000], "ms": [[0.0, 0.0], [0.0, 0.0]]},
        "swap": {"blocks": [1, 100], "ms": [0.0, 0.0]},
    }
    profile, result = tmp_path / "costs.json", tmp_path / "result.json"
    profile.write_text(TableCostModel(tables, num_layers=2, key=key).to_json())
    command = "simulate --input-len 10 --output-len 5 --num-requests 1 --policy device-only --device-tokens 64"
    assert main([*command.split(), "--host-tokens", "64", "--profile", str(profile), "--json", str(result)]) == 0
    output = capsys.readouterr().out
    assert "tiny, float32, some CPU, 1 cores as the device, 3 as the host: 64 device tokens" in output
    (row,) = json.loads(result.read_text())["rows"]
    assert row["mean_ttft_ms"] == pytest.approx(2 * 10)  # two layers, a millisecond a token
    assert row["mean_tpot_ms"] == pytest.approx(2 * 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--setup cray", "cray"),
        ("--policy magic", "magic"),
        ("--policy neo,neo", "twice"),
        ("--policy one-tier", "one-tier"),
        ("--input-len 5", "--output-len"),
        ("--figure kv-budget --trace osc", "--trace"),
        ("--set scheduler.magic=1", "magic"),
        ("--set device.kind=auto", "device"),
        ("--set prefill_pace=1", "CONFIG.NAME=VALUE"),
        ("--profile costs.json", "--device-tokens"),
        ("--profile costs.json --device-tokens 64", "--host-tokens"),
        ("--profile costs.json --setup t4", "--setup"),
        ("--profile costs.json --device-tokens 64 --host-tokens 64 --host-gbps 9", "--host-gbps"),
        ("--profile /absent/costs.json --device-tokens 64 --host-tokens 64", "/absent/costs.json"),
        ("--profile README.md --device-tokens 64 --host-tokens 64", "README.md"),
        ("--figure kv-budget --profile costs.json", "--profile"),
    ],
)
def test_bad_options(options, message, capsys):
    assert main(f"simulate --num-requests 2 {options}".split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "fast"])
@pytest.mark.parametrize("option", ["--request-rate", "--device-gbps", "--host-gbps", "--link-gbps", "--device-tokens"])
def test_numbers_are_positive_and_finite(option, number, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["simulate", "--num-requests", "2", f"{option}={number}"])
    assert stop.value.code == 2
    assert f"argument {option}: '{number}', must be a" in capsys.readouterr().err


def test_launches_may_be_free(capsys):
    command = "simulate --input-len 10 --output-len 2 --num-requests 1 --policy neo --launch-ms"
    assert main([*command.split(), "0"]) == 0
    with pytest.raises(SystemExit):
        main([*command.split(), "nan"])
    assert "--launch-ms: 'nan', must be a finite number of at least 0" in capsys.readouterr().err
