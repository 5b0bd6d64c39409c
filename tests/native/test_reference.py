"""The oracle itself, against torch's attention and by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from neo_compile.reference import attend, paged_decode_reference


@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_sdpa(seed: int, causal: bool) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(6, 5, 8).double(), torch.randn(2, 5, 8).double(), torch.randn(2, 5, 4).double()
    expected = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(attend(q, k, v, 0.3, causal=causal), expected[0])


def test_the_last_queries_by_default(seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 7, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)
    torch.testing.assert_close(attend(q[:, 5:], k, v, 1.0), attend(q, k, v, 1.0)[:, 5:])
    torch.testing.assert_close(attend(q[:, 2:4], k, v, 1.0, offset=2), attend(q, k, v, 1.0)[:, 2:4])


def test_window_is_the_last_tokens(seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(1, 6, 4), torch.randn(1, 6, 4), torch.randn(1, 6, 4)
    windowed = attend(q, k, v, 1.0, window=2)
    for t in range(6):
        first = max(0, t - 1)
        torch.testing.assert_close(
            windowed[:, t : t + 1], attend(q[:, t : t + 1], k[:, first : t + 1], v[:, first : t + 1], 1.0)
        )


def test_sinks_and_softcap_by_hand() -> None:
    q, k, v = torch.ones(1, 1, 1), torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[1.0], [3.0]]])
    capped = 1.5 * torch.tanh(torch.tensor([1.0, 2.0], dtype=torch.float64) / 1.5)
    weights = torch.exp(capped)
    expected = (weights[0] + 3 * weights[1]) / (weights.sum() + torch.exp(torch.tensor(0.7, dtype=torch.float64)))
    out = attend(q, k, v, 1.0, softcap=1.5, sinks=torch.tensor([0.7], dtype=torch.float64))
    torch.testing.assert_close(out.squeeze(), expected)


def test_a_row_that_sees_nothing_is_zero() -> None:
    q, k, v = torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    for mask in (torch.tensor([[True, False], [False, False]]), torch.tensor([[0.0, -torch.inf], [-torch.inf] * 2])):
        out = attend(q, k, v, 1.0, causal=False, mask_TS=mask)
        assert out[0, 0].tolist() == [1.0] * 4
        assert out[0, 1].tolist() == [0.0] * 4
    assert attend(q, k[:, :0], v[:, :0], 1.0).tolist() == [[[0.0] * 4] * 2]


def test_paged_is_dense(seed: int) -> None:
    torch.manual_seed(seed)
    k, v, q = torch.randn(5, 2, 3, 4), torch.randn(5, 2, 3, 4), torch.randn(1, 4, 4)
    dense_k = torch.cat([k[4], k[1]], dim=1)[:, :5]
    dense_v = torch.cat([v[4], v[1]], dim=1)[:, :5]
    expected = attend(q.transpose(0, 1), dense_k, dense_v, 0.5)[:, 0]
    torch.testing.assert_close(paged_decode_reference(q, k, v, [[4, 1, 77]], [5], 0.5)[0], expected)
