"""`neo::packed_linear`: F.linear with weights in oneDNN's blocked layout, packed once and found again by identity.

Plain F.linear on the CPU repacks bf16 weights on every call, which halves the speed of a decode-sized batch. Inductor
packs weights only when they are constants of the graph; here they are inputs, so that equal layers share one artefact.
Several projections of the same input are one call with one packed weight.

The packed form costs the weights' memory a second time. It is rebuilt when a weight changes in place or is replaced,
and dropped with its weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neo_compile.ops import library

_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


@dataclass(slots=True)
class _Packed:
    """Packed form of some weights, and what identifies their current contents."""

    sources: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]
    addresses: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor | None


_packed: dict[tuple[int, ...], _Packed] = {}


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


def packed_linear(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """x [..., in] times each of `weights` [out_i, in], plus `biases` (one per weight, or none): [..., sum of out_i]."""
    sources = (*weights, *biases)
    key = tuple(map(id, sources))
    entry = _packed.get(key)
    if entry is None or not _is_current(entry, sources):
        entry = _packed[key] = _pack(key, weights, biases)
    result: torch.Tensor = _linear_pointwise(x, entry.weight, entry.bias, "none", [], "")
    return result


def num_packed_weights() -> int:
    """How many packed weights are held right now."""
    return len(_packed)


def _is_current(entry: _Packed, sources: tuple[torch.Tensor, ...]) -> bool:
    for source, reference, version, address in zip(
        sources, entry.sources, entry.versions, entry.addresses, strict=True
    ):
        if reference() is not source or source._version != version or source.data_ptr() != address:
            return False
    return True


def _pack(key: tuple[int, ...], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> _Packed:
    sources = (*weights, *biases)
    with torch.no_grad():
        whole = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
        bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        packed = torch.ops.mkldnn._reorder_linear_weight(whole, None)

    def forget(_: object) -> None:
        _packed.pop(key, None)

    return _Packed(
        sources=tuple(weakref.ref(source, forget) for source in sources),
        versions=tuple(source._version for source in sources),
        addresses=tuple(source.data_ptr() for source in sources),
        weight=packed,
        bias=bias,
    )


def _packed_linear_fake(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


library.define(  # type: ignore[no-untyped-call]
    "packed_linear(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
library.impl("packed_linear", packed_linear, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("neo::packed_linear", _packed_linear_fake, lib=library)
