"""Captured models, kept as long as the model lives: several engines on one model pay for one capture."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from neo_compile.capture import capture
from neo_compile.config import StageKind
from neo_compile.staged import StagedModel

_Key = tuple[StageKind, int, tuple[tuple[int, torch.dtype], ...]]
_captured: WeakKeyDictionary[torch.nn.Module, dict[_Key, StagedModel]] = WeakKeyDictionary()


def captured_model(model: torch.nn.Module, stages: StageKind, num_threads: int) -> StagedModel:
    """The staged form of `model`, captured now or by an earlier engine.

    A staged model reads the parameters by reference, so new values are seen; new parameter objects (adapters) or
    another dtype (`model.to` keeps the objects) are a new capture.

    Raises:
        UnsupportedModelError: the model cannot be served exactly, with the reason.
    """
    captures = _captured.setdefault(model, {})
    key = (stages, num_threads, tuple((id(parameter), parameter.dtype) for parameter in model.parameters()))
    if key not in captures:
        captures[key] = capture(model, stages=stages, num_threads=num_threads)
    return captures[key]
