"""What `neo demo` says at its end: the setting, the table, and where the picture of one iteration lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from neo_compile.app.serving import ServedRun
from neo_compile.app.tables import format_table
from neo_compile.app.timeline_plot import choose_iteration, describe, plot_iteration
from neo_compile.runtime.timeline import Timeline

if TYPE_CHECKING:  # `neo --help` does not wait for torch
    from neo_compile.runtime.stats import EngineStats

SETTING = """\
{num_requests} requests of {num_prompt_tokens} prompt tokens in all, served at once in {dtype}.
Device cache {device_tokens} tokens, host cache {host_tokens} tokens.
The device is emulated: {device_threads} core(s) do a GPU's part (linear layers, prefill, decode attention over the
device cache), {host_threads} other core(s) are the host (decode attention over the host cache). Everything is really
computed, but the proportions are not a GPU's: here a core of either side reads memory equally fast, while a
GPU outruns its host 3 to 6 times. device-only has the same device cores and cache; what does not fit waits.
{figures}"""

HEADERS = ("policy", "tokens/s", "mean latency s", "on host", "swaps", "preempted", "iterations")


def print_report(
    runs: Mapping[str, Sequence[ServedRun]], stats: EngineStats, prompts: Sequence[Sequence[int]], dtype: str
) -> None:
    """Print setting and table. `runs` has the policies "device-only" and "neo", with equally many runs."""
    setting = SETTING.format(
        num_requests=len(prompts),
        num_prompt_tokens=sum(map(len, prompts)),
        dtype=dtype,
        device_tokens=stats.device_blocks * stats.block_size,
        host_tokens=stats.host_blocks * stats.block_size,
        device_threads=stats.device_threads,
        host_threads=stats.host_threads,
        figures=_describe_figures(len(runs["neo"])),
    )
    print(f"\n{setting}\n\n{format_table(HEADERS, [_row(policy, runs[policy]) for policy in runs])}\n")
    pairs = zip(runs["neo"], runs["device-only"], strict=True)
    gains = [neo.tokens_per_second / device_only.tokens_per_second for neo, device_only in pairs]
    print(f"neo : device-only = {median(gains):.2f} in tokens/s ({', '.join(f'{gain:.2f}' for gain in gains)})")
    strategies = ", ".join(f"{count} {name}" for name, count in runs["neo"][-1].strategies.items())
    print(f"neo's iterations, in the last run: {strategies}")
    outputs = zip(runs["neo"][0].outputs, runs["device-only"][0].outputs, strict=True)
    num_same = sum(neo.token_ids == device_only.token_ids for neo, device_only in outputs)
    print(f"Texts of both policies in {dtype}: {num_same} of {len(prompts)} the same.")
    if num_same < len(prompts) and dtype != "float32":
        print("(bfloat16 rounds differently in a batch of another size: an answer may turn elsewhere at a near-tie.)")


def _describe_figures(num_runs: int) -> str:
    if num_runs == 1:
        return "The figures are of a single run each."
    return f"The figures are medians of {num_runs} runs each, taken in turn."


def _row(policy: str, runs: Sequence[ServedRun]) -> tuple[object, ...]:
    counters = runs[-1].counters
    return (
        policy,
        median(run.tokens_per_second for run in runs),
        median(run.mean_latency_s for run in runs),
        counters["num_host_requests"],
        counters["num_swap_outs"] + counters["num_swap_ins"],
        counters["num_preemptions"],
        counters["num_iterations"],
    )


def write_timeline(timeline: Timeline, folder: Path, name: str) -> None:
    """Draw one iteration of `timeline` as `folder`/`name`.png, write the trace of all, and say where they are."""
    iteration = choose_iteration(timeline)
    if iteration is None:
        print("\nNo iteration had host attention: there is no timeline to draw.")
        return
    events = timeline.of_iteration(iteration)
    folder.mkdir(parents=True, exist_ok=True)
    picture, trace = folder / f"{name}.png", folder / f"{name}.json"
    plot_iteration(events, picture, title=f"neo: {describe(events)}")
    timeline.write_chrome_trace(trace)
    print(f"\nTimeline: {picture.resolve()}\n  {describe(events)}")
    print(f"  All iterations, for chrome://tracing or Perfetto: {trace.resolve()}")
