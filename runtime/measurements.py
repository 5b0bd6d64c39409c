"""Measures what the parts of an iteration cost on this machine, one table at a time.

What is measured is what the executor runs: the captured linear stages (with attention left out), the prefill attention
with the writing and gathering of its KV, the decode kernels on either side's threads, the block copies, the sampling.
KV is spread over more memory than the last-level cache holds, as when the layers of an iteration follow each other.
Host work is timed by its ticket; what the launching thread sees beyond that (submission, wake-up) is `launch_ms`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from neo_compile.attention import AttentionSite
from neo_compile.runtime.cost_grid import Grid
from neo_compile.runtime.executor import Executor, IterationTimes
from neo_compile.runtime.kernel_costs import KernelBench, Report
from neo_compile.runtime.plan import IterationPlan, Strategy, SubBatch
from neo_compile.runtime.request import Request, Tier
from neo_compile.runtime.sampler import TokenSampler, sample_rows
from neo_compile.runtime.sampling_params import SamplingParams
from neo_compile.runtime.timing import increasing, lower_quartile, typical_ms

_LEAST_LAUNCH_MS = 0.005  # attention may be done before anybody waits for it, but no launch is free

OnProgress = Callable[[float, str], None]
"""Called with the share that is done (0 to 1) and what is measured next."""


def measure_tables(executor: Executor, grid: Grid, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """All tables, as `TableCostModel` reads them. Call inside `device.launching()`, while no request holds KV."""
    device, cache = executor.device, executor.caches[Tier.DEVICE]
    site = executor.staged.sites[0]
    bench = KernelBench(site, cache.block_size, cache.dtype, grid)
    steps: dict[str, Callable[[Report], dict[str, Any]]] = {
        "linear": lambda report: _linear_table(executor, grid, report),
        "logits": lambda report: _logits_table(executor, grid, report),
        "sampling": lambda report: _sampling_table(executor, grid, report),
        "prefill_attention": lambda report: bench.prefill_table(report, device.attention_pool),
        "device_decode": lambda report: bench.decode_table(report, device.attention_pool, is_host=False),
        "host_attention": lambda report: bench.decode_table(report, device.host_pool, is_host=True),
        "swap": lambda report: bench.swap_table(report, device.host_pool, device.swap_gbps),
    }
    tables: dict[str, Any] = {}
    for number, (name, measure) in enumerate(steps.items()):

        def report(share: float, number: int = number, name: str = name) -> None:
            if on_progress is not None:
                on_progress((number + share) / len(steps), name.replace("_", " "))

        tables[name] = measure(report)
    return tables | _measure_overheads(executor, tables["linear"]["ms"][0])


class _NoAttention:
    """An attention handler that costs nothing: linear stages by themselves."""

    def begin(self, site: AttentionSite, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any) -> torch.Tensor:
        return torch.zeros((q.shape[0], site.num_q_heads, site.v_head_dim), dtype=q.dtype)

    def finish(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket


def _stages_runner(executor: Executor, num_tokens: int, num_rows: int, on_stage: Any = None) -> Callable[[], Any]:
    """All linear stages over `num_tokens`, with the logits of `num_rows` of them."""
    inputs = {
        "input_ids": torch.ones((1, num_tokens), dtype=torch.int64),
        "position_ids": torch.arange(num_tokens).unsqueeze(0),
        "logit_rows": torch.arange(num_rows),
    }
    return lambda: executor.staged.run(_NoAttention(), on_stage=on_stage, **inputs)


def _linear_table(executor: Executor, grid: Grid, report: Report) -> dict[str, Any]:
    num_layers, points = len(executor.staged.sites), grid.linear_tokens
    times = []
    for done, num_tokens in enumerate(points):
        report(done / len(points))
        times.append(typical_ms(_stages_runner(executor, num_tokens, 1), grid.num_repeats) / num_layers)
    return {"tokens": list(points), "ms": increasing(times)}


def _logits_table(executor: Executor, grid: Grid, report: Report) -> dict[str, Any]:
    """The last stage with all rows' logits, less the same with one row's."""
    last_stage = executor.staged.num_stages - 1
    took: list[float] = []

    def on_stage(stage: int, start_ns: int, end_ns: int) -> None:
        if stage == last_stage:
            took.append((end_ns - start_ns) / 1e6)

    times = []
    for done, num_rows in enumerate(grid.logit_rows):
        report(done / len(grid.logit_rows))
        one, all_rows = (_stages_runner(executor, num_rows, rows, on_stage) for rows in (1, num_rows))
        took.clear()
        for _ in range(grid.num_repeats + 1):  # the first pair warms up
            one()
            all_rows()
        times.append(max(0.0, lower_quartile(took[3::2]) - lower_quartile(took[2::2])))
    return {"rows": list(grid.logit_rows), "ms": [0.0, *increasing(times)[1:]]}


def _sampling_table(executor: Executor, grid: Grid, report: Report) -> dict[str, Any]:
    """Greedy sampling; other ways cost more and are learnt while they are used."""
    logits = _stages_runner(executor, 1, 1)()[0]
    greedy = TokenSampler(SamplingParams(temperature=0.0))
    times = []
    for done, num_rows in enumerate(grid.logit_rows):
        report(done / len(grid.logit_rows))
        rows = torch.randn(num_rows, logits.shape[-1]).to(logits.dtype)
        samplers, token_ids = [greedy] * num_rows, [list[int]] * num_rows
        run = lambda r=rows, s=samplers, t=token_ids: sample_rows(r, s, t)  # noqa: E731
        times.append(typical_ms(run, grid.num_repeats))
    return {"rows": list(grid.logit_rows), "ms": increasing(times)}


def _measure_overheads(executor: Executor, linear_ms: float) -> dict[str, float]:
    """Iterations of one decode over a context of one block, run by the executor itself in each tier.

    Beside the linear stages (`linear_ms` a layer) and the attention they take `overhead_ms`; host attention, seen by
    the launching thread, takes `launch_ms` more than by its ticket.
    """
    num_layers = len(executor.staged.sites)
    device_times = _lone_decode_times(executor, Tier.DEVICE)
    overhead_ms = lower_quartile([times.parts()["linear"] for times in device_times]) - num_layers * linear_ms
    host_times = _lone_decode_times(executor, Tier.HOST)
    launches = [(times.wait_ms - sum(times.host_attention_ms)) / num_layers for times in host_times]
    return {
        "overhead_ms": max(0.0, overhead_ms),
        "launch_ms": max(_LEAST_LAUNCH_MS, lower_quartile(launches)) if launches else 0.0,
    }


def _lone_decode_times(executor: Executor, tier: Tier) -> list[IterationTimes]:
    """Times of a few iterations of one request of two tokens; none if the tier has no block."""
    if executor.caches[tier].num_blocks == 0:
        return []
    request = Request("profile", [0], max_tokens=2, output_token_ids=[0], num_computed_tokens=1, block_ids=[0])
    on_device = tier is Tier.DEVICE
    sub_batch = SubBatch(device_decodes=(request,)) if on_device else SubBatch(host_decodes=(request,))
    plan = IterationPlan(Strategy.DEVICE_ONLY if on_device else Strategy.UNSPLIT, (sub_batch,))
    return [executor.execute(plan).times for _ in range(9)][1:]
