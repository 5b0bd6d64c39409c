"""What a program reads besides a run's inputs: its parameters, and what is made of them once (packed weights).

Stages read parameters by reference. New contents are seen by themselves; what is derived from a parameter is made
again when its contents change. Every run looks at versions, addresses and a few elements; when these differ, and
after `recheck`, all elements are compared. Compiled stages do not look at dtypes and strides, so a parameter that was
converted under a captured program (`model.to(...)` keeps the objects) is an error here, not a wrong result there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neo_compile.errors import ConfigError
from neo_compile.tensor_state import Samples, TensorState

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class DerivedCall:
    """A register that depends on parameters only: `function` of their tensors."""

    function: Callable[[list[Any]], torch.Tensor]
    inputs: tuple[int, ...]
    output: int


class Parameters:
    """Fills the derived registers of a program and notices changed parameters, at some 0.3 us a tensor and run.

    Args:
        constants: registers with the same value in every run.
    """

    def __init__(self, constants: Mapping[int, Any], derived: Sequence[DerivedCall]) -> None:
        tensors = {register: value for register, value in constants.items() if isinstance(value, torch.Tensor)}
        self._layouts = {register: _layout(value) for register, value in tensors.items()}
        self._sources = tuple(dict.fromkeys(register for call in derived for register in call.inputs))
        self._watched = tuple(dict.fromkeys((*tensors, *self._sources)))
        self._derived = tuple(derived)
        self._states: dict[int, TensorState] = {}
        self._seen: list[tuple[int, Any, int | None, int]] = []
        self._samples = Samples(())
        self._sample_hash = self._samples.hash()
        self._values: list[tuple[int, torch.Tensor]] = []
        self._num_checks = 0
        self._num_wanted = 1

    def load(self, registers: list[Any]) -> None:
        """Write the derived registers; parameters are in their registers already.

        Raises:
            ConfigError: a parameter has another dtype, shape or layout than when the model was captured.
        """
        is_current = self._num_checks == self._num_wanted
        for register, reference, version, address in self._seen:
            tensor = registers[register]
            if (
                reference() is not tensor
                or (version is not None and tensor._version != version)
                or tensor.data_ptr() != address
            ):
                is_current = False
                break
        if not is_current or self._samples.hash() != self._sample_hash:
            self._renew(registers)
        for register, value in self._values:
            registers[register] = value

    def recheck(self) -> None:
        """Have the next `load` compare every parameter that something is derived from, whole."""
        self._num_wanted += 1

    def _renew(self, registers: list[Any]) -> None:
        num_wanted = self._num_wanted
        for register, layout in self._layouts.items():
            if _layout(registers[register]) != layout:
                now, then = _describe(_layout(registers[register])), _describe(layout)
                raise ConfigError(f"a parameter was {then} when the model was captured and is {now}: capture it again")
        old_values, values = dict(self._values), []
        states = {register: TensorState.of(registers[register]) for register in self._sources}
        for call in self._derived:
            is_same = call.output in old_values and all(
                register in self._states and self._states[register].is_same(states[register])
                for register in call.inputs
            )
            sources = [registers[register] for register in call.inputs]
            values.append((call.output, old_values[call.output] if is_same else call.function(sources)))
        # Another thread may be in `load`: it finds the old values or the new ones.
        self._values = values
        self._states = states
        self._seen = [(register, *_identity(registers[register])) for register in self._watched]
        self._samples = Samples(registers[register] for register in self._sources)
        self._sample_hash = self._samples.hash()
        self._num_checks = num_wanted


def _identity(tensor: torch.Tensor) -> tuple[weakref.ref[torch.Tensor], int | None, int]:
    """The object, its version (inference tensors have none) and its address."""
    return weakref.ref(tensor), None if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


def _describe(layout: _Layout) -> str:
    shape, stride, dtype = layout
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)}"
