"""The real model of the tests, and tiny models on disk for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from neo_compile.app.models import ModelNotFoundError, find_smollm2_gguf, load_smollm2


def require_smollm2(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model and tokenizer; skips the test, visibly, where the package is not installed (`make model` installs it)."""
    try:
        find_smollm2_gguf()
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    return load_smollm2(dtype)


def save_tiny_llama(folder: Path) -> Path:
    """A random two-layer Llama with a byte-level tokenizer and no chat template, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0, **{byte: i for i, byte in enumerate(alphabet, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
