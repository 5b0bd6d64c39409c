"""`model.generate` with and without neo: `pytest tests/benchmarks/bench_generate.py --benchmark-only`.

SmolLM2 on all cores, no memory limit, a batch of equal prompts. Every round runs each way once, in turn, so that all of
them see the same machine; the benchmark's time is that of a round. `extra_info` has tokens/s of each way (medians)
and neo's ratio to it:

    eager     the model as it is
    frozen    its forward compiled by Inductor with frozen (packed) weights
    static    cache_implementation="static" and transformers' own torch.compile
    neo       neo_compile.enable(model)

Sizes and ways can be set in the environment (NEO_BENCH_BATCH, NEO_BENCH_NEW_TOKENS, NEO_BENCH_WAYS, ...).
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

import neo_compile
from tests.helpers.smollm import require_smollm2

BATCH = int(os.environ.get("NEO_BENCH_BATCH", "16"))
PROMPT_TOKENS = int(os.environ.get("NEO_BENCH_PROMPT_TOKENS", "128"))
NEW_TOKENS = int(os.environ.get("NEO_BENCH_NEW_TOKENS", "128"))
ROUNDS = int(os.environ.get("NEO_BENCH_ROUNDS", "3"))
WAYS = tuple(os.environ.get("NEO_BENCH_WAYS", "eager,frozen,static,neo").split(","))


def _frozen(model: Any) -> Callable[..., torch.Tensor]:
    from torch._inductor import config as inductor_config

    model = copy.deepcopy(model)
    original = model.forward
    compiled = torch.compile(original, dynamic=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with inductor_config.patch(freezing=True):
            return compiled(*args, **kwargs)

    model.forward = functools.wraps(original)(forward)  # `generate` looks at the signature
    return model.generate


def _static(model: Any) -> Callable[..., torch.Tensor]:
    model = copy.deepcopy(model)
    model.forward = torch.compile(model.forward)

    def generate(**options: Any) -> torch.Tensor:
        return model.generate(**options, cache_implementation="static")

    return generate


def _neo(model: Any) -> Callable[..., torch.Tensor]:
    model = copy.deepcopy(model)
    neo_compile.enable(model)
    return model.generate


_MAKERS = {"eager": lambda model: model.generate, "frozen": _frozen, "static": _static, "neo": _neo}


@pytest.mark.timeout(0)  # compiling the whole model takes minutes, twice
@pytest.mark.parametrize("batch", [BATCH, 1], ids=lambda batch: f"batch{batch}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_generate(benchmark, dtype, batch):
    model, _ = require_smollm2(getattr(torch, dtype))
    torch.manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (batch, PROMPT_TOKENS))
    options = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    ways = {name: _MAKERS[name](model) for name in WAYS}
    for generate in ways.values():  # compiles, captures; a static cache is as long as the whole generation
        generate(**options)
    seconds: dict[str, list[float]] = {name: [] for name in ways}

    def run_round() -> None:
        for name, generate in ways.items():
            start = time.perf_counter()
            generate(**options)
            seconds[name].append(time.perf_counter() - start)

    benchmark.pedantic(run_round, rounds=ROUNDS)
    for name, times in seconds.items():
        benchmark.extra_info[f"{name}_tokens_per_s"] = round(batch * NEW_TOKENS / median(times), 1)
        ratios = [other / own for other, own in zip(times, seconds["neo"], strict=True)]
        benchmark.extra_info[f"neo_over_{name}"] = round(median(ratios), 3)
