"""Calling a model as it is written, whatever compilation it or a part of it has of its own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def uncompiled(model: torch.nn.Module) -> Generator[None, None, None]:
    """While active, `module.compile()` of `model` and of its parts has no effect. Not for several threads at a time."""
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, implementation in compiled:
            module._compiled_call_impl = implementation
