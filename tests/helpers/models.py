"""Tiny Hugging Face models with random weights, by family. Weights are large, so that a wrong mask shows.

`FAMILIES` are served in full and `REFUSED` are not; docs/models.md is written from both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

VOCAB_SIZE = 97

_SLIDING_AND_FULL = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Families that the tests run by default, with what is special about them. Names are transformers' class prefixes.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mistral": {"sliding_window": 6},
    "Mixtral": {**_EXPERTS, "sliding_window": None},
    "Gemma2": {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {**_SLIDING_AND_FULL, "head_dim": 16, "query_pre_attn_scalar": 16},
    "Phi3": {"pad_token_id": 0},
    "GPT2": {},
    "GPTNeoX": {},
    "GPTJ": {"rotary_dim": 8},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "Falcon": {"alibi": False},
    "Cohere2": {**_SLIDING_AND_FULL, "pad_token_id": 0},
    "Starcoder2": {"sliding_window": 6},
    "Granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.8, "embedding_multiplier": 3.0},
    "Olmo2": {},
    "GptOss": {**_EXPERTS, "sliding_window": 6, "head_dim": 16},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "SmolLM3": {"pad_token_id": 0, "no_rope_layer_interval": 2},
}

# More of them, for the slow tests.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "BioGpt": {},
    "CodeGen": {"rotary_dim": 8},
    "Cohere": {"pad_token_id": 0},
    "Exaone4": _SLIDING_AND_FULL,
    "FalconNewDecoder": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "Gemma": {"head_dim": 16},
    "Glm4": {"head_dim": 16, "pad_token_id": 0},
    "GPTBigCode": {},
    "GraniteMoe": _EXPERTS,
    "Nemotron": {},
    "Olmo3": _SLIDING_AND_FULL,
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Persimmon": {},
    "Phi": {},
    "Phimoe": {**_EXPERTS, "sliding_window": 6},
    "Qwen2Moe": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "StableLm": {},
}


@dataclass(frozen=True)
class Refused:
    """A model that the runtime refuses. `reason` is a pattern of the error's text."""

    family: str
    overrides: dict[str, Any]
    reason: str


REFUSED: dict[str, Refused] = {
    "Bloom": Refused("Bloom", {"n_layer": 2, "n_head": 4}, "adds ALiBi biases"),
    "MPT": Refused("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "adds ALiBi biases"),
    "Falcon with ALiBi": Refused("Falcon", {"alibi": True}, "adds ALiBi biases"),
    "Mamba": Refused("Mamba", {}, "layers of type linear_attention"),
    "RWKV": Refused("Rwkv", {}, "keeps recurrent state"),
    "Qwen3-Next": Refused("Qwen3Next", {}, "layers of type linear_attention"),
    "Jamba": Refused("Jamba", {"use_mamba_kernels": False}, "layers of type linear_attention"),
    "MiniMax": Refused("MiniMax", {}, "layers of type linear_attention"),
    "Falcon-H1": Refused("FalconH1", {}, "layers of type hybrid"),
    "T5": Refused("T5", {"d_model": 64, "num_layers": 2, "num_heads": 4}, "is an encoder-decoder"),
    "BART (decoder)": Refused("Bart", {"decoder_layers": 2, "encoder_layers": 2, "d_model": 64}, "no position_ids"),
    "Llama 4": Refused("Llama4Text", {}, "layers of type chunked_attention"),
    "Doge": Refused("Doge", {}, "a mask that it builds itself"),
    "DiffLlama": Refused("DiffLlama", {}, "more than once"),
    "GPT-Neo": Refused(
        "GPTNeo",
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 6},
        "changes the mask that it is given",
    ),
    "Llama with dynamic RoPE": Refused(
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "'dynamic', which depends on the sequence's length",
    ),
    "Phi-3 with longrope": Refused(
        "Phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
        },
        "'longrope', which depends on the sequence's length",
    ),
}

# Class names that are not family + "Config" or family + "ForCausalLM".
_CONFIG_CLASSES = {
    "FalconNewDecoder": "FalconConfig",
}
_MODEL_CLASSES = {
    "FalconNewDecoder": "FalconForCausalLM",
    "Gemma3Text": "Gemma3ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Llama4Text": "Llama4ForCausalLM",
    "T5": "T5ForConditionalGeneration",
}
# Soft caps and sinks are only right in transformers' eager attention.
_ATTENTION = {"Gemma2": "eager", "GptOss": "eager"}


def tiny_model(
    family: str = "Llama",
    *,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attn_implementation: str | None = None,
    **overrides: Any,
) -> Any:
    """A causal language model of `family` in eval mode: 4 query heads, 2 KV heads, hidden size 64."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    own = {**MORE_FAMILIES, **FAMILIES}.get(family, {})
    config_class = getattr(transformers, _CONFIG_CLASSES.get(family, f"{family}Config"))
    config = config_class(**{**common, **own, **overrides})
    torch.manual_seed(seed)
    attn_implementation = attn_implementation or _ATTENTION.get(family)
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model_class = getattr(transformers, _MODEL_CLASSES.get(family, f"{family}ForCausalLM"))
    model = model_class._from_config(config, **kwargs) if kwargs else model_class(config)
    return model.to(dtype).eval()


def slow(names: Iterable[str]) -> list[Any]:
    """Parameters for the slow tests."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def family_model(family: str) -> Any:
    """`tiny_model(family)`, the same one for all tests of a process: they share its capture. Not to be changed."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def eager_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """The model's own logits [S, V] for one sequence, without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
