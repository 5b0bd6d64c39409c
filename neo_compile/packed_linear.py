"""Linears with weights in oneDNN's blocked layout, packed once per change of the weights.

    neo::pack_weights(weights, transposed) -> packed     once; `parameters.py` keeps the result between runs
    neo::join_biases(biases) -> bias                     likewise
    neo::packed_linear(x, packed, bias) -> y             every run

Plain F.linear on the CPU repacks bf16 weights on every call, which halves the speed of a decode-sized batch. Inductor
packs weights only when they are constants of the graph; here they are inputs, so that equal layers share one artefact.
Several projections of the same input are one call with one packed weight.

The packed form costs the weights' memory a second time. Equal weights in equal state are packed once per process, and
the packed form is dropped with the last program that holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neo_compile.ops import library
from neo_compile.tensor_state import TensorState

_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


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
    if shared is None or packed is None or not all(map(TensorState.is_of, shared.sources, weights)):
        with torch.no_grad():
            parts = [weight.detach().t() if transposed else weight.detach() for weight in weights]
            packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(parts) if len(parts) > 1 else parts[0], None)

        def forget(dead: object) -> None:
            if key in _shared and _shared[key].packed is dead:
                del _shared[key]

        assert packed is not None
        _shared[key] = _Shared(tuple(map(TensorState.of, weights)), weakref.ref(packed, forget))
    return packed


def join_biases(biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """`biases` [out_i] one after the other: [sum of out_i]."""
    return torch.cat([bias.detach() for bias in biases])


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] times `packed`, from `pack_weights`, plus `bias` [out]: [..., out]."""
    result: torch.Tensor = _linear_pointwise(x, packed, bias, "none", [], "")
    return result


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
