"""Throughput and latency of one served load, under vLLM's names. The same for a real run and one on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean


@dataclass
class RequestTimes:
    """One request of a load. Times are seconds since the load began.

    Attributes:
        token_times_s: when each output token was there.
    """

    num_prompt_tokens: int
    arrival_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)

    @property
    def seconds_per_token(self) -> float:
        """The paper's latency: (finish - arrival) / output tokens."""
        return (self.token_times_s[-1] - self.arrival_s) / len(self.token_times_s)


def serving_metrics(requests: Sequence[RequestTimes], duration_s: float) -> dict[str, float]:
    """Metrics of a load that took `duration_s`, by the names of vLLM's `bench serve`.

    `ttft` is the first token's latency, `tpot` the time per output token after the first, `itl` the gaps between
    tokens, `e2el` the whole request's latency, all in milliseconds. `seconds_per_token` is the mean of the paper's
    latency over requests; `median_` and `p99_seconds_per_token` belong to it. Requests without output do not count.
    """
    completed = [request for request in requests if request.token_times_s]
    num_prompt_tokens = sum(request.num_prompt_tokens for request in completed)
    num_output_tokens = sum(len(request.token_times_s) for request in completed)
    per_token = [request.seconds_per_token for request in completed]
    metrics: dict[str, float] = {
        "duration": duration_s,
        "completed": len(completed),
        "total_input_tokens": num_prompt_tokens,
        "total_output_tokens": num_output_tokens,
        "request_throughput": len(completed) / duration_s,
        "output_throughput": num_output_tokens / duration_s,
        "total_token_throughput": (num_prompt_tokens + num_output_tokens) / duration_s,
        "seconds_per_token": mean(per_token or [0.0]),
        "median_seconds_per_token": percentile(per_token, 50),
        "p99_seconds_per_token": percentile(per_token, 99),
    }
    latencies = {
        "ttft": [r.token_times_s[0] - r.arrival_s for r in completed],
        "tpot": [
            (r.token_times_s[-1] - r.token_times_s[0]) / (len(r.token_times_s) - 1)
            for r in completed
            if len(r.token_times_s) > 1
        ],
        "itl": [later - earlier for r in completed for earlier, later in pairwise(r.token_times_s)],
        "e2el": [r.token_times_s[-1] - r.arrival_s for r in completed],
    }
    for name, seconds in latencies.items():
        metrics[f"mean_{name}_ms"] = mean(seconds or [0.0]) * 1e3
        metrics[f"median_{name}_ms"] = percentile(seconds, 50) * 1e3
        metrics[f"p99_{name}_ms"] = percentile(seconds, 99) * 1e3
    return metrics


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated linearly between the two nearest values, as numpy's default does; 0 of no values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * percent / 100
    left = min(int(position), len(ordered) - 2) if len(ordered) > 1 else 0
    right = min(left + 1, len(ordered) - 1)
    return ordered[left] + (position - left) * (ordered[right] - ordered[left])
