"""Models for `generate`, enabled with one tier or two, beside an untouched copy that says what is right."""

from __future__ import annotations

import copy
from typing import Any

import torch

import neo_compile
from neo_compile.runtime.cost_model import AnalyticCostModel
from neo_compile.runtime.device import DeviceConfig
from tests.helpers.engines import VOCAB_SIZE, balanced_costs, tiny_llama

ONE_THREAD = DeviceConfig(device_threads=1, host_threads=1, pin_threads=False)


def pair(**options: Any) -> tuple[Any, Any]:
    """A tiny Llama, and its twin in eager."""
    model = tiny_llama(**options)
    return model, copy.deepcopy(model)


def bytes_of(model: Any, num_blocks: int, block_size: int = 16) -> int:
    """KV bytes of so many blocks, float32."""
    config = model.config
    num_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return num_blocks * block_size * config.num_hidden_layers * num_heads * 2 * head_dim * 4


def enable_one_tier(model: Any) -> Any:
    """`enable` with eager stages and no budget."""
    return neo_compile.enable(model, stages="eager", device=ONE_THREAD)


def enable_tiers(
    model: Any,
    *,
    device_blocks: int = 8,
    host_blocks: int = 400,
    cost_model: AnalyticCostModel | None = None,
    **options: Any,
) -> Any:
    """`enable` with eager stages and two small tiers."""
    return neo_compile.enable(
        model,
        device_cache=bytes_of(model, device_blocks, options.get("block_size", 16)),
        host_cache=bytes_of(model, host_blocks, options.get("block_size", 16)),
        stages="eager",
        device=ONE_THREAD,
        cost_model=cost_model or balanced_costs(model.config.num_hidden_layers),
        **options,
    )


class FixedCosts(AnalyticCostModel):
    """Predictions that what was measured does not change."""

    def observe(self, *_: Any) -> None:
        pass

    def observe_part(self, *_: Any) -> None:
        pass


def pipelining_costs(num_layers: int = 3) -> AnalyticCostModel:
    """A host so slow beside the device's flat linear stage that two sub-batches are predicted to win."""
    return FixedCosts(
        num_layers=num_layers,
        linear_floor_ms=1.0,
        knee_tokens=64,
        linear_ms_per_token=0.02,
        device_tokens_per_ms=1e6,
        host_tokens_per_ms=40.0,
        swap_blocks_per_ms=100.0,
    )


def left_padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths with their padding on the left: input_ids and attention_mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.randint(1, VOCAB_SIZE, (len(lengths), width), generator=generator)
    attention_mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}
