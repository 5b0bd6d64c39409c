"""The options of `neo bench kernel`, checked: one line that names the value, the limit and the option."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from neo_compile import _native
from neo_compile.app.bench import peers
from neo_compile.app.bench.bandwidth import last_level_cache_bytes
from neo_compile.app.bench.cases import KernelCase
from neo_compile.app.bench.kernel import DEFAULTS, QUICK
from neo_compile.app.bench.measure import FULL_EFFORT, QUICK_EFFORT, Effort
from neo_compile.errors import CapacityError, ConfigError
from neo_compile.runtime.kv_cache import available_memory_bytes

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure and how long. `arena_bytes`: memory that the calls of a case walk over, at least."""

    cases: tuple[KernelCase, ...]
    impls: tuple[str, ...]
    threads: int
    effort: Effort
    arena_bytes: int
    json_path: Path | None = None
    skip_flex: bool = False


def read_settings(args: argparse.Namespace) -> Settings:
    """Settings from the command's options. Raises ConfigError or CapacityError."""
    defaults = QUICK if args.quick else DEFAULTS

    def values(option: str, parse: Callable[[str, str], T]) -> list[T]:
        words = split_list(getattr(args, option) or [defaults[option]])
        flag = f"--{option.replace('_', '-')}"
        if not words:
            raise ConfigError(f"{flag} is empty")
        return [parse(flag, word) for word in words]

    block_size = parse_count("--block-size", args.block_size)
    shapes = itertools.product(
        values("dtype", parse_dtype_name),
        values("heads", parse_heads),
        values("head_dim", parse_count),
        values("context_len", parse_count),
        values("batch", parse_count),
    )
    cases = tuple(
        KernelCase(
            dtype=dtype,
            batch=batch,
            context_len=context_len,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            block_size=block_size,
            is_scattered=args.scattered,
        )
        for dtype, heads, head_dim, context_len, batch in shapes
    )
    cold_bytes = last_level_cache_bytes() * (2 if args.quick else 6)
    _check_memory(cases, cold_bytes)
    effort = QUICK_EFFORT if args.quick else FULL_EFFORT
    return Settings(
        cases=cases,
        impls=tuple(peers.select(split_list(args.impl or list(peers.DEFAULT_NAMES)))),
        threads=read_threads(args.threads),
        effort=effort if args.rounds is None else replace(effort, rounds=parse_count("--rounds", args.rounds)),
        arena_bytes=cold_bytes,
        json_path=Path(args.json) if args.json else None,
        skip_flex=args.quick and args.impl is None,
    )


def split_list(words: list[str]) -> list[str]:
    """["a,b", "c"] -> ["a", "b", "c"]."""
    return [part for word in words for part in word.split(",") if part]


def parse_count(flag: str, word: str) -> int:
    """A positive integer below 2**20."""
    if not re.fullmatch(r"[0-9]+", word) or not 1 <= int(word) < 2**20:
        raise ConfigError(f"{flag}: {word!r} is not a whole number of at least 1 (and below 2**20)")
    return int(word)


def parse_dtype_name(flag: str, word: str) -> str:
    """A torch name, or a short form of it."""
    if word not in DTYPES and word not in DTYPES.values():
        raise ConfigError.unknown(flag, word, [*DTYPES, *DTYPES.values()])
    return DTYPES.get(word, word)


def parse_heads(flag: str, word: str) -> tuple[int, int]:
    """ "32/8" -> (32, 8): query heads, KV heads."""
    if not re.fullmatch(r"[0-9]+/[0-9]+", word):
        raise ConfigError(f"{flag}: {word!r} is not QUERY_HEADS/KV_HEADS, such as 32/8")
    num_q_heads, num_kv_heads = (parse_count(flag, part) for part in word.split("/"))
    if num_q_heads % num_kv_heads:
        raise ConfigError(f"{flag}: {num_q_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    return num_q_heads, num_kv_heads


def read_threads(word: str | None) -> int:
    """--threads, at most the CPUs that this process may use (the default)."""
    usable = len(_native.usable_cpus())
    threads = usable if word is None else parse_count("--threads", word)
    if threads > usable:
        raise ConfigError(f"--threads {threads}: this process may use {usable} CPUs")
    return threads


def _check_memory(cases: tuple[KernelCase, ...], arena_bytes: int) -> None:
    largest = max(cases, key=lambda case: case.slot_bytes)
    need, limit = max(largest.slot_bytes, arena_bytes), available_memory_bytes() // 2
    if need > limit:
        raise CapacityError(
            f"{largest} takes {need / 2**30:.1f} GiB of keys and values; half of the free memory is "
            f"{limit / 2**30:.1f} GiB: lower --batch or --context-len",
            need=need,
            limit=limit,
            knob="--batch",
        )
