"""docs/models.md says what the code does. `python -m tests.helpers.models_table` rewrites its table."""

from __future__ import annotations

import pytest

from tests.helpers.models import FAMILIES, MORE_FAMILIES, REFUSED, slow
from tests.helpers.models_table import committed_rows, compile_outcome, names, runtime_outcome


def test_every_model_has_a_row() -> None:
    assert list(committed_rows()) == names()


@pytest.mark.parametrize("name", [*FAMILIES, *REFUSED, *slow(MORE_FAMILIES)])
def test_runtime_column(name: str) -> None:
    row = committed_rows()[name]
    assert (row.attention, row.runtime) == runtime_outcome(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_compile_column(name: str) -> None:
    assert committed_rows()[name].compiled == compile_outcome(name)
