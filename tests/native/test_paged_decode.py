"""The kernels against float64 on fresh random inputs, with every kernel set that this machine runs.

All that a request does not own is NaN (decode_cases), so reading one element too many shows.
"""

from __future__ import annotations

import pytest
import torch
from decode_cases import DecodeCase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neo_compile.host_attention import WorkerPool, paged_decode
from neo_compile.reference import paged_decode_reference

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 2), (16, 2), (7, 1), (1, 1), (32, 8), (12, 1), (40, 2)], ids=str)
def test_head_ratios(pool: WorkerPool, seed: int, kv_dtype: torch.dtype, heads: tuple[int, int]) -> None:
    case = DecodeCase([33, 7], num_q_heads=heads[0], num_kv_heads=heads[1], kv_dtype=kv_dtype, seed=seed)
    case.check(case.run(pool))


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 3, 8, 17, 24, 64, 65, 80, 96, 100, 128, 160, 256])
def test_head_dims(pool: WorkerPool, seed: int, kv_dtype: torch.dtype, head_dim: int) -> None:
    case = DecodeCase([21, 40], head_dim=head_dim, kv_dtype=kv_dtype, seed=seed)
    case.check(case.run(pool))


@pytest.mark.parametrize("dims", [(24, 16), (16, 24), (192, 128), (5, 33)], ids=str)
def test_different_v_head_dim(pool: WorkerPool, seed: int, dims: tuple[int, int]) -> None:
    case = DecodeCase([5, 70], head_dim=dims[0], v_head_dim=dims[1], kv_dtype=torch.bfloat16, seed=seed)
    case.check(case.run(pool))


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 200])
def test_lengths_around_blocks_and_chunks(pool: WorkerPool, seed: int, kv_dtype: torch.dtype, length: int) -> None:
    case = DecodeCase([length], kv_dtype=kv_dtype, seed=seed)
    for num_threads in (1, 2, 5):
        case.check(case.run(pool, num_threads))


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 13, 32, 100, 256])
def test_block_sizes(pool: WorkerPool, seed: int, block_size: int) -> None:
    case = DecodeCase([1, 99, 100, 101], block_size=block_size, kv_dtype=torch.float16, seed=seed)
    case.check(case.run(pool))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 49, 50, 51, 1000])
def test_window_edges(pool: WorkerPool, seed: int, window: int) -> None:
    case = DecodeCase([50, 1, 16, 33], window=window, kv_dtype=torch.bfloat16, seed=seed)
    case.check(case.run(pool))
    case.check(case.run(pool, num_threads=1))


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0, 1e5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_softcap_sinks_window_together(
    pool: WorkerPool, seed: int, kv_dtype: torch.dtype, softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    case = DecodeCase([60, 3, 0], kv_dtype=kv_dtype, softcap=softcap, has_sinks=has_sinks, window=window, seed=seed)
    case.check(case.run(pool))


@pytest.mark.parametrize("q_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_q_and_out_dtypes(pool: WorkerPool, seed: int, q_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    case = DecodeCase([30, 5], head_dim=20, q_dtype=q_dtype, out_dtype=out_dtype, kv_dtype=torch.float16, seed=seed)
    case.check(case.run(pool))


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
def test_strided_tensors(pool: WorkerPool, seed: int, kv_dtype: torch.dtype) -> None:
    """Separate pools, head-major pools, q and out as slices of wider rows."""
    case = DecodeCase([20, 37], head_dim=40, interleaved=False, kv_dtype=kv_dtype, seed=seed)
    case.check(case.run(pool))
    case.k_cache = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)  # [block, token, head, D] in memory
    wide_q = torch.randn(8, 2, 50)
    wide_q[:, :, 5:45] = case.q.transpose(0, 1)
    case.q = wide_q[:, :, 5:45].transpose(0, 1)
    wide_out = torch.full((2, 10, 41), 7.0)
    case.submit(pool, wide_out[:, 1:9, :40]).wait()
    case.check(wide_out[:, 1:9, :40])
    wide_out[:, 1:9, :40] = 7.0
    assert bool((wide_out == 7.0).all()), "wrote outside of out"


def test_many_requests_of_all_lengths(pool: WorkerPool, seed: int) -> None:
    lengths = torch.randint(0, 90, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
    case = DecodeCase(lengths, num_q_heads=4, head_dim=32, kv_dtype=torch.bfloat16, seed=seed)
    for num_threads in (1, 3, 16):
        case.check(case.run(pool, num_threads))


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [1, 37, 512])
def test_mixed_lengths_up_to_32k(pool: WorkerPool, seed: int, num_requests: int) -> None:
    """Lengths spread evenly on a logarithmic scale, the longest always there; one KV head keeps the memory modest."""
    rng = torch.Generator().manual_seed(seed)
    exponents = torch.rand(num_requests, generator=rng) * torch.log2(torch.tensor(32768.0))
    lengths = [32768, *(2**exponents).int().tolist()[1:]]
    case = DecodeCase(lengths, num_q_heads=2, num_kv_heads=1, head_dim=16, kv_dtype=torch.float16, seed=seed)
    for num_threads in (2, 5):
        case.check(case.run(pool, num_threads))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_strides(pool: WorkerPool, data: st.DataObject) -> None:
    """Every outer dimension of every tensor in any order in memory, with gaps, and heads that are not 0 modulo 8."""

    def restrided(x: torch.Tensor, label: str) -> torch.Tensor:
        order = data.draw(st.permutations(range(x.dim() - 1)), label=f"{label} order")
        gaps = data.draw(st.lists(st.integers(0, 3), min_size=x.dim(), max_size=x.dim()), label=f"{label} gaps")
        shape = [x.shape[d] + gap for d, gap in zip((*order, x.dim() - 1), gaps, strict=True)]
        wide = torch.full(shape, float("nan"), dtype=x.dtype)
        view = wide.permute(*(order.index(d) for d in range(x.dim() - 1)), x.dim() - 1)
        view = view[tuple(slice(0, size) for size in x.shape)]
        return view.copy_(x)

    case = DecodeCase(
        data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4), label="context_lens"),
        num_q_heads=6,
        head_dim=data.draw(st.integers(1, 40), label="head_dim"),
        v_head_dim=data.draw(st.integers(1, 40), label="v_head_dim"),
        block_size=data.draw(st.sampled_from([1, 5, 16]), label="block_size"),
        kv_dtype=data.draw(st.sampled_from(DTYPES), label="kv_dtype"),
        seed=data.draw(st.integers(0, 2**32 - 1), label="seed"),
    )
    case.q, out = restrided(case.q, "q"), restrided(case.new_out(), "out")
    case.k_cache, case.v_cache = restrided(case.k_cache, "k_cache"), restrided(case.v_cache, "v_cache")
    case.submit(pool, out).wait()
    case.check(out)


def test_empty_batch(pool: WorkerPool) -> None:
    case = DecodeCase([])
    assert case.run(pool).shape == (0, 8, 64)


def test_only_empty_requests(pool: WorkerPool) -> None:
    case = DecodeCase([0, 0, 0], has_sinks=True)
    assert bool((case.run(pool) == 0).all())


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_logits(pool: WorkerPool, kv_dtype: torch.dtype) -> None:
    """Logits of +-1e5: no overflow, and the largest wins. Scores are exact: one-hot keys."""
    case = DecodeCase([40], num_q_heads=2, num_kv_heads=1, head_dim=16, kv_dtype=kv_dtype)
    case.q = torch.zeros(1, 2, 16)
    case.q[0, 0, 0], case.q[0, 1, 0] = 4e5, -4e5
    for t in range(40):
        block, row = int(case.block_tables[0, t // 16]), t % 16
        case.k_cache[block, 0, row] = 0.0
        case.k_cache[block, 0, row, 0] = {3: 1.0, 20: -1.0}.get(t, 0.5)
    for num_threads in (1, 3):
        out = case.run(pool, num_threads)
        torch.testing.assert_close(out.double(), case.reference(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_minus_infinity(pool: WorkerPool, seed: int, num_threads: int) -> None:
    """Keys that give -inf are ignored, a span with nothing else is weightless, and a row with nothing else is 0."""
    case = DecodeCase([64, 64], num_q_heads=2, num_kv_heads=1, head_dim=8, seed=seed)
    case.q[..., 0] = 1.0
    for b, tokens in ((0, range(64)), (1, range(40))):
        for t in tokens:
            case.k_cache[int(case.block_tables[b, t // 16]), 0, t % 16, 0] = float("-inf")
    out = case.run(pool, num_threads)
    assert bool((out[0] == 0).all())
    case.check(out)


def test_nan_stays_in_its_request(pool: WorkerPool, seed: int) -> None:
    case = DecodeCase([50, 50], num_q_heads=2, num_kv_heads=2, seed=seed)
    case.k_cache[int(case.block_tables[0, 1]), 0, 3, 0] = float("nan")
    out = case.run(pool)
    assert bool(out[0, 0].isnan().all())
    torch.testing.assert_close(out[1].double(), case.reference()[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[0, 1].double(), case.reference()[0, 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_dtype", HALVES, ids=str)
def test_outlier_keys(pool: WorkerPool, seed: int, kv_dtype: torch.dtype) -> None:
    """A channel a hundred times larger than the others (as in Qwen2.5)."""
    case = DecodeCase([90], kv_dtype=kv_dtype, seed=seed)
    case.k_cache[..., 7] *= 100
    case.q[..., 7] /= 10
    torch.testing.assert_close(case.run(pool).double(), case.reference(), atol=5e-5, rtol=5e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes(pool: WorkerPool, data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 4), label="kv_heads")
    case = DecodeCase(
        data.draw(st.lists(st.integers(0, 70), max_size=5), label="context_lens"),
        num_q_heads=kv_heads * data.draw(st.integers(1, 9), label="group"),
        num_kv_heads=kv_heads,
        head_dim=data.draw(st.integers(1, 70), label="head_dim"),
        v_head_dim=data.draw(st.none() | st.integers(1, 70), label="v_head_dim"),
        block_size=data.draw(st.integers(1, 33), label="block_size"),
        kv_dtype=data.draw(st.sampled_from(DTYPES), label="kv_dtype"),
        window=data.draw(st.none() | st.integers(1, 80), label="window"),
        softcap=data.draw(st.none() | st.sampled_from([1.0, 20.0]), label="softcap"),
        has_sinks=data.draw(st.booleans(), label="has_sinks"),
        seed=data.draw(st.integers(0, 2**32 - 1), label="seed"),
    )
    case.check(case.run(pool, data.draw(st.integers(1, 6), label="num_threads")))


@pytest.mark.parametrize("num_threads", [None, 1, 2])
def test_paged_decode(seed: int, num_threads: int | None) -> None:
    case = DecodeCase([40, 0, 3], kv_dtype=torch.bfloat16, softcap=9.0, has_sinks=True, window=30, seed=seed)
    args = (case.q, case.k_cache, case.v_cache, case.block_tables, torch.tensor(case.context_lens), case.scale)
    case.check(paged_decode(*args, **case.options, num_threads=num_threads))
    out = case.new_out()
    assert paged_decode(*args, **case.options, out=out, num_threads=num_threads) is out
    case.check(out)
    assert paged_decode(case.q.half(), *args[1:]).dtype == torch.float16


def test_more_than_2_gib_of_offsets() -> None:
    """Block * stride beyond 32 bits: a pool view with huge strides, its untouched pages never backed by memory."""
    stride = 2**29
    pool = torch.empty(5 * stride, dtype=torch.bfloat16)
    view = pool.as_strided((5, 1, 16, 8), (stride, 128, 8, 1))
    view[4] = torch.randn(1, 16, 8).bfloat16()
    q, tables, lens = torch.randn(1, 1, 8), torch.tensor([[4]]), torch.tensor([16])
    expected = paged_decode_reference(q, view, view, tables, lens, 1.0)
    torch.testing.assert_close(paged_decode(q, view, view, tables, lens, 1.0).double(), expected, atol=1e-5, rtol=1e-5)
