"""Every example runs, as a user starts it: a process of its own, with the tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))

EXPECTED = {
    "generate_hf": "tokens decoded on the host",
    "inspect_graph": "sites",
    "batch_offline": "requests decoded on the host",
}


def test_all_examples_are_listed() -> None:
    assert {path.stem for path in EXAMPLES} == set(EXPECTED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    result = subprocess.run(
        [sys.executable, str(path), "--tiny"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    assert EXPECTED[path.stem] in result.stdout
