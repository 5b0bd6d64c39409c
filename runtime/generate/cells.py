"""Between a dense cache [B, heads, columns, dim] and blocks: which column of which row is stored in which slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from neo_compile.runtime.generate.rows import TIERS, PagedRows
from neo_compile.runtime.kv_cache import Slots
from neo_compile.runtime.request import Tier


@dataclass(frozen=True, slots=True)
class Cells:
    """Tokens of one tier: token n lies at (rows[n], columns[n]) of a dense cache, and in slot n. int64 [N] each.

    `columns` count from `find_cells`'s first column.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    slots: Slots

    def of(self, dense: torch.Tensor) -> torch.Tensor:
        """The tokens' values of a dense layer [B, heads, columns, dim], as [N, heads, dim]."""
        return dense[self.rows, :, self.columns]


def find_cells(rows: PagedRows, first_column: int = 0) -> dict[Tier, Cells]:
    """The stored tokens of `rows` from a column on, by tier; tiers without any are left out."""
    valid = rows.valid[:, first_column:]
    before = rows.valid[:, :first_column].sum(axis=1, dtype=np.int64)
    index = before[:, None] + np.cumsum(valid, axis=1) - 1  # of the token within its row
    block_size = rows.blocks.block_size
    found = {}
    for code, tier in enumerate(TIERS):
        row, column = np.nonzero(valid & (rows.tiers == code)[:, None])
        if len(row):
            token = index[row, column]
            block_ids = rows.tables[row, token // block_size].astype(np.int64)
            slots = Slots(torch.from_numpy(block_ids), torch.from_numpy(token % block_size))
            found[tier] = Cells(torch.from_numpy(row), torch.from_numpy(column), slots)
    return found
