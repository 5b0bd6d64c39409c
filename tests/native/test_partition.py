"""The flash-decoding partition: every token once, cuts at block boundaries, even shares, few tasks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neo_compile.host_attention import AttentionPlan, plan_decode


def make_plan(lens: list[int], block_size: int, num_threads: int, min_share_bytes: int = 1) -> AttentionPlan:
    width = max([1, *(-(-n // block_size) for n in lens)])
    return plan_decode(
        torch.zeros(len(lens), width, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=block_size,
        num_threads=num_threads,
        min_share_bytes=min_share_bytes,
    )


@given(
    lens=st.lists(st.integers(0, 200), max_size=12),
    block_size=st.integers(1, 20),
    num_threads=st.integers(1, 20),
    window=st.none() | st.integers(1, 250),
)
def test_covers_every_token_once(lens: list[int], block_size: int, num_threads: int, window: int | None) -> None:
    tasks = make_plan(lens, block_size, num_threads).tasks(window)
    assert len(tasks) <= len(lens) + num_threads
    by_request = {r: list(group) for r, group in itertools.groupby(tasks, key=lambda task: task[0])}
    assert list(by_request) == list(range(len(lens)))
    partials = []
    for request, spans in by_request.items():
        begins, ends = [span[1] for span in spans], [span[2] for span in spans]
        assert begins[0] == (max(0, lens[request] - window) if window else 0)
        assert ends[-1] == lens[request]
        assert begins[1:] == ends[:-1]
        assert all(begin % block_size == 0 for begin in begins[1:])
        assert all(begin < end for begin, end in zip(begins, ends, strict=True)) or lens[request] == 0
        indices = [span[3] for span in spans]
        assert indices == [None] if len(spans) == 1 else None not in indices
        partials += [index for index in indices if index is not None]
    assert partials == list(range(len(partials)))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7, 16])
def test_one_long_request_is_split_evenly(num_threads: int) -> None:
    tasks = make_plan([16 * 100], 16, num_threads).tasks()
    sizes = [(end - begin) // 16 for _, begin, end, _ in tasks]
    assert len(sizes) == num_threads
    assert max(sizes) - min(sizes) <= 1


def test_small_work_is_not_split() -> None:
    block_bytes = 2 * 16 * 2 * 8
    assert len(make_plan([160], 16, 8, min_share_bytes=10 * block_bytes).tasks()) == 1
    assert len(make_plan([320], 16, 8, min_share_bytes=10 * block_bytes).tasks()) == 2


def test_windows_of_one_plan_are_independent() -> None:
    plan = make_plan([100, 20], 16, 2)
    assert plan.tasks(10) == [(0, 90, 100, None), (1, 10, 20, None)]
    assert plan.tasks()[0][1] == 0
    assert plan.tasks(10) == [(0, 90, 100, None), (1, 10, 20, None)]
