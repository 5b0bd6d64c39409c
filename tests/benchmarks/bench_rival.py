"""Whole loads of SmolLM2 under neo and under transformers' own batching: 8 OSC-like requests, 864 tokens of KV.

`neo bench rival` is the careful comparison (turns, several runs, traces); this is its matrix for pytest-benchmark.
"""

from __future__ import annotations

import pytest
import torch

from neo_compile import _native
from neo_compile.app.bench.loads import random_prompts
from neo_compile.app.bench.rivals import RIVALS, all_cores
from neo_compile.app.bench.traces import read_lengths
from neo_compile.runtime.engine import Engine
from neo_compile.runtime.kv_cache import CacheConfig
from neo_compile.runtime.sampling_params import SamplingParams
from tests.helpers.smollm import require_smollm2

BUDGET = 864
LENGTHS = read_lengths("osc", 8)
OUTPUT_LENS = [each.output_tokens for each in LENGTHS]


@pytest.fixture(scope="module")
def model():
    return require_smollm2(torch.bfloat16)[0]


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, cache=CacheConfig(device_tokens=BUDGET, host_tokens=16_000)) as engine:
        yield engine


def run_neo(engine, prompts):
    params = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in OUTPUT_LENS]
    return [output.token_ids for output in engine.generate(prompts, params)]


@pytest.mark.parametrize("impl", ["neo", *RIVALS])
def test_load(benchmark, model, engine, impl):
    prompts = random_prompts(LENGTHS, engine.vocab_size, seed=0)
    if impl == "neo":
        outputs = benchmark.pedantic(run_neo, (engine, prompts), rounds=3, warmup_rounds=1)
    else:
        with all_cores(len(_native.usable_cpus())):
            outputs = benchmark.pedantic(RIVALS[impl], (model, prompts, OUTPUT_LENS, BUDGET), rounds=3)
    assert [len(output) for output in outputs] == OUTPUT_LENS
    benchmark.extra_info["tokens_per_s"] = sum(OUTPUT_LENS) / benchmark.stats["median"]
