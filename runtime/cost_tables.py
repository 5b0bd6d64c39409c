"""A cost model that interpolates measured tables, and its JSON form (`cost_files` keeps it)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from neo_compile.errors import ConfigError
from neo_compile.runtime.cost_model import CostModel
from neo_compile.runtime.interpolation import Table1D, Table2D

FORMAT_VERSION = 4
_NOTHING = Table1D("nothing", [1], [0.0])


class TableCostModel(CostModel):
    """Milliseconds per layer, from tables.

    `tables` holds
        "linear": {"tokens": [...], "ms": [...]}, one row's logits included
        "prefill_attention": {"tokens": [...], "starts": [...], "ms": [[...], ...]} (a row per number of tokens)
        "device_decode", "host_attention": {"requests": [...], "kv_tokens": [...], "ms": [[...], ...]} (a row per
            number of requests; kv_tokens is the sum over them)
        "swap": {"blocks": [...], "ms": [...]}
        "logits" (of an iteration, beyond the first row), "sampling": {"rows": [...], "ms": [...]}, 0 if left out
        "launch_ms" and "overhead_ms": numbers, 0 if left out
    """

    def __init__(self, tables: Mapping[str, Any], *, num_layers: int, key: Mapping[str, Any] | None = None) -> None:
        missing = {"linear", "prefill_attention", "device_decode", "host_attention", "swap"} - tables.keys()
        if missing:
            raise ConfigError(f"cost tables lack {', '.join(sorted(missing))}")
        super().__init__(
            num_layers=num_layers,
            launch_ms=float(tables.get("launch_ms", 0.0)),
            overhead_ms=float(tables.get("overhead_ms", 0.0)),
        )
        self.key = dict(key or {})
        self.tables = dict(tables)
        self._linear = _table_1d(tables, "linear", "tokens")
        self._prefill_attention = _table_2d(tables, "prefill_attention", "tokens", "starts")
        self._device_decode = _table_2d(tables, "device_decode", "requests", "kv_tokens")
        self._host_attention = _table_2d(tables, "host_attention", "requests", "kv_tokens")
        self._swap = _table_1d(tables, "swap", "blocks")
        self._logits = _table_1d(tables, "logits", "rows") if "logits" in tables else _NOTHING
        self._sampling = _table_1d(tables, "sampling", "rows") if "sampling" in tables else _NOTHING

    def raw_linear_ms(self, num_tokens: int) -> float:
        return self._linear(num_tokens)

    def raw_prefill_attention_ms(self, num_tokens: int, start: int) -> float:
        return self._prefill_attention(num_tokens, start)

    def raw_logits_ms(self, num_logits: int) -> float:
        return self._logits(num_logits)

    def raw_sampling_ms(self, num_logits: int) -> float:
        return self._sampling(num_logits)

    def raw_device_decode_ms(self, num_requests: int, kv_tokens: int) -> float:
        return self._device_decode(num_requests, kv_tokens)

    def raw_host_attention_ms(self, num_requests: int, kv_tokens: int) -> float:
        return self._host_attention(num_requests, kv_tokens)

    def raw_swap_ms(self, num_blocks: int) -> float:
        return self._swap(num_blocks)

    def to_json(self) -> str:
        document = {
            "version": FORMAT_VERSION,
            "key": self.key,
            "num_layers": self.num_layers,
            "tables": self.tables,
        }
        return json.dumps(document, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, key: Mapping[str, Any] | None = None) -> TableCostModel:
        """Reads what `to_json` wrote; ConfigError names the fields in which `key` differs."""
        document = json.loads(text)
        if not isinstance(document, dict):
            raise ConfigError(f"cost tables are a JSON object, not {type(document).__name__}")
        if document.get("version") != FORMAT_VERSION:
            raise ConfigError(f"cost tables have version {document.get('version')!r}, this is {FORMAT_VERSION}")
        missing = {"key", "num_layers", "tables"} - document.keys()
        if missing:
            raise ConfigError(f"the file lacks {', '.join(sorted(missing))}")
        found = document["key"]
        if key is not None:
            wanted = json.loads(json.dumps(dict(key)))  # tuples become lists, as they did in the file
            differing = sorted(
                name for name in wanted.keys() | found.keys() if wanted.get(name, ...) != found.get(name, ...)
            )
            if differing:
                details = ", ".join(f"{name}: {found.get(name)!r}, not {wanted.get(name)!r}" for name in differing)
                raise ConfigError(f"cost tables were measured for something else ({details}); profile again")
        return cls(document["tables"], num_layers=document["num_layers"], key=found)


def _table_1d(tables: Mapping[str, Any], name: str, axis: str) -> Table1D:
    return Table1D(name, tables[name][axis], tables[name]["ms"])


def _table_2d(tables: Mapping[str, Any], name: str, first_axis: str, second_axis: str) -> Table2D:
    table = tables[name]
    return Table2D(name, table[first_axis], table[second_axis], table["ms"])
