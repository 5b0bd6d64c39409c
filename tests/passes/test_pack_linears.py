"""F.linear -> neo::packed_linear: merging, staleness, and what is left alone."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from neo_compile.packed_linear import can_pack, num_packed_weights
from neo_compile.passes.pack_linears import num_packed, pack_linears
from tests.passes.graphs import trace

pytestmark = pytest.mark.skipif(not can_pack(torch.ones(2, 2)), reason="this torch has no oneDNN")


class Projections(nn.Module):
    def __init__(self, bias: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 24, bias, dtype=dtype), nn.Linear(16, 8, bias, dtype=dtype)
        self.out = nn.Linear(24, 16, dtype=dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out(self.q(x)), self.k(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("merge", [False, True])
def test_equal_and_merged(bias: bool, merge: bool, dtype: torch.dtype) -> None:
    module, x = Projections(bias, dtype), torch.randn(1, 5, 16, dtype=dtype)
    gm, example_inputs = trace(module, x)
    expected = module(x)
    pack_linears(gm, example_inputs, merge=merge)
    assert num_packed(gm.graph) == (2 if merge else 3)
    with torch.no_grad():
        actual = gm(*example_inputs)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    nodes = len(gm.graph.nodes)
    pack_linears(gm, example_inputs, merge=merge)
    assert len(gm.graph.nodes) == nodes


def test_changed_weights_are_packed_again_and_dead_ones_dropped() -> None:
    gc.collect()
    before = num_packed_weights()
    weight, x = nn.Parameter(torch.randn(4, 8)), torch.randn(3, 8)
    with torch.no_grad():
        assert torch.allclose(torch.ops.neo.packed_linear(x, [weight], []), x @ weight.T, atol=1e-5)
        weight.mul_(2.0)
        assert torch.allclose(torch.ops.neo.packed_linear(x, [weight], []), x @ weight.T, atol=1e-5)
        weight.data = torch.randn(4, 8)
        assert torch.allclose(torch.ops.neo.packed_linear(x, [weight], []), x @ weight.T, atol=1e-5)
    assert num_packed_weights() == before + 1
    del weight
    gc.collect()
    assert num_packed_weights() == before


def test_computed_weights_are_left_alone() -> None:
    weight = nn.Parameter(torch.randn(4, 8))
    gm, example_inputs = trace(lambda x: nn.functional.linear(x, weight * 2), torch.randn(3, 8))
    pack_linears(gm, example_inputs)
    assert num_packed(gm.graph) == 0


def test_what_cannot_be_packed() -> None:
    assert not can_pack(torch.ones(2, 2, dtype=torch.float64))
    assert not can_pack(torch.ones(2, 2, 2))
    assert not can_pack(torch.ones(2, 2, device="meta"))


def test_operator_checks() -> None:
    x, w, b = torch.randn(2, 8), torch.randn(4, 8), torch.randn(4)
    torch.library.opcheck(torch.ops.neo.packed_linear.default, (x, [w, w.clone()], []))
    torch.library.opcheck(torch.ops.neo.packed_linear.default, (x, [w], [b]))
