"""Fixtures for all tests. Nothing that a test does reaches the user's own cache directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.smollm import require_smollm2


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cost tables and converted models go to a directory of this test session; subprocesses inherit it."""
    previous = os.environ.get("NEO_CACHE")
    os.environ["NEO_CACHE"] = str(tmp_path_factory.mktemp("neo_cache"))
    yield
    if previous is None:
        del os.environ["NEO_CACHE"]
    else:
        os.environ["NEO_CACHE"] = previous


@pytest.fixture(scope="session")
def smollm2(private_cache: None) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer (converted once per session, some seconds)."""
    return require_smollm2()
