"""What a linear stage costs besides its arithmetic: `pytest tests/benchmarks/bench_dispatch.py --benchmark-only`.

    program-*      a whole run whose stages and sites do nothing: registers, checks, coroutine; us_per_stage is ours
    stage-*        one compiled stage of a tiny model with one token: all that remains of it is calls

A layer of a run is one inner stage and one site. Nothing here depends on a model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from neo_compile.attention import AttentionSite
from neo_compile.capture import capture
from neo_compile.staged import Artifact, StagedModel
from tests.helpers.models import tiny_model

NUM_LAYERS = 12
TARGET_US = 10.0  # of the program, per stage
ONE_TOKEN = {
    "input_ids": torch.ones(1, 1, dtype=torch.int64),
    "position_ids": torch.zeros(1, 1, dtype=torch.int64),
    "logit_rows": torch.zeros(1, dtype=torch.int64),
}


class Echo:
    """Attention that costs nothing: q is as good a result as any."""

    def begin(self, site: AttentionSite, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: object) -> Any:
        """The ticket is q."""
        return q

    def finish(self, ticket: Any) -> Any:
        """The result is q."""
        return ticket


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "packed"])
def staged(request: pytest.FixtureRequest) -> StagedModel:
    """A tiny Llama in stages for one thread."""
    torch.set_num_threads(1)
    return capture(tiny_model("Llama", num_layers=NUM_LAYERS), packed_linear=request.param, num_threads=1)


def recorded(staged: StagedModel) -> list[tuple[list[Any], Sequence[Any]]]:
    """Inputs and results of every stage in a run of one token."""
    calls: list[tuple[list[Any], Sequence[Any]]] = []

    def watch(function: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
        def call(values: list[Any]) -> Sequence[Any]:
            inputs = list(values)
            calls.append((inputs, function(values)))
            return calls[-1][1]

        return call

    artifacts = list(dict.fromkeys(stage.artifact for stage in staged.program.stages if stage.artifact))
    functions = [artifact.function for artifact in artifacts]
    for artifact in artifacts:
        artifact.function = watch(artifact.function)
    staged.run(Echo(), **ONE_TOKEN)
    for artifact, function in zip(artifacts, functions, strict=True):
        artifact.function = function
    return calls


@pytest.mark.benchmark(group="dispatch")
def test_program(benchmark: Any, staged: StagedModel) -> None:
    stages = tuple(
        replace(stage, artifact=Artifact(lambda values, results=results: results, "eager"))
        for stage, (_, results) in zip(staged.program.stages, recorded(staged), strict=True)
    )
    idle = StagedModel(
        replace(staged.program, stages=stages), stage_keys=staged.stage_keys, named_inputs=staged.named_inputs
    )
    benchmark(lambda: idle.run(Echo(), **ONE_TOKEN))
    per_stage_us = benchmark.stats.stats.min * 1e6 / idle.num_stages
    benchmark.extra_info.update(us_per_stage=round(per_stage_us, 2), target_us=TARGET_US)


@pytest.mark.benchmark(group="dispatch")
@pytest.mark.parametrize(("kind", "index"), [("first", 0), ("inner", 1), ("last", -1)], ids=["first", "inner", "last"])
def test_stage(benchmark: Any, staged: StagedModel, kind: str, index: int) -> None:
    inputs, _ = recorded(staged)[index]
    artifact = staged.program.stages[index].artifact
    assert artifact
    assert artifact.kind == "inductor"
    with torch.no_grad():
        benchmark(lambda: artifact.function(list(inputs)))
    benchmark.extra_info.update(us=round(benchmark.stats.stats.min * 1e6, 1), inputs=len(inputs))
