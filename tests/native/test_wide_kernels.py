"""The AVX-512 kernels for large groups (slices of eight query heads): exact in fp32, whatever the dtype of K and V.

The general tests run these sets too, mostly with small groups, which take another path.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decode_cases import DecodeCase, VarlenCase

from neo_compile import _native
from neo_compile.host_attention import WorkerPool

WIDE_SETS = [isa for isa in _native.available_isas() if "avx512" in isa]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.skipif(not WIDE_SETS, reason="no AVX-512 kernel set runs here")


@pytest.fixture(scope="module", params=WIDE_SETS)
def wide_pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    with WorkerPool(2, isa=request.param) as pool:
        yield pool


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((6, 1), (64, 64)),
        ((14, 2), (128, 128)),
        ((8, 1), (4, 1)),
        ((16, 2), (12, 20)),
        ((9, 1), (72, 40)),
        ((17, 1), (20, 33)),
        ((18, 3), (36, 100)),
        ((8, 1), (33, 16)),  # not whole steps: another kernel's
        ((40, 1), (256, 256)),
    ],
    ids=str,
)
def test_groups_and_head_dims(
    wide_pool: WorkerPool, seed: int, kv_dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    case = DecodeCase(
        [33, 7, 0, 70],
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dims[0],
        v_head_dim=dims[1],
        kv_dtype=kv_dtype,
        seed=seed,
    )
    case.check(case.run(wide_pool))


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 17, 31, 33, 63, 64, 65, 129])
def test_lengths_around_tiles_and_chunks(wide_pool: WorkerPool, seed: int, kv_dtype: torch.dtype, length: int) -> None:
    case = DecodeCase([length], num_q_heads=16, block_size=13, kv_dtype=kv_dtype, seed=seed)
    case.check(case.run(wide_pool, 1))
    case.window = max(1, length - 3)
    case.check(case.run(wide_pool, 3))


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_softcap_and_sinks(wide_pool: WorkerPool, seed: int, softcap: float | None) -> None:
    case = DecodeCase([60, 3, 0], num_q_heads=20, softcap=softcap, has_sinks=True, seed=seed)
    case.check(case.run(wide_pool))


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
def test_chunks_fold_into_large_groups(wide_pool: WorkerPool, seed: int, kv_dtype: torch.dtype) -> None:
    case = VarlenCase([70, 40, 5], query_lens=[33, 1, 5], num_q_heads=6, kv_dtype=kv_dtype, window=50, seed=seed)
    case.check(case.run(wide_pool))
