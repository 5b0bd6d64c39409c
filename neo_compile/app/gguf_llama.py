"""A Llama-architecture GGUF file, rewritten once as a bf16 Hugging Face folder.

transformers has a GGUF reader of its own, but it wants accelerate, and its tokenizer loses the digit splitting that
SmolLM2 was trained with (every digit is a token). This one is exact for the one architecture that we ship a demo of,
and refuses others.

Shapes: GGUF lists dimensions fastest first; `dequantize` returns them in torch's order, [out_features, in_features].
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from neo_compile.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

CONTROL_TOKEN = 3  # GGUF's token_type of special tokens

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write config, bf16 weights, generation config and tokenizer of `gguf_path` into the existing directory `folder`.

    Raises UnsupportedModelError for an architecture other than Llama with full rotary embeddings, or another tokenizer
    than byte-level BPE.
    """
    import gguf

    reader = gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    check_supported(fields)
    config = build_config(fields)
    model = build_model(config, reader.tensors)
    model.generation_config.update(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    build_tokenizer(fields).save_pretrained(folder)


def check_supported(fields: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for a file that would be converted wrongly."""
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise UnsupportedModelError(f"GGUF architecture {architecture!r}: only 'llama' can be converted")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise UnsupportedModelError("GGUF file with scaled rotary embeddings: not converted")
    if fields["tokenizer.ggml.model"] != "gpt2" or fields.get("tokenizer.ggml.pre") != "smollm":
        kind = f"{fields['tokenizer.ggml.model']}/{fields.get('tokenizer.ggml.pre')}"
        raise UnsupportedModelError(f"GGUF tokenizer {kind!r}: only 'gpt2/smollm' can be converted")


def build_config(fields: dict[str, Any]) -> Any:
    """transformers' LlamaConfig from the GGUF metadata."""
    from transformers import LlamaConfig

    num_heads, hidden_size = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=hidden_size // num_heads,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


def build_model(config: Any, tensors: Any) -> Any:
    """LlamaForCausalLM in bf16 with the dequantised tensors; none may be missing and none may be left."""
    from transformers import LlamaForCausalLM

    state = {}
    for tensor in tensors:
        name, weight = translate_name(tensor.name), _dequantize(tensor)
        if name.endswith("q_proj.weight"):
            weight = unpermute_rotary(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = unpermute_rotary(weight, config.num_key_value_heads)
        state[name] = weight.to(torch.bfloat16)
    config.tie_word_embeddings = "lm_head.weight" not in state
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    return model


def translate_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises UnsupportedModelError for unknown names.
    """
    parts = name.split(".")
    try:
        if parts[0] == "blk":
            return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
        return f"{TOP_TENSORS[parts[0]]}.{parts[1]}"
    except (KeyError, IndexError):
        raise UnsupportedModelError(f"GGUF tensor {name!r} has no place in a Llama model") from None


def unpermute_rotary(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order for q and k: it interleaves the two halves of a head that rotate together.

    weight: [num_heads * head_dim, in_features].
    """
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _dequantize(tensor: Any) -> torch.Tensor:
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())


def build_tokenizer(fields: dict[str, Any]) -> Any:
    """Byte-level BPE that splits every digit, with the special tokens and the ChatML template of the file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        model_max_length=fields["llama.context_length"],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )
