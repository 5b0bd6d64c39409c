"""What a caller can get wrong is a ValueError that names the value, before native code runs."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import DecodeCase
from torch._subclasses.fake_tensor import FakeTensorMode

from neo_compile.host_attention import BlockPairs, LayerCache, TokenRows, WorkerPool, paged_decode, plan_decode


def decode(**changed: Any) -> torch.Tensor:
    """A valid problem (2 requests, 4 / 2 heads, head_dim 8, 6 blocks of 4) with some arguments changed."""
    args: dict[str, Any] = {
        "q_BHD": torch.randn(2, 4, 8),
        "k_cache": torch.randn(6, 2, 4, 8),
        "v_cache": torch.randn(6, 2, 4, 8),
        "block_tables": torch.tensor([[0, 1, 2], [3, 4, 99]], dtype=torch.int32),
        "context_lens": torch.tensor([9, 8], dtype=torch.int32),
        "scale": 1.0,
    }
    return paged_decode(**{**args, **changed})


def test_the_valid_problem_is_valid() -> None:
    assert decode().shape == (2, 4, 8)


def read_only_array() -> np.ndarray:
    array = np.zeros((2, 4, 8), np.float32)
    array.flags.writeable = False
    return array


BAD = {
    "negative length": ({"context_lens": [9, -1]}, r"context_lens\[1\] = -1"),
    "length beyond the table": ({"context_lens": [13, 1]}, r"context_lens\[0\] = 13 .* 3 blocks of 4"),
    "block beyond the pool": ({"context_lens": [1, 9]}, r"block_tables\[1, 2\] = 99 .* 6 blocks"),
    "negative block": ({"block_tables": [[0, -1, 2], [3, 4, 5]]}, r"block_tables\[0, 1\] = -1"),
    "rows": ({"block_tables": [[0, 1, 2]]}, "1 rows, context_lens 2"),
    "float lengths": ({"context_lens": torch.tensor([1.0, 2.0])}, "context_lens must be integers"),
    "table of one dimension": ({"block_tables": torch.tensor([0, 1])}, "block_tables must be integers with 2"),
    "lengths beyond int32": ({"context_lens": torch.tensor([2**40, 1])}, "context_lens holds values beyond int32"),
    "ragged tables": (
        {"block_tables": [[0, 1, 2], [3, 4]]},
        r"block_tables\[0\] is 3 long, block_tables\[1\] is 2 long",
    ),
    "ragged tables of arrays": ({"block_tables": [np.arange(3), np.arange(4)]}, r"block_tables\[1\] is 4 long"),
    "ragged lengths": ({"context_lens": [9, [8]]}, r"context_lens\[0\] is a number, context_lens\[1\] is 1 long"),
    "tables of nothing known": ({"block_tables": [[0, None, 2], [3, 4, 5]]}, "block_tables must be integers"),
    "q of two dimensions": ({"q_BHD": torch.randn(2, 8)}, r"q must have 3 dimensions, its shape is \(2, 8\)"),
    "q of numpy": ({"q_BHD": np.zeros((2, 4, 8), np.float32)}, "q must be a torch tensor, not numpy.ndarray"),
    "cache of a list": ({"k_cache": [[0.0]]}, "k_cache must be a torch tensor, not list"),
    "sinks of a list": ({"sinks": [0.0] * 4}, "sinks must be a torch tensor, not list"),
    "out of numpy": ({"out": np.zeros((2, 4, 8), np.float32)}, "out must be a torch tensor, not numpy.ndarray$"),
    "out of numpy, read-only": ({"out": read_only_array()}, r"out must be a torch tensor.*read-only"),
    "out on another device": ({"out": torch.empty(2, 4, 8, device="meta")}, "out is on meta"),
    "q dtype": ({"q_BHD": torch.randn(2, 4, 8).double()}, "q is torch.float64"),
    "q batch": ({"q_BHD": torch.randn(3, 4, 8)}, r"q has shape \(3, 4, 8\)"),
    "q head_dim": ({"q_BHD": torch.randn(2, 4, 7)}, "head_dim 7"),
    "q heads": ({"q_BHD": torch.randn(2, 3, 8)}, "num_q_heads = 3 is not a multiple of num_kv_heads = 2"),
    "q not contiguous inside": ({"q_BHD": torch.randn(2, 8, 4).transpose(1, 2)}, "q must be contiguous in its last"),
    "q on another device": ({"q_BHD": torch.empty(2, 4, 8, device="meta")}, "q is on meta"),
    "cache dtypes": ({"v_cache": torch.randn(6, 2, 4, 8).half()}, "v_cache is torch.float16, k_cache is torch.float32"),
    "cache dtype": ({"k_cache": torch.zeros(6, 2, 4, 8, dtype=torch.int8)}, "k_cache is torch.int8"),
    "cache shapes": ({"v_cache": torch.randn(6, 2, 5, 8)}, "differ beyond head_dim"),
    "cache of no heads": ({"k_cache": torch.randn(6, 0, 4, 8), "v_cache": torch.randn(6, 0, 4, 8)}, "only num_blocks"),
    "window 0": ({"window": 0}, "window = 0"),
    "softcap 0": ({"softcap": 0.0}, "softcap = 0.0"),
    "softcap nan": ({"softcap": float("nan")}, "softcap = nan"),
    "sinks shape": ({"sinks": torch.zeros(2)}, r"sinks must be contiguous float32 \[4\]"),
    "sinks dtype": ({"sinks": torch.zeros(4).half()}, "sinks must be contiguous float32"),
    "out shape": ({"out": torch.zeros(2, 4, 9)}, r"out has shape \(2, 4, 9\)"),
    "out expanded": ({"out": torch.zeros(1, 4, 8).expand(2, 4, 8)}, "out overlaps itself"),
    "out interleaved": ({"out": torch.zeros(60).as_strided((2, 4, 8), (1, 8, 1))}, "out overlaps itself"),
    "out dtype": ({"out": torch.zeros(2, 4, 8, dtype=torch.int32)}, "out is torch.int32"),
    "no threads": ({"num_threads": 0}, "num_threads = 0"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(**changed)


def test_out_overlapping_an_input() -> None:
    buffer = torch.zeros(200)
    q, out = buffer[:64].view(2, 4, 8), buffer[60:124].view(2, 4, 8)
    with pytest.raises(ValueError, match="out overlaps q"):
        decode(q_BHD=q, out=out)


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "sinks"])
def test_out_overlapping_what_is_read(name: str) -> None:
    buffer = torch.randn(6 * 2 * 4 * 8)
    view = {"sinks": buffer[:4]}.get(name, buffer.view(6, 2, 4, 8))
    with pytest.raises(ValueError, match=f"out overlaps {name}"):
        decode(**{name: view, "out": buffer[:64].view(2, 4, 8)})


def test_read_only_out(tmp_path: Path) -> None:
    """A file mapped for reading: a write would be a segmentation fault. A private copy of it may be written."""
    path = tmp_path / "out"
    path.write_bytes(bytes(4 * 2 * 4 * 8))
    with path.open("rb") as file:
        for access, is_refused in ((mmap.ACCESS_READ, True), (mmap.ACCESS_COPY, False)):
            mapped = mmap.mmap(file.fileno(), 0, access=access)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that the buffer is not writable
                out = torch.frombuffer(mapped, dtype=torch.float32).view(2, 4, 8)
            if is_refused:
                with pytest.raises(
                    ValueError, match=r"out lies in memory that is read-only: \(2, 4, 8\) at address 0x"
                ):
                    decode(out=out)
            else:
                assert decode(out=out) is out
    assert path.read_bytes() == bytes(4 * 2 * 4 * 8)


def test_out_may_be_permuted() -> None:
    args = {"q_BHD": torch.randn(2, 4, 8), "k_cache": torch.randn(6, 2, 4, 8), "v_cache": torch.randn(6, 2, 4, 8)}
    out = torch.empty(4, 2, 16)[..., 3:11].transpose(0, 1)
    torch.testing.assert_close(decode(**args, out=out), decode(**args))


def test_no_isa_is_named_by_an_empty_string() -> None:
    with pytest.raises(ValueError, match="NEO_ISA / isa ''"):
        WorkerPool(1, isa="")


def test_blocks_before_a_window_may_be_gone() -> None:
    decode(block_tables=[[-5, 1, 2], [3, 4, 99]], context_lens=[12, 8], window=8)
    with pytest.raises(ValueError, match=r"block_tables\[0, 0\] = -5 .*window 9"):
        decode(block_tables=[[-5, 1, 2], [3, 4, 99]], context_lens=[12, 8], window=9)


def test_plan_and_layer_must_agree(any_pool: WorkerPool) -> None:
    case = DecodeCase([20])
    plan, out = case.plan(), case.new_out()
    for shape, message in (
        ((9, 3, 16, 64), "num_kv_heads 2.* 3"),
        ((9, 2, 8, 64), "block_size 16.* 8"),
        ((9, 2, 16, 32), "head_dim 64.* 32"),
    ):
        cache = torch.zeros(shape)
        with pytest.raises(ValueError, match=message):
            any_pool.submit(plan, case.q, cache, cache, out, scale=1.0)


def test_append_arguments(any_pool: WorkerPool) -> None:
    case = DecodeCase([20, 20])
    new = torch.zeros(2, 2, 64)
    with pytest.raises(ValueError, match="go together"):
        case.submit(any_pool, case.new_out(), k_new=new)
    with pytest.raises(ValueError, match=r"v_new has shape \(2, 2, 63\)"):
        case.submit(any_pool, case.new_out(), k_new=new, v_new=torch.zeros(2, 2, 63))
    case.block_tables[1] = case.block_tables[0]
    with pytest.raises(ValueError, match="requests 0 and 1 would both append"):
        case.submit(any_pool, case.new_out(), k_new=new, v_new=new)


def test_token_rows_name_what_does_not_fit() -> None:
    q, k, v, out = (torch.zeros(5, heads, dim) for heads, dim in ((8, 64), (2, 64), (2, 32), (8, 32)))
    TokenRows(q, k, v, out)
    bad = {
        r"q float32 \[5, 8, 64\], strides \(1, 5, 40\)": (torch.zeros(64, 8, 5).permute(2, 1, 0), k, v, out),
        r"q int32": (q.int(), k.int(), v.int(), out.int()),
        r"k_new float32 \[5, 2, 63\]": (q, torch.zeros(5, 2, 63), v, out),
        r"k_new float32 \[5, 1, 64\]": (q, torch.zeros(5, 1, 64), v, out),
        r"v_new bfloat16": (q, k, v.bfloat16(), out),
        r"v_new float32 \[4, 2, 32\]": (q, k, v[:4], out),
        r"out float32 \[5, 8, 64\]": (q, k, v, q),
        r"out .* on meta": (q, k, v, out.to("meta")),
    }
    with FakeTensorMode():
        fake = torch.zeros(5, 8, 64)
    freed = torch.zeros(5, 2, 64)
    freed.untyped_storage().resize_(0)
    bad |= {
        r"have memory: q float32": (fake, k, v, out),
        r"have memory: q float32 ": (q, freed, v, out),
        r"k_new float32 \[5, 0, 64\]": (q, torch.zeros(5, 0, 64), torch.zeros(5, 0, 32), out),
        r"q must be a torch tensor, not numpy.ndarray": (q.numpy(), k, v, out),
        r"k_new must be a torch tensor, not NoneType": (q, None, v, out),
        r"q float32 \[8, 64\]": (q[0], k, v, out),
        r"v_new float32 \[2, 32\]": (q, k, v[0], out),
        r"v_new torch.sparse_coo": (q, k, v.to_sparse(), out),
    }
    for message, tensors in bad.items():
        with pytest.raises(ValueError, match=message):
            TokenRows(*tensors)


def test_rows_must_hold_the_plans_tokens(any_pool: WorkerPool) -> None:
    case = DecodeCase([20, 20])
    plan, layer = case.plan(), LayerCache(case.k_cache, case.v_cache)

    def submit(
        first_row: int, num_tokens: int, num_q_heads: int = 8, num_kv_heads: int = 2, dims: Any = (64, 64)
    ) -> None:
        q, out = (torch.zeros(num_tokens, num_q_heads, dim) for dim in dims)
        k, v = (torch.zeros(num_tokens, num_kv_heads, dim) for dim in dims)
        any_pool.submit_rows(plan, layer, TokenRows(q, k, v, out), first_row, scale=1.0).wait()

    submit(3, 5)
    for first_row in (2.0, None, 2**31):
        with pytest.raises(ValueError, match=r"first_row = .* must be a row's number"):
            submit(first_row, 5)  # type: ignore[arg-type]
    for first_row in (-1, 4, 2**31 - 1):
        with pytest.raises(ValueError, match=f"2 tokens from row {first_row} on are not within 5 rows"):
            submit(first_row, 5)
    with pytest.raises(ValueError, match="made for num_q_heads 8, the rows have 4"):
        submit(0, 2, num_q_heads=4)
    with pytest.raises(ValueError, match="made for num_kv_heads 2, the rows have 4"):
        submit(0, 2, num_kv_heads=4)
    with pytest.raises(ValueError, match="made for head_dim 64, the rows have 32"):
        submit(0, 2, dims=(32, 64))
    with pytest.raises(ValueError, match="made for v_head_dim 64, the rows have 32"):
        submit(0, 2, dims=(64, 32))


def test_block_pairs_belong_to_pools_of_their_size(any_pool: WorkerPool) -> None:
    pairs = BlockPairs([[0, 1], [1, 2]], (4, 6))
    pools = torch.zeros(4, 8), torch.zeros(6, 8)
    any_pool.submit_copy(*pools, pairs).wait()
    with pytest.raises(ValueError, match=r"made for pools of \(4, 6\) blocks, these have \(6, 4\)"):
        any_pool.submit_copy(*reversed(pools), pairs)
    pool = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="read and write block 1 of the same pool"):
        any_pool.submit_copy(pool, pool, BlockPairs([[0, 1], [1, 2]], (4, 4)))


def test_copy_arguments(any_pool: WorkerPool) -> None:
    src, dst = torch.zeros(4, 8), torch.zeros(6, 8)
    bad = {
        r"pairs\[1, 0\] = 4 is not one of src's 4 blocks": (src, dst, [[0, 0], [4, 1]]),
        r"pairs\[0, 1\] = -1 is not one of dst's 6 blocks": (src, dst, [[0, -1]]),
        "write block 2 of dst more than once": (src, dst, [[0, 2], [1, 2]]),
        "read and write block 1 of the same pool": (src, src, [[0, 1], [1, 2]]),
        r"pairs must be \[N, 2\], not \(1, 3\)": (src, dst, [[0, 1, 2]]),
        r"pairs must be \[N, 2\], not \(5, 0\)": (src, dst, np.zeros((5, 0), np.int64)),
        "src must be a contiguous": (src.numpy(), dst, [[0, 0]]),
        "blocks differ": (src, torch.zeros(4, 9), [[0, 0]]),
        "dst must be a contiguous": (src, torch.zeros(8, 4).t(), [[0, 0]]),
    }
    for message, args in bad.items():
        with pytest.raises(ValueError, match=message):
            any_pool.submit_copy(*args)
    with pytest.raises(ValueError, match="max_gbps = 0"):
        any_pool.submit_copy(src, dst, [[0, 0]], max_gbps=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_threads": -1}, "num_threads = -1"),
        ({"num_threads": 1, "cpus": []}, "cpus"),
        ({"num_threads": 1, "cpus": [-1]}, "cpus"),
        ({"num_threads": 1, "spin_us": -1.0}, "spin_us"),
        ({"num_threads": 1, "isa": "mmx"}, "'mmx'.*no such kernels.*scalar"),
    ],
)
def test_pool_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkerPool(**arguments)


@pytest.mark.parametrize("name", ["num_q_heads", "num_kv_heads", "head_dim", "block_size", "num_threads"])
def test_plan_sizes(name: str) -> None:
    sizes = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8, "block_size": 4, "num_threads": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} = 0"):
        plan_decode([[0]], [1], **sizes)


def test_layer_cache_of_no_blocks_serves_empty_requests(any_pool: WorkerPool) -> None:
    layer = LayerCache(torch.zeros(0, 2, 16, 64), torch.zeros(0, 2, 16, 64))
    case = DecodeCase([0, 0])
    out = case.new_out()
    any_pool.submit_layer(case.plan(), layer, case.q, out, scale=1.0).wait()
    assert bool((out == 0).all())
