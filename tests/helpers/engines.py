"""Engines on tiny models, and what Hugging Face's own greedy decoding says."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from neo_compile.runtime.cost_model import AnalyticCostModel
from neo_compile.runtime.device import DeviceConfig
from neo_compile.runtime.engine import Engine
from neo_compile.runtime.kv_cache import CacheConfig
from neo_compile.runtime.request import Tier
from neo_compile.runtime.sampling_params import SamplingParams
from neo_compile.runtime.scheduler_config import SchedulerConfig
from neo_compile.runtime.swap import LayerCopies

VOCAB_SIZE = 199


def tiny_llama(num_layers: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random Llama: 4 query heads on 2 KV heads, head_dim 8; weights so large that tokens depend on the context."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def balanced_costs(num_layers: int = 3, host_tokens_per_ms: float = 4000.0) -> AnalyticCostModel:
    """A device whose linear stage is flat to 64 tokens, beside a host fast enough that pipelining pays."""
    return AnalyticCostModel(
        num_layers=num_layers,
        linear_floor_ms=1.0,
        knee_tokens=64,
        linear_ms_per_token=0.02,
        device_tokens_per_ms=8000.0,
        host_tokens_per_ms=host_tokens_per_ms,
        swap_blocks_per_ms=100.0,
    )


def make_engine(model: Any, *, tokenizer: Any = None, cost_model: Any = None, **options: Any) -> Engine:
    """An engine with eager stages and one thread a side; keyword options go to the configs that know them."""
    cache_names = CacheConfig.__dataclass_fields__.keys()
    scheduler_names = SchedulerConfig.__dataclass_fields__.keys()
    device = {name: options.pop(name) for name in ("kind", "seed") if name in options}
    cache = {name: options.pop(name) for name in list(options) if name in cache_names}
    scheduler = {name: options.pop(name) for name in list(options) if name in scheduler_names}
    cache.setdefault("device_blocks", 8)
    cache.setdefault("host_blocks", 64)
    cache.setdefault("block_size", 16)
    return Engine(
        model,
        tokenizer,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**scheduler),
        device=DeviceConfig(device_threads=1, host_threads=1, pin_threads=False, **device),
        stages=options.pop("stages", "eager"),
        cost_model=cost_model or balanced_costs(model.config.num_hidden_layers),
        **options,
    )


def random_prompts(lengths: Sequence[int], seed: int = 0, low: int = 1, high: int = VOCAB_SIZE) -> list[list[int]]:
    """Random token ids in [low, high), one prompt per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (length,), generator=generator).tolist() for length in lengths]


def hf_greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy tokens of `model.generate` for one prompt alone."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
    return out[0, len(prompt) :].tolist()


def greedy(max_tokens: int = 16, **options: Any) -> SamplingParams:
    """Greedy sampling."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def run_to_end(engine: Engine, after_step: Any = None, max_steps: int = 5000) -> dict[str, list[int]]:
    """Step until nothing is left, checking the scheduler's books every iteration; tokens by request id."""
    finished: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return finished
        for output in engine.step():
            if output.is_finished:
                finished[output.request_id] = output.token_ids
        engine._core.scheduler.check_integrity()
        if after_step is not None:
            after_step(engine)
    raise AssertionError(f"not finished after {max_steps} iterations")


def poison_free_blocks(engine: Engine) -> None:
    """Fill every block that nobody owns with NaN: reading one shows in the tokens."""
    engine._core._poison_free_blocks()


def assert_all_blocks_free(engine: Engine) -> None:
    """No request holds a block in either tier."""
    for tier in Tier:
        pool = engine._core.scheduler.queues.pools[tier]
        assert pool.num_free == pool.num_blocks, f"{pool.num_blocks - pool.num_free} blocks leaked in {tier}"


def force_swaps(engine: Engine, random: Random, share: float = 0.4) -> int:
    """Move about `share` of the running requests to the other tier, as far as there is room; how many were moved.

    The copies are made by the same code as in an iteration, and freed blocks are poisoned at once.
    """
    queues, executor = engine._core.scheduler.queues, engine._core.executor
    num_moved = 0
    for request in queues.list_running():
        num_blocks = len(request.block_ids)
        if random.random() < share and queues.pools[request.tier.other].can_allocate(num_blocks):
            swap = queues.swap(request, num_blocks, engine._core.scheduler.iteration)
            LayerCopies.of_swaps([swap], executor.caches, executor.device.host_pool).finish()
            poison_free_blocks(engine)
            num_moved += 1
    return num_moved
