"""Noticing that a tensor's contents have changed, without reading all of them.

Writes through the tensor count its version up and `tensor.data = other` moves its address, but `tensor.data.add_(x)`
does neither; that is how adapters are merged into weights. A hash of a few elements is compared for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from neo_compile import _C

_SAMPLE_SIZE = 4


class Samples:
    """A few elements of each of some tensors. It keeps the tensors' memory, as it is now."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._views = [_diagonal_sample(tensor) for tensor in tensors if tensor.device.type == "cpu"]
        addresses = [
            view.data_ptr() + index * view.stride(0) * view.element_size()
            for view in self._views
            for index in range(len(view))
        ]
        self._addresses = np.array(addresses, np.int64)
        self._arguments = (self._addresses.ctypes.data, len(addresses))

    def hash(self) -> int:
        """Of what the elements hold at this moment."""
        return _C.hash_words(*self._arguments)


@dataclass(frozen=True, slots=True)
class TensorState:
    """Identifies the contents of a tensor."""

    reference: weakref.ref[torch.Tensor]
    version: int | None
    address: int
    sample: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorState:
        """The present state of `tensor`. Inference tensors count no versions."""
        version = None if tensor.is_inference() else tensor._version
        return cls(weakref.ref(tensor), version, tensor.data_ptr(), Samples([tensor]).hash())

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the same object with, as far as one can tell, the same contents."""
        return (
            self.reference() is tensor
            and (self.version is None or tensor._version == self.version)
            and tensor.data_ptr() == self.address
            and Samples([tensor]).hash() == self.sample
        )


def _diagonal_sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to four elements of `tensor`, along its diagonal, as a view: [n]."""
    line = tensor.detach()
    while line.dim() > 1:
        line = line.diagonal(dim1=0, dim2=1)
    if line.dim() == 0:
        line = line.unsqueeze(0)
    return line[:: max(1, len(line) // _SAMPLE_SIZE)][:_SAMPLE_SIZE]
