"""How the tokens of a sub-batch are laid out, and which of them are attended together."""

from __future__ import annotations

import numpy as np
import pytest

from neo_compile.runtime.batch import BatchLayout, ChunkRow, DecodeTable, Geometry, assemble
from neo_compile.runtime.request import Tier

BLOCK_SIZE = 4
GEOMETRY = Geometry(num_q_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8)


def layout(*staged_tiers: Tier) -> BatchLayout:
    return BatchLayout(
        block_size=BLOCK_SIZE,
        num_threads={Tier.DEVICE: 2, Tier.HOST: 1},
        geometries={GEOMETRY},
        staged_tiers=staged_tiers,
    )


def chunk(tier: Tier, start: int, num_tokens: int, logit_rows=()) -> ChunkRow:
    blocks = list(range(start, start + -(-(start + num_tokens) // BLOCK_SIZE)))
    return ChunkRow(tier, start, list(range(num_tokens)), blocks, logit_rows)


CHUNKS = [
    chunk(Tier.DEVICE, 0, 3, (2,)),
    chunk(Tier.DEVICE, 5, 2),
    chunk(Tier.HOST, 0, 6, (5,)),
    chunk(Tier.DEVICE, 2, 1, (0,)),
]


def test_neighbouring_chunks_of_a_tier_share_a_plan():
    batch = assemble(CHUNKS, {}, layout())
    assert [(rows.tier, rows.row, rows.num_tokens) for rows in batch.prefills] == [
        (Tier.DEVICE, 0, 5),
        (Tier.HOST, 5, 6),
        (Tier.DEVICE, 11, 1),
    ]
    assert not batch.staged_prefills
    plans = [rows.plans[GEOMETRY] for rows in batch.prefills]
    assert [(plan.num_requests, plan.num_tokens) for plan in plans] == [(2, 5), (1, 6), (1, 1)]
    # (request, first row, tokens, what the first of them sees)
    assert plans[0].tiles() == [(0, 0, 3, 1), (1, 3, 2, 6)]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 5, 6, 0, 1, 2, 3, 4, 5, 2]
    assert (batch.logit_rows.tolist(), batch.num_logits) == ([2, 10, 11], 3)


@pytest.mark.parametrize("tier", Tier)
def test_chunks_of_a_staged_tier_stay_apart(tier):
    batch = assemble(CHUNKS, {}, layout(tier))
    assert all(rows.tier is not tier for rows in batch.prefills)
    wanted = [(c.start, len(c.token_ids)) for c in CHUNKS if c.tier is tier]
    assert [(staged.start, staged.num_tokens) for staged in batch.staged_prefills] == wanted
    rows = sorted([(r.row, r.num_tokens) for r in (*batch.prefills, *batch.staged_prefills)])
    assert [row for row, _ in rows] == np.cumsum([0, *(num for _, num in rows[:-1])]).tolist()
    assert sum(num for _, num in rows) == batch.num_tokens == 12


def test_decodes_follow_the_chunks():
    table = DecodeTable(np.array([7, 8]), np.array([3, 9], np.int32), np.zeros((2, 3), np.int32))
    batch = assemble(CHUNKS[:1], {Tier.HOST: table}, layout())
    assert batch.device_decodes is None
    assert (batch.host_decodes.tier, batch.host_decodes.row, batch.host_decodes.num_tokens) == (Tier.HOST, 3, 2)
    assert batch.input_ids[0].tolist() == [0, 1, 2, 7, 8]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 2, 8]
