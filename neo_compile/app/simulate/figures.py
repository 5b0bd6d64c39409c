"""The paper's figures on the virtual clock, beside what the paper published.

Every row is one policy at one point of a figure; its gain is over the best of device-only's three answers to a full
cache. Gains are of whole runs, the filling and the draining of the caches included, so they grow with the number of
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from neo_compile.app.bench.loads import poisson_arrivals
from neo_compile.app.bench.rate_search import find_highest_rate
from neo_compile.app.bench.systems import DEVICE_ONLY_ANSWERS, System, parse_systems
from neo_compile.app.bench.traces import Lengths, read_lengths
from neo_compile.app.simulate.load import lengths_around, metrics_of, simulate
from neo_compile.app.simulate.published import BEST_GAINS, CPU_GAINS, LATENCY_GAINS, T4_LATENCY
from neo_compile.app.simulate.setups import SETUPS, Setup

BASELINES = parse_systems(",".join(DEVICE_ONLY_ANSWERS))
NEO, HOST_ONLY = parse_systems("neo,host-only")
BASELINE = "device-only"

OUTPUT_LENGTHS = (1, 5, 10, 20, 50, 100, 200, 400)
PROMPT_LENGTHS = {"t4": 372, "a10g-8xlarge": 1000, "h100": 2000}
KV_BUDGETS = (864, 1728, 3456, 6912, 16_000)
CURVE_SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the highest rates: where curves are drawn besides published points
_MIN_ONLINE_REQUESTS, _MAX_ONLINE_REQUESTS = 20, 10_000
LONGEST_TOKENS = 8192  # requests of a trace beyond the models' context are left out

Row = dict[str, Any]
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Study:
    """How large the loads are, and under which options.

    Attributes:
        num_requests: of a load that is there from the start.
        num_latencies: how many times the latency of a request at the limit (the limit times its tokens) arrivals go on.
            In a short run the queue of a rate that cannot be sustained stays short.
        options: of `SchedulerConfig`, for every policy.
    """

    num_requests: int
    num_latencies: float
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def simulate(
        self, setup: Setup, system: System, lengths: Sequence[Lengths], arrivals_s: Sequence[float] | None = None
    ) -> dict[str, float]:
        """Metrics of one load."""
        return metrics_of(simulate(setup, system, lengths, arrivals_s, **self.options))


FULL = Study(num_requests=400, num_latencies=10)
QUICK = Study(num_requests=80, num_latencies=3)


def _offline_rows(
    study: Study, figure: str, point: str, x: float, setup: Setup, lengths: Sequence[Lengths]
) -> list[Row]:
    """device-only, neo and host-only with all requests there from the start."""
    metrics = {system.name: study.simulate(setup, system, lengths) for system in (*BASELINES, NEO, HOST_ONLY)}
    best = max(DEVICE_ONLY_ANSWERS, key=lambda name: metrics[name]["request_throughput"])
    rows = []
    for policy, name in ((BASELINE, best), (NEO.name, NEO.name), (HOST_ONLY.name, HOST_ONLY.name)):
        gain = metrics[name]["request_throughput"] / metrics[best]["request_throughput"]
        own = {"figure": figure, "point": point, "x": x, "policy": policy, "gain": gain, "published_gain": None}
        rows.append({**own, "system": name, **metrics[name]})
    return rows


def output_lengths(study: Study, report: Report) -> Iterator[Row]:
    """Gain by output length on three devices; the paper gives each device's best."""
    for name, prompt in PROMPT_LENGTHS.items():
        rows = []
        for output in OUTPUT_LENGTHS:
            report(f"{name}, output {output}")
            lengths = lengths_around(prompt, output, study.num_requests, seed=study.seed)
            rows += _offline_rows(study, "output-length", f"{name}, output {output}", output, SETUPS[name], lengths)
        best = max((row for row in rows if row["policy"] == NEO.name), key=lambda row: float(row["gain"]))
        best["published_gain"] = BEST_GAINS[name]
        for row in rows:
            yield {"setup": name, **row}


def cpu_sensitivity(study: Study, report: Report) -> Iterator[Row]:
    """Gain by output length and by the host's size."""
    for name, published in CPU_GAINS.items():
        for output, gain in published.items():
            report(f"{name}, output {output}")
            lengths = lengths_around(1000, output, study.num_requests, seed=study.seed)
            for row in _offline_rows(
                study, "cpu-sensitivity", f"{name}, output {output}", output, SETUPS[name], lengths
            ):
                row["published_gain"] = gain if row["policy"] == NEO.name else None
                yield {"setup": name, **row}


def kv_budgets(study: Study, report: Report) -> Iterator[Row]:
    """Gain by the size of the device cache. The paper has the first point only, in other figures."""
    lengths = read_lengths("osc", study.num_requests, study.seed)
    for device_tokens in KV_BUDGETS:
        report(f"t4, {device_tokens} tokens")
        setup = replace(SETUPS["t4"], device_tokens=device_tokens)
        for row in _offline_rows(
            study, "kv-budget", f"t4, {device_tokens} device tokens", device_tokens, setup, lengths
        ):
            yield {"setup": "t4", **row}


def load_latency(study: Study, report: Report) -> Iterator[Row]:
    """Seconds per token by request rate (Poisson), and the highest rate within the paper's latency.

    Of device-only's answers to a full cache, the one with the best offline throughput is taken.
    """
    for name, (trace, limit, published_gain) in LATENCY_GAINS.items():
        load = _OnlineLoad(study, SETUPS[name], trace, limit)
        offline = {system.name: load.offline_rate(system) for system in (*BASELINES, NEO)}
        best = max(BASELINES, key=lambda system: offline[system.name])
        highest = {}
        for policy, system in ((BASELINE, best), (NEO.name, NEO)):

            def measure(rate: float, system: System = system, load: _OnlineLoad = load) -> Row:
                report(f"{load.setup.title}: {system.name} at {rate:.3g} requests/s")
                return load.measure(system, rate)

            search = find_highest_rate(
                lambda rate: float(measure(rate)["seconds_per_token"]), limit, offline[system.name]
            )
            highest[policy] = search.rate
            own = {"figure": "load-latency", "setup": name, "policy": policy, "system": system.name}
            published = T4_LATENCY[policy] if name == "t4" else {}
            for rate in sorted({*published, *(search.rate * share for share in CURVE_SHARES)}):
                row = {**own, "point": f"{name}, {rate:.3g} requests/s", "x": rate, **measure(rate)}
                yield {**row, "published_seconds_per_token": published.get(rate)}
            point = f"{name}, highest rate at {limit:g} s per token"
            gain = search.rate / highest[BASELINE]
            published_value = published_gain if policy == NEO.name else None
            yield {**own, "point": point, "request_rate": search.rate, "gain": gain, "published_gain": published_value}


class _OnlineLoad:
    """Requests of a trace that a set-up can serve, arriving for long enough that a queue can grow beyond `limit`."""

    def __init__(self, study: Study, setup: Setup, trace: str, limit: float) -> None:
        self.setup = setup
        self._study = study
        longest = min(LONGEST_TOKENS, max(setup.device_tokens, setup.host_tokens))
        drawn = read_lengths(trace, _MAX_ONLINE_REQUESTS, study.seed)
        self._lengths = [each for each in drawn if sum(each) < longest]
        self._offline_lengths = self._lengths[: study.num_requests]
        mean_output = mean(each.output_tokens for each in self._lengths)
        self._duration_s = study.num_latencies * limit * mean_output

    def offline_rate(self, system: System) -> float:
        """Requests a second when all are there from the start."""
        return self._study.simulate(self.setup, system, self._offline_lengths)["request_throughput"]

    def measure(self, system: System, rate: float) -> Row:
        """Metrics at a request rate."""
        num = min(max(_MIN_ONLINE_REQUESTS, round(rate * self._duration_s)), len(self._lengths))
        arrivals = poisson_arrivals(num, rate, self._study.seed)
        return self._study.simulate(self.setup, system, self._lengths[:num], arrivals)


FIGURES: dict[str, Callable[[Study, Report], Iterator[Row]]] = {
    "load-latency": load_latency,
    "output-length": output_lengths,
    "cpu-sensitivity": cpu_sensitivity,
    "kv-budget": kv_budgets,
}
