"""F.linear -> neo::packed_linear: merging, staleness, and what is left alone."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from neo_compile.packed_linear import can_pack, num_packed_weights, pack_weights, packed_linear
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


def test_conv1d_of_gpt2() -> None:
    conv, x = Conv1D(24, 16), torch.randn(1, 5, 16)
    nn.init.normal_(conv.bias)
    gm, example_inputs = trace(conv, x)
    pack_linears(gm, example_inputs)
    assert num_packed(gm.graph) == 1
    with torch.no_grad():
        torch.testing.assert_close(gm(*example_inputs)[0], conv(x), atol=1e-5, rtol=1e-5)


def test_equal_weights_are_packed_once_and_dropped_with_the_last_holder() -> None:
    gc.collect()
    before = num_packed_weights()
    weight, x = nn.Parameter(torch.randn(4, 8)), torch.randn(3, 8)
    with torch.no_grad():
        first, second = pack_weights([weight], False), pack_weights([weight], False)
        assert first is second
        weight.mul_(2.0)
        assert torch.allclose(packed_linear(x, pack_weights([weight], False), None), x @ weight.T, atol=1e-5)
        weight.data = torch.randn(4, 8)
        assert torch.allclose(packed_linear(x, pack_weights([weight], False), None), x @ weight.T, atol=1e-5)
        weight.data += 1.0  # an adapter is merged: neither version nor address change
        packed = pack_weights([weight], False)
        assert torch.allclose(packed_linear(x, packed, None), x @ weight.T, atol=1e-5)
    assert num_packed_weights() == before + 1
    del first, second, packed
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
    torch.library.opcheck(torch.ops.neo.join_biases.default, ([b, b.clone()],))
    # A packed weight is opaque (no storage, no strides), which opcheck cannot handle.
    packed = torch.ops.neo.pack_weights.default([w, w.clone()], False)
    assert packed.shape == (8, 8)
    assert packed.layout == torch._mkldnn
    assert torch.allclose(torch.ops.neo.packed_linear.default(x, packed, None), x @ torch.cat([w, w]).T, atol=1e-5)
    fake = torch.ops.neo.packed_linear.default(x.to("meta"), torch.empty(8, 8, device="meta"), None)
    assert fake.shape == (2, 8)
