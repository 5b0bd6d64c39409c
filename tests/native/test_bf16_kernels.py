"""The kernels that multiply in bf16 (q, K and V all bf16, groups of at least four): exact but for rounded weights.

The general tests run these sets too, mostly with an fp32 q, which takes another path.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decode_cases import BF16_WEIGHTS, DecodeCase

from neo_compile import _native
from neo_compile.host_attention import WorkerPool

BF16_SETS = [isa for isa in _native.available_isas() if isa.endswith("-bf16")]
pytestmark = pytest.mark.skipif(not BF16_SETS, reason="no kernel set here multiplies in bf16 (AVX512-BF16)")


@pytest.fixture(scope="module", params=BF16_SETS)
def bf16_pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    with WorkerPool(2, isa=request.param) as pool:
        yield pool


def bf16_case(context_lens: list[int], seed: int, **more: object) -> DecodeCase:
    options = {"kv_dtype": torch.bfloat16, "q_dtype": torch.bfloat16, **more}
    return DecodeCase(context_lens, seed=seed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((4, 1), (64, 64)),
        ((8, 2), (33, 5)),
        ((10, 2), (80, 80)),
        ((7, 1), (128, 128)),
        ((16, 2), (8, 40)),
        ((9, 1), (1, 31)),
        ((12, 1), (96, 96)),
        ((17, 1), (72, 8)),
        ((64, 2), (128, 128)),
    ],
    ids=str,
)
def test_groups_and_head_dims(bf16_pool: WorkerPool, seed: int, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    case = bf16_case(
        [33, 7, 0, 70], seed, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dims[0], v_head_dim=dims[1]
    )
    case.check(case.run(bf16_pool))


@pytest.mark.parametrize("length", [2, 3, 4, 5, 15, 17, 31, 33, 63, 64, 65, 129])
@pytest.mark.parametrize("group", [4, 8])
def test_lengths_around_tiles_and_chunks(bf16_pool: WorkerPool, seed: int, length: int, group: int) -> None:
    case = bf16_case([length], seed, num_q_heads=2 * group, block_size=13)
    case.check(case.run(bf16_pool, 1))
    case.window = max(1, length - 3)
    case.check(case.run(bf16_pool, 3))


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_softcap_and_sinks(bf16_pool: WorkerPool, seed: int, softcap: float | None) -> None:
    case = bf16_case([60, 3, 0], seed, num_q_heads=10, softcap=softcap, has_sinks=True)
    case.check(case.run(bf16_pool))


@pytest.mark.parametrize("group", [4, 8])
def test_the_rounding_of_weights_averages_out(bf16_pool: WorkerPool, seed: int, group: int) -> None:
    """Far below the bound when many tokens share the weight; what bf16 makes of an output is 2^-9 of it."""
    case = bf16_case([1000], seed, num_q_heads=group, num_kv_heads=1, head_dim=128)
    error = (case.run(bf16_pool).double() - case.reference()).square().mean().sqrt().item()
    assert error < BF16_WEIGHTS * case.largest_v / 100


def test_a_single_token_is_exact(bf16_pool: WorkerPool, seed: int) -> None:
    case = bf16_case([1], seed)
    assert torch.equal(case.run(bf16_pool).double(), case.reference())


@pytest.mark.parametrize("group", [4, 8])
def test_q_and_k_are_not_rounded(bf16_pool: WorkerPool, seed: int, group: int) -> None:
    """Logits of about 1e5 that differ by one unit: sums of rounded products would pick another token."""
    case = bf16_case([40], seed, num_q_heads=group, num_kv_heads=1, head_dim=32)
    case.q = torch.full((1, group, 32), 255.0, dtype=torch.bfloat16)
    for t in range(40):
        case.k_cache[int(case.block_tables[0, t // 16]), 0, t % 16] = 71.0
    best = int(case.block_tables[0, 1]), 0, 5
    case.k_cache[best] = 71.0
    case.k_cache[best][3] = 71.5
    torch.testing.assert_close(case.run(bf16_pool).double(), case.reference(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [64, 41])
def test_infinities_and_nan(bf16_pool: WorkerPool, seed: int, length: int) -> None:
    """Keys that give -inf are ignored, a row with nothing else is 0; an infinite v is infinite; NaN stays."""
    case = bf16_case([length, length, length], seed, num_q_heads=8, num_kv_heads=1, head_dim=32)
    case.q[..., 0] = 1.0
    rows = [[(int(case.block_tables[b, t // 16]), 0, t % 16) for t in range(length)] for b in range(3)]
    for t in range(length):
        case.k_cache[rows[0][t]][0] = float("-inf")
        if t < 30:
            case.k_cache[rows[1][t]][0] = float("-inf")
    case.v_cache[rows[1][length - 1]][7] = float("inf")
    case.k_cache[rows[2][5]][3] = float("nan")
    out = case.run(bf16_pool)
    assert bool((out[0] == 0).all())
    assert bool((out[1, :, 7] == float("inf")).all())
    assert bool(out[2].isnan().all())
    finite = [d for d in range(32) if d != 7]
    limit = BF16_WEIGHTS * case.largest_v
    torch.testing.assert_close(out[1][:, finite].double(), case.reference()[1][:, finite], atol=limit, rtol=0.0)


def test_q_of_another_dtype_keeps_its_accuracy(bf16_pool: WorkerPool, seed: int) -> None:
    for q_dtype in (torch.float32, torch.float16):
        case = DecodeCase([100, 3], num_q_heads=16, kv_dtype=torch.bfloat16, q_dtype=q_dtype, seed=seed)
        case.check(case.run(bf16_pool))  # to 1e-5
