"""Captured models, kept as long as the model lives: several engines on one model pay for one capture."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from neo_compile.capture import capture
from neo_compile.config import StageKind
from neo_compile.staged import StagedModel

_Key = tuple[StageKind, int, tuple[Any, ...]]
_captured: WeakKeyDictionary[torch.nn.Module, dict[_Key, StagedModel]] = WeakKeyDictionary()


def captured_model(model: torch.nn.Module, stages: StageKind, num_threads: int) -> StagedModel:
    """The staged form of `model`, captured now or by an earlier engine.

    A staged model reads parameters and buffers by reference, so new values are seen, and what it derived of them is
    compared with them in its next run; whatever changes
    `contents_key` is a new capture, and the old ones are let go.

    Raises:
        UnsupportedModelError: the model cannot be served exactly, with the reason.
    """
    captures = _captured.setdefault(model, {})
    contents = contents_key(model)
    key = (stages, num_threads, contents)
    if key not in captures:
        for old in [old for old in captures if old[-1] != contents]:
            del captures[old]  # it would keep replaced weights alive
        captures[key] = capture(model, stages=stages, num_threads=num_threads)
    else:
        captures[key].recheck()
    return captures[key]


def contents_key(model: torch.nn.Module) -> tuple[Any, ...]:
    """Changes when a captured `model` no longer is this one: other parameters, buffers or modules, dtypes or layouts.

    `model.to` keeps parameter objects and replaces buffers; a resized embedding may keep its object too. Takes half a
    millisecond for 400 modules with 270 tensors.
    """
    # Modules by weak reference, for another one may get a dead one's id. What a capture reads of the tensors it keeps.
    modules, tensors, waiting = [], [], [model]
    while waiting:
        module = waiting.pop()
        modules.append((ref(module), type(module)))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                strides = tensor.stride() if tensor.layout is torch.strided else None
                tensors.append((id(tensor), tensor.dtype, tensor.shape, strides))
        waiting += [child for child in module._modules.values() if child is not None]
    return tuple(modules), tuple(tensors)
