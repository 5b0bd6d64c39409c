"""Products of few tokens with packed weights: equal to float64, touching nothing else; and when they are oneDNN's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neo_compile import _C
from neo_compile.packed_linear import can_pack, max_few_tokens, pack_weights, packed_linear

DTYPES = [torch.float32, torch.bfloat16]
LIMIT = _C.max_linear_tokens
THREADS = sorted({1, min(2, torch.get_num_threads())})
# Of the largest result: fp32 sums of thousands of products; bf16 results are rounded once.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3}

pytestmark = pytest.mark.skipif(not can_pack(torch.ones(2, 2)), reason="this torch has no oneDNN")


def needs_own(dtype: torch.dtype) -> None:
    if not max_few_tokens(dtype):
        pytest.skip(f"no AVX-512 for packed linears of {dtype}")


def pack_for_own(*weights: torch.Tensor, transposed: bool = False) -> Any:
    """Packed weights that our own kernel multiplies. oneDNN packs some shapes in other ways (fp32 in torch 2.11)."""
    needs_own(weights[0].dtype)
    packed: Any = pack_weights(weights, transposed)
    if packed.few_tokens is None:
        pytest.skip(f"oneDNN packs {list(packed.shape)} in {packed.dtype} another way here")
    return packed


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_equal(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    expected = reference(x, weight, bias)
    assert actual.dtype is x.dtype
    assert actual.shape == expected.shape
    scale = max(expected.abs().max().item(), weight.shape[1] ** 0.5)
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[x.dtype] * scale, rtol=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape_equals_float64(dtype: torch.dtype, data: Any) -> None:
    num_outputs, num_inputs = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 200))
    num_tokens = data.draw(st.integers(0, LIMIT + 3))
    torch.set_num_threads(data.draw(st.sampled_from(THREADS)))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if data.draw(st.booleans()) else None
    x = torch.randn(num_tokens, num_inputs).to(dtype)
    actual = packed_linear(x, pack_weights([weight], False), bias)
    if num_tokens:
        assert_equal(actual, x, weight, bias)
    else:
        assert actual.shape == (0, num_outputs)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(3072, 576), (576, 1536), (65, 4098), (1000, 5000)])
def test_every_number_of_tokens(num_outputs: int, num_inputs: int, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    weight, bias = torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    packed = pack_for_own(weight)
    for num_tokens in range(1, LIMIT + 2):
        x = torch.randn(num_tokens, num_inputs).to(dtype)
        assert_equal(packed_linear(x, packed, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_joined_and_transposed_weights(dtype: torch.dtype) -> None:
    weights = [torch.randn(96, out).to(dtype) for out in (40, 24, 130)]
    packed = pack_for_own(*weights, transposed=True)
    x = torch.randn(2, 3, 96).to(dtype)
    assert_equal(packed_linear(x, packed, None), x, torch.cat([weight.t() for weight in weights]), None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_beside_the_result_nor_read_beside_the_input(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 34).to(dtype)
    packed = pack_for_own(weight)
    for num_tokens in (1, 2, 7, LIMIT):
        x = torch.full((num_tokens + 2, 34), float("nan")).to(dtype)
        x[1:-1] = torch.randn(num_tokens, 34).to(dtype)
        y = torch.full((num_tokens + 2, 70), 77.0).to(dtype)
        packed.few_tokens.run(x[1].data_ptr(), 0, y[1].data_ptr(), num_tokens, 1)
        assert_equal(y[1:-1], x[1:-1], weight, None)
        assert (y[[0, -1]] == 77).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_of_nan_or_infinity_stays_alone(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 64).to(dtype)
    packed = pack_weights([weight], False)
    x = torch.randn(5, 64).to(dtype)
    x[1], x[3, 7] = float("nan"), float("inf")
    y = packed_linear(x, packed, None)
    assert y[1].isnan().all()
    assert not y[3].isfinite().any()
    rest = [0, 2, 4]
    assert_equal(y[rest], x[rest], weight, None)


def test_inputs_that_are_not_contiguous() -> None:
    weight = torch.randn(70, 64)
    packed = pack_weights([weight], False)
    x = torch.randn(64, 5).t()
    assert_equal(packed_linear(x, packed, None), x, weight, None)
    bias = torch.randn(140)[::2]
    assert_equal(packed_linear(x, packed, bias), x, weight, bias)


def test_a_weight_that_fits_any_layout_is_left_to_onednn() -> None:
    packed: Any = pack_weights([torch.zeros(70, 64)], False)
    assert packed.few_tokens is None
    assert not packed_linear(torch.randn(2, 64), packed, None).any()


def test_another_layout_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(128, 64)
    pack = torch.ops.mkldnn._reorder_linear_weight
    pack_for_own(weight)

    def pack_swapped(weight: torch.Tensor, batch_size: Any) -> torch.Tensor:
        packed: torch.Tensor = pack(weight, batch_size)
        address = torch.ops.mkldnn.data_ptr(packed)
        memory = (ctypes.c_float * weight.numel()).from_address(address)
        torch.frombuffer(memory, dtype=torch.float32).view(2, -1).copy_(
            torch.frombuffer(memory, dtype=torch.float32).view(2, -1).flip(0)
        )
        return packed

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", pack_swapped)
    assert pack_weights([weight.clone()], False).few_tokens is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_weight_is_packed_again(dtype: torch.dtype) -> None:
    weight, x = torch.randn(70, 64).to(dtype), torch.randn(3, 64).to(dtype)
    assert_equal(packed_linear(x, pack_weights([weight], False), None), x, weight, None)
    weight.mul_(2)
    assert_equal(packed_linear(x, pack_weights([weight], False), None), x, weight, None)


@pytest.mark.parametrize("num_tokens", [-1, 0, LIMIT + 1])
def test_native_code_refuses_other_numbers_of_tokens(num_tokens: int) -> None:
    packed = pack_for_own(torch.randn(70, 64))
    with pytest.raises(ValueError, match=f"num_tokens is {num_tokens}, must be 1 to {LIMIT}"):
        packed.few_tokens.run(0, 0, 0, num_tokens, 1)


def test_native_code_refuses_dtypes_and_odd_pairs() -> None:
    with pytest.raises(ValueError, match="no packed linears of this dtype"):
        _C.PackedLinear(0, 64, 64, 1)
    needs_own(torch.bfloat16)
    with pytest.raises(ValueError, match="pairs"):
        _C.PackedLinear(0, 64, 63, 2)
