"""Prompt and output lengths of real services: from percentile tables that the package ships, or from a file."""

from __future__ import annotations

import csv
import gzip
import json
import random
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from neo_compile.errors import ConfigError

_PERCENTILES: dict[str, Any] = json.loads(
    files("neo_compile.app.bench").joinpath("trace_percentiles.json").read_text(encoding="utf-8")
)
TRACES = tuple(_PERCENTILES)
_COLUMNS = (("ContextTokens", "GeneratedTokens"), ("input_length", "output_length"), ("prompt", "max_tokens"))


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt_tokens: int
    output_tokens: int


def read_lengths(trace: str, num_requests: int, seed: int = 0) -> list[Lengths]:
    """`num_requests` lengths of a trace.

    Args:
        trace: a name of `TRACES` (prompt and output lengths are drawn independently from its percentiles), or a file:
            .csv with ContextTokens and GeneratedTokens, or .json / .jsonl with input_length and output_length (or
            prompt and max_tokens), gzipped or not; its first requests are taken.

    Raises:
        ConfigError: no such trace or file, or a file with other columns or too few requests.
    """
    if trace in _PERCENTILES:
        table = _PERCENTILES[trace]
        generator = random.Random(seed)

        def draw(name: str) -> int:
            return _draw(generator.random(), table["percentiles"], table[name])

        return [Lengths(draw("prompt_tokens"), draw("output_tokens")) for _ in range(num_requests)]
    path = Path(trace)
    if not path.is_file():
        raise ConfigError(f"no trace {trace!r}: use {', '.join(TRACES)} or a .csv, .json or .jsonl file (also .gz)")
    try:
        lengths = list(islice(_read_file(path), num_requests))
    except ConfigError:
        raise
    except (OSError, EOFError, zlib.error, csv.Error, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"cannot read --trace {path}: {error}") from error
    if len(lengths) < num_requests:
        raise ConfigError(f"{trace} holds {len(lengths)} requests, --num-requests asks for {num_requests}")
    return lengths


def _draw(quantile: float, percentiles: Sequence[float], values: Sequence[float]) -> int:
    """The value at a quantile in [0, 1); between the table's percentiles it grows geometrically, as long tails do."""
    percent = 100 * quantile
    right = min(bisect_right(percentiles, percent), len(percentiles) - 1)
    left = right - 1
    share = (percent - percentiles[left]) / (percentiles[right] - percentiles[left])
    growth: float = (values[right] / values[left]) ** share
    return max(1, round(values[left] * growth))


def _read_file(path: Path) -> Any:
    open_text = gzip.open if path.suffix == ".gz" else open
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    with open_text(path, "rt", encoding="utf-8") as lines:
        rows: Any
        if kind == ".csv":
            rows = csv.DictReader(lines)
        elif kind == ".jsonl":
            rows = map(json.loads, lines)
        elif kind == ".json":
            rows = json.load(lines)
        else:
            raise ConfigError(f"{path}: unknown kind of trace {kind!r}, use .csv, .json or .jsonl (also .gz)")
        if not isinstance(rows, Iterable) or isinstance(rows, dict):
            raise ConfigError(f"{path} holds no requests: it must be a list of objects")
        for row in rows:
            yield _lengths_of(row, path)


def _lengths_of(row: Any, path: Path) -> Lengths:
    if not isinstance(row, dict):
        raise ConfigError(f"{path} holds {row!r}, where a request must be an object with the tokens of each side")
    for prompt_column, output_column in _COLUMNS:
        if prompt_column in row and output_column in row:
            return Lengths(max(1, int(row[prompt_column])), max(1, int(row[output_column])))
    known = " or ".join(f"{prompt} and {output}" for prompt, output in _COLUMNS)
    raise ConfigError(f"{path} has the columns {', '.join(map(str, row))}; {known} are needed")
