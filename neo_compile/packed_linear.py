"""Linears with weights in oneDNN's blocked layout, packed once per change of the weights.

    neo::pack_weights(weights, transposed) -> packed     once; `parameters.py` keeps the result between runs
    neo::join_biases(biases) -> bias                     likewise
    neo::packed_linear(x, packed, bias) -> y             every run

Plain F.linear on the CPU repacks bf16 weights on every call, which halves the speed of a decode-sized batch. Inductor
packs weights only when they are constants of the graph; here they are inputs, so that equal layers share one artefact.
Several projections of the same input are one call with one packed weight.

With few tokens the product is our own (csrc/packed_linear.h), on the same packed weights, where the CPU has AVX-512:
oneDNN reads them at half of the memory's bandwidth then. Whether oneDNN's layout is the one that our code knows is
looked up in each packed weight; any other is left to oneDNN.

The packed form costs the weights' memory a second time. Equal weights in equal state are packed once per process, and
the packed form is dropped with the last program that holds it.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neo_compile import _C
from neo_compile.ops import library
from neo_compile.tensor_state import TensorState

_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
# dtype: its code in native code, an integer dtype of its size, inputs side by side in a packed weight
_FEW_TOKEN_DTYPES = {torch.float32: (0, torch.int32, 1), torch.bfloat16: (2, torch.int16, 2)}
_NUM_SAMPLES = 512


@dataclass(frozen=True, slots=True)
class _Shared:
    sources: tuple[TensorState, ...]
    packed: weakref.ref[torch.Tensor]


_shared: dict[tuple[Any, ...], _Shared] = {}


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a packed form for `weight` [out, in] on this machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.layout != torch.strided or 0 in weight.shape:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def pack_weights(weights: Sequence[torch.Tensor], transposed: bool) -> torch.Tensor:
    """`weights` [out_i, in] (or [in, out_i] if `transposed`) joined and blocked: an opaque [sum of out_i, in]."""
    key = (transposed, *map(id, weights))
    shared = _shared.get(key)
    packed = shared.packed() if shared else None
    states = tuple(map(TensorState.of, weights))
    if shared is None or packed is None or not all(map(TensorState.is_same, shared.sources, states)):
        with torch.no_grad():
            parts = [weight.detach().t() if transposed else weight.detach() for weight in weights]
            weight = torch.cat(parts) if len(parts) > 1 else parts[0]
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

        def forget(dead: object) -> None:
            if key in _shared and _shared[key].packed is dead:
                del _shared[key]

        assert packed is not None
        packed.few_tokens = _few_tokens(packed, weight)
        _shared[key] = _Shared(states, weakref.ref(packed, forget))
    return packed


def join_biases(biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """`biases` [out_i] one after the other: [sum of out_i]."""
    return torch.cat([bias.detach() for bias in biases])


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] times `packed`, from `pack_weights`, plus `bias` [out]: [..., out]."""
    shape = x.shape
    num_tokens = x.numel() // shape[-1]
    if bias is not None:
        bias = bias.contiguous()  # oneDNN reads a strided one wrong
    few_tokens: _C.PackedLinear | None = getattr(packed, "few_tokens", None)
    if (
        few_tokens is None
        or not 0 < num_tokens <= max_few_tokens(x.dtype)
        or x.dtype is not packed.dtype
        or not x.is_contiguous()
        or (bias is not None and bias.dtype is not x.dtype)
    ):
        result: torch.Tensor = _linear_pointwise(x, packed, bias, "none", [], "")
        return result
    y = x.new_empty((*shape[:-1], packed.shape[0]))
    bias_address = 0 if bias is None else bias.data_ptr()
    few_tokens.run(x.data_ptr(), bias_address, y.data_ptr(), num_tokens, torch.get_num_threads())
    return y


@functools.cache
def max_few_tokens(dtype: torch.dtype) -> int:
    """The most tokens for which packed linears of `dtype` are our own; 0 if all are oneDNN's."""
    if dtype not in _FEW_TOKEN_DTYPES or not _C.has_packed_linear(_FEW_TOKEN_DTYPES[dtype][0]):
        return 0
    # Above, oneDNN is bound by arithmetic, for which tiles are several times as fast as vectors.
    has_tiles = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return 8 if has_tiles else _C.max_linear_tokens


def _few_tokens(packed: torch.Tensor, weight: torch.Tensor) -> _C.PackedLinear | None:
    """Our own product with `packed`, made of `weight`; None if its layout is not the one of csrc/packed_linear.h."""
    if not max_few_tokens(packed.dtype):
        return None
    num_outputs, num_inputs = packed.shape
    code, bits, pair = _FEW_TOKEN_DTYPES[packed.dtype]
    num_steps = -(-num_inputs // (16 * pair)) * 16
    num_bytes = -(-num_outputs // 64) * num_steps * 256
    if num_inputs % pair or torch.ops.mkldnn._nbytes(packed) != num_bytes:
        return None
    address = torch.ops.mkldnn.data_ptr(packed)
    memory = torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=bits)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(num_outputs, (_NUM_SAMPLES,), generator=generator)
    column = torch.randint(num_inputs, (_NUM_SAMPLES,), generator=generator)
    there = memory[((row // 64 * num_steps + column // pair) * 64 + row % 64) * pair + column % pair]
    expected = weight[row, column].view(bits)
    # A weight that is the same nearly everywhere would look right in any layout.
    is_known = torch.equal(there, expected) and len(set(expected.tolist())) >= 16
    return _C.PackedLinear(address, num_outputs, num_inputs, code) if is_known else None


def num_packed_weights() -> int:
    """How many packed weights are alive right now."""
    return len(_shared)


def _pack_weights_fake(weights: Sequence[torch.Tensor], transposed: bool) -> torch.Tensor:
    out_dim = 1 if transposed else 0
    return weights[0].new_empty(sum(weight.shape[out_dim] for weight in weights), weights[0].shape[1 - out_dim])


def _join_biases_fake(biases: Sequence[torch.Tensor]) -> torch.Tensor:
    return biases[0].new_empty(sum(bias.shape[0] for bias in biases))


def _packed_linear_fake(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _define(schema: str, function: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> None:
    name = function.__name__
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"neo::{name}", fake, lib=library)


_define("(Tensor[] weights, bool transposed) -> Tensor", pack_weights, _pack_weights_fake)
_define("(Tensor[] biases) -> Tensor", join_biases, _join_biases_fake)
_define("(Tensor x, Tensor packed, Tensor? bias) -> Tensor", packed_linear, _packed_linear_fake)
