"""`neo explain`: what the compiler makes of a model."""

from __future__ import annotations

import argparse
from typing import Any

from neo_compile.app.models import SMOLLM2, encode_chat, load_model, parse_dtype
from neo_compile.app.options import MODEL_HELP, add_dtype_option


def add_parser(subparsers: Any) -> None:
    """Add the command to the `neo` command line."""
    parser = subparsers.add_parser(
        "explain",
        help="what the compiler makes of a model",
        description="Capture a model and report its attention sites, its linear stages, which of them share one "
        "compiled artefact, and the reason for whatever was left alone. Nothing is compiled. --dtype is what the "
        "weights are loaded in: it decides which of them can be packed.",
    )
    parser.add_argument("model", nargs="?", default=SMOLLM2, help=MODEL_HELP)
    add_dtype_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns the exit code."""
    import torch

    from neo_compile.explanation import explain

    model, tokenizer = load_model(args.model, parse_dtype(args.dtype))
    print(explain(model, torch.tensor([encode_chat(tokenizer, "Hello")])))
    return 0
