"""Tiny Hugging Face models with random weights, one per family. Weights are large, so that a wrong mask shows."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB_SIZE = 97

# Families by what is special about their attention; names are transformers' class prefixes.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 16},
    "GPT2": {},
    "Phi3": {"pad_token_id": 0},
    "GptOss": {"sliding_window": 6, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "StableLm": {},
    "Olmo2": {},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}

_CONFIG_CLASSES = {"Gemma3Text": "Gemma3TextConfig"}
# Soft caps and sinks are only right in transformers' eager attention.
_ATTENTION = {"Gemma2": "eager", "GptOss": "eager"}
_MODEL_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


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
    config_class = getattr(transformers, _CONFIG_CLASSES.get(family, f"{family}Config"))
    config = config_class(**{**common, **FAMILIES.get(family, {}), **overrides})
    torch.manual_seed(seed)
    attn_implementation = attn_implementation or _ATTENTION.get(family)
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model_class = getattr(transformers, _MODEL_CLASSES.get(family, f"{family}ForCausalLM"))
    model = model_class._from_config(config, **kwargs) if kwargs else model_class(config)
    return model.to(dtype).eval()


@torch.no_grad()
def eager_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """The model's own logits [S, V] for one sequence, without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
