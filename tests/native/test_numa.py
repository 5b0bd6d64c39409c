"""Memory nodes are read from a tree like Linux's; what is odd in it is left out, not guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from neo_compile import numa


def make_tree(root: Path, nodes: dict[str, str]) -> str:
    for name, cpus in nodes.items():
        (root / name).mkdir(parents=True)
        (root / name / "cpulist").write_text(cpus)
    return str(root)


@pytest.mark.parametrize(
    ("text", "ids"), [("0-3\n", [0, 1, 2, 3]), ("0,2-3,8\n", [0, 2, 3, 8]), ("7", [7]), ("\n", []), ("", [])]
)
def test_id_lists(text: str, ids: list[int]) -> None:
    assert numa.parse_id_list(text) == ids


def test_nodes(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"node10": "8-9\n", "node0": "0-3,16-19\n", "node1": "4-7\n", "node2": "\n"})
    (tmp_path / "node_of_no_number").mkdir()
    (tmp_path / "node3").mkdir()  # no list in it
    make_tree(tmp_path, {"node4": "garbage\n"})
    nodes = numa.numa_nodes(tree)
    assert nodes == {0: [0, 1, 2, 3, 16, 17, 18, 19], 1: [4, 5, 6, 7], 2: [], 10: [8, 9]}
    assert list(nodes) == [0, 1, 2, 10]
    assert numa.nodes_of([9, 2, 3], nodes) == [0, 10]
    assert numa.nodes_of([], nodes) == []


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert numa.numa_nodes(str(tmp_path / "absent")) == {}
    assert numa.nodes_of([0], {}) == []
