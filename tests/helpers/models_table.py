"""The table of docs/models.md, from what capture and backend really do with each family.

python -m tests.helpers.models_table        rewrites it (some minutes)
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from neo_compile.attention import AttentionSite
from neo_compile.backend import neo
from neo_compile.errors import UnsupportedModelError
from neo_compile.runtime.captured import captured_model
from neo_compile.staged import StagedModel
from tests.helpers.models import FAMILIES, MORE_FAMILIES, REFUSED, family_model, tiny_model

PATH = Path(__file__).parents[2] / "docs" / "models.md"
HEADER = ("Model", "Attention", "Engine, enabled models", "torch.compile")
_BEGIN, _END = "<!-- table: python -m tests.helpers.models_table -->\n", "<!-- end of table -->\n"


@dataclass(frozen=True)
class Row:
    """What becomes of a model. `attention` is "" where the runtime refuses it."""

    model: str
    attention: str
    runtime: str
    compiled: str


def names() -> list[str]:
    """Models of the table, in its order."""
    return [*sorted({*FAMILIES, *MORE_FAMILIES}, key=str.lower), *sorted(REFUSED, key=str.lower)]


def model_of(name: str) -> Any:
    """A tiny model of that name."""
    if name in REFUSED:
        return tiny_model(REFUSED[name].family, **REFUSED[name].overrides)
    return family_model(name)


@functools.cache
def runtime_outcome(name: str) -> tuple[str, str]:
    """(attention, outcome) of capturing the model for the runtime."""
    model = model_of(name)
    try:
        staged = captured_model(model, "eager", 1)
    except UnsupportedModelError as error:
        return "", f"refused: {error.reason}"
    return describe_attention(staged.sites), "in full"


def describe_attention(sites: Sequence[AttentionSite]) -> str:
    """What is special about a model's attention."""
    first = sites[0]
    groups = "multi-query" if first.num_kv_heads == 1 else "grouped" if first.num_kv_heads < first.num_q_heads else ""
    windows = [site.window is not None for site in sites]
    parts = [
        groups or "multi-head",
        "windows" if all(windows) else "windows in some layers" if any(windows) else "",
        "soft cap" if first.softcap is not None else "",
        "sinks" if first.has_sinks else "",
        "K and V of different sizes" if first.head_dim != first.v_head_dim else "",
    ]
    return ", ".join(part for part in parts if part)


def compile_outcome(name: str) -> str:
    """What `torch.compile(model, backend="neo")` makes of one call without a cache."""
    model = model_of(name)
    returned: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        returned.append(neo(gm, example_inputs, options={"stages": "eager"}))
        return returned[-1]

    torch._dynamo.reset()
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[4, 8, 15, 16, 23, 42]]), "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.compile(model, backend=backend)(**inputs)
    reasons = [
        str(w.message).split(": ", 1)[1] for w in warned if str(w.message).startswith("neo leaves a graph whole")
    ]
    num_sites = sum(len(function.sites) for function in returned if isinstance(function, StagedModel))
    if not num_sites:
        return f"left whole: {reasons[0]}"
    where = "1 site" if num_sites == 1 else f"{num_sites} sites"
    if num_sites == model.config.num_hidden_layers:
        where = "every layer a site"
    return where if len(returned) == 1 else f"{where}, in {len(returned)} graphs"


def committed_rows() -> dict[str, Row]:
    """The table of docs/models.md."""
    table = PATH.read_text().split(_BEGIN)[1].split(_END)[0]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][2:]
    rows = [Row(*(cell.strip() for cell in line)) for line in lines]
    return {row.model: row for row in rows}


def write() -> None:
    """Run everything, and put the result into docs/models.md."""
    rows = [Row(name, *runtime_outcome(name), compile_outcome(name)) for name in names()]
    lines = [HEADER, ("---",) * len(HEADER), *(astuple(row) for row in rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, rest = PATH.read_text().split(_BEGIN)
    PATH.write_text(before + _BEGIN + "\n" + table + "\n" + _END + rest.split(_END)[1])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    transformers.logging.set_verbosity_error()
    write()
