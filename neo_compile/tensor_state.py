"""Noticing that a tensor's contents have changed.

Writes through the tensor count its version up and `tensor.data = other` moves its address, but `tensor.data.add_(x)`
does neither; that is how adapters are merged into weights. `Samples` hashes a few elements of each weight, which costs
next to nothing in every run and notices dense changes; `TensorState` hashes all of them, at the cost of reading them.
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
    """Identifies the contents of a tensor: all of them on the CPU, elsewhere its object, version and address."""

    reference: weakref.ref[torch.Tensor]
    version: int | None
    address: int
    checksum: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorState:
        """The present state of `tensor`, which is read. Inference tensors count no versions."""
        version = None if tensor.is_inference() else tensor._version
        return cls(weakref.ref(tensor), version, tensor.data_ptr(), _checksum(tensor))

    def is_same(self, other: TensorState) -> bool:
        """Whether both are of the same object with the same contents."""
        return self.reference() is other.reference() and (self.version, self.address, self.checksum) == (
            other.version,
            other.address,
            other.checksum,
        )


def _checksum(tensor: torch.Tensor) -> int:
    """Of the memory from the first to the last element; 0 if it is not the CPU's."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return 0
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _C.checksum(tensor.data_ptr(), num_elements * tensor.element_size(), torch.get_num_threads())


def _diagonal_sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to four elements of `tensor`, along its diagonal, as a view: [n]."""
    line = tensor.detach()
    while line.dim() > 1:
        line = line.diagonal(dim1=0, dim2=1)
    if line.dim() == 0:
        line = line.unsqueeze(0)
    return line[:: max(1, len(line) // _SAMPLE_SIZE)][:_SAMPLE_SIZE]
