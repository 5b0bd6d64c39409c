"""Throughput and latency of one served load, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median

from neo_compile.app.serving import ServedRun


@dataclass
class TokenTimes:
    """When each request's output grew: (seconds, tokens so far), by index. Fill it from `serve(on_output=...)`."""

    times: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def add(self, index: int, seconds: float, num_tokens: int) -> None:
        """Note that output `index` has `num_tokens` tokens now."""
        self.times.setdefault(index, []).append((seconds, num_tokens))


def serving_metrics(run: ServedRun, token_times: TokenTimes) -> dict[str, float]:
    """Metrics of a run.

    `ttft` first token, `tpot` time per output token after the first, `itl` gaps between tokens, `e2el` whole request,
    in milliseconds; `seconds_per_token` is the mean of the paper's latency, (finish - arrival) / output tokens.
    """
    ttft, tpot, itl, e2el, per_token = [], [], [], [], []
    for index, output in enumerate(run.outputs):
        metrics, num_tokens = output.metrics, len(output.token_ids)
        if metrics.first_token_time is None or metrics.finish_time is None:
            continue
        latency = metrics.finish_time - metrics.arrival_time
        ttft.append(metrics.first_token_time - metrics.arrival_time)
        e2el.append(latency)
        per_token.append(latency / num_tokens)
        if num_tokens > 1:
            tpot.append((metrics.finish_time - metrics.first_token_time) / (num_tokens - 1))
        times = [seconds for seconds, _ in token_times.times.get(index, ())]
        itl += [later - earlier for earlier, later in pairwise(times)]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in run.outputs)
    result = {
        "request_throughput": len(run.outputs) / run.seconds,
        "output_throughput": run.tokens_per_second,
        "total_token_throughput": (num_prompt_tokens + run.num_output_tokens) / run.seconds,
        "seconds_per_token": mean(per_token) if per_token else 0.0,
        "duration_s": run.seconds,
    }
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2el", e2el)):
        result |= _summary(name, values)
    return result


def _summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    return {
        f"mean_{name}_ms": mean(ordered) * 1e3,
        f"median_{name}_ms": median(ordered) * 1e3,
        f"p99_{name}_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3,
    }
