"""The machine's memory nodes, as Linux tells them, and which of them a set of CPUs reads from at full speed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["nodes_of", "numa_nodes", "parse_id_list"]

SYSFS = "/sys/devices/system/node"


def parse_id_list(text: str) -> list[int]:
    """The kernel's lists: "0-2,5" -> [0, 1, 2, 5]; an empty text is an empty list. ValueError for anything else."""
    ids: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            ids.extend(range(int(first), int(last or first) + 1))
    return ids


def numa_nodes(sysfs: str = SYSFS) -> dict[int, list[int]]:
    """CPU ids by memory node, nodes without CPUs included; empty where the system does not tell."""
    nodes: dict[int, list[int]] = {}
    for path in Path(sysfs).glob("node[0-9]*/cpulist"):
        try:
            nodes[int(path.parent.name.removeprefix("node"))] = parse_id_list(path.read_text())
        except (OSError, ValueError):
            continue  # a node that went away, or a name that only looks like one
    return dict(sorted(nodes.items()))


def nodes_of(cpus: Iterable[int], nodes: dict[int, list[int]]) -> list[int]:
    """The nodes that `cpus` belong to, ascending."""
    wanted = set(cpus)
    return [node for node, members in nodes.items() if wanted & set(members)]
