"""Hashes of tensors' contents."""

from __future__ import annotations

import pytest
import torch

from neo_compile.tensor_state import TensorState

VIEWS = {
    "dense": lambda: torch.randn(37, 19),
    "transposed": lambda: torch.randn(19, 37).t(),
    "strided": lambda: torch.randn(37, 40)[:, 1:39:2],
    "scalar": lambda: torch.randn(()),
    "expanded": lambda: torch.randn(1, 19).expand(37, 19),
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_element_counts(view: str) -> None:
    tensor = VIEWS[view]().to(torch.bfloat16) if view != "expanded" else VIEWS[view]()
    before = TensorState.of(tensor)
    assert before.is_same(TensorState.of(tensor))
    index: tuple[int, ...]
    for index in [(), (0, 0), (36, 18), (17, 3)]:
        if len(index) != tensor.dim():
            continue
        old = tensor.data[index].clone()
        tensor.data[index] = old + 1
        assert not before.is_same(TensorState.of(tensor))
        tensor.data[index] = old
        assert before.is_same(TensorState.of(tensor))


def test_order_and_length_count() -> None:
    values = torch.randn(1000)
    swapped = values.clone()
    swapped[[3, 11]] = values[[11, 3]]  # both in the same lane of sums
    tensors = (values, swapped, values[:999], torch.zeros(8), torch.zeros(9))
    sums = {TensorState.of(tensor).checksum for tensor in tensors}
    assert len(sums) == 5


@pytest.mark.parametrize("num_elements", [3_000_000, 1_048_576, 1_048_577])
def test_threads_do_not_matter_and_the_last_part_counts(num_elements: int) -> None:
    values = torch.randn(num_elements)
    before = torch.get_num_threads()
    try:
        sums = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            sums.append(TensorState.of(values).checksum)
    finally:
        torch.set_num_threads(before)
    assert sums[0] == sums[1]
    values[-1] += 1
    assert TensorState.of(values).checksum != sums[0]


def test_nothing_to_read() -> None:
    assert TensorState.of(torch.empty(0, 5)).checksum == TensorState.of(torch.empty(3, device="meta")).checksum == 0
