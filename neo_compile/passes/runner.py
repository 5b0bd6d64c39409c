"""Applies passes in order: one log line each, a lint after each, and graphs written to a folder when asked for."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from neo_compile.errors import ConfigError

logger = logging.getLogger(__name__)

GraphPass = Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]

_dump_numbers = itertools.count()


def run_passes(
    gm: fx.GraphModule, example_inputs: Sequence[Any], passes: Iterable[GraphPass], *, dump_graphs: str | None = None
) -> fx.GraphModule:
    """`gm` after all `passes`.

    Args:
        dump_graphs: folder for the graph's code before the first pass and after each; None takes it from the variable
            NEO_DUMP_GRAPHS of the environment, if that is set.
    """
    dump_graphs = dump_graphs or os.environ.get("NEO_DUMP_GRAPHS") or None
    number = next(_dump_numbers) if dump_graphs else 0
    dump(gm, dump_graphs, f"{number:03d}-0-captured")
    for index, graph_pass in enumerate(passes, 1):
        name = _name(graph_pass)
        before = len(gm.graph.nodes)
        gm = graph_pass(gm, example_inputs)
        gm.graph.lint()
        logger.info("%s: %d -> %d nodes", name, before, len(gm.graph.nodes))
        dump(gm, dump_graphs, f"{number:03d}-{index}-{name}")
    return gm


def dump(gm: fx.GraphModule, folder: str | None, name: str) -> None:
    """Write the code of `gm` to folder/name.py; nothing if there is no folder."""
    if folder is None:
        return
    path = Path(folder)
    code = gm.print_readable(print_output=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.py").write_text(code)
    except OSError as error:
        raise ConfigError(
            f"dump_graphs (NEO_DUMP_GRAPHS) {folder!r}: graphs cannot be written there: {error}"
        ) from error


def _name(graph_pass: Any) -> str:
    while isinstance(graph_pass, functools.partial):
        graph_pass = graph_pass.func
    return str(graph_pass.__name__)
