"""Compiles one linear stage with Inductor, and finds the cheapest way to call the result.

What `compile_fx` returns wraps the compiled code in what a general graph needs: mutated inputs written back, aliased
outputs rebuilt as views. A linear stage normally has neither, and then the code is called directly, which is worth some
30 us a stage. That is decided by running the stage once on fake tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch.multiprocessing.reductions import StorageWeakRef

from neo_compile.staged import StageFunction

logger = logging.getLogger(__name__)


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: list[Any], *, num_threads: int | None = None
) -> StageFunction:
    """The function of a stage; `example_inputs` are the fake tensors and symbolic integers of its placeholders.

    Args:
        num_threads: threads of its parallel loops, which Inductor bakes in; None takes torch's current number.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    compiled: list[Any] = []

    def keep_inner(aten: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
        compiled.append(compile_fx_inner(aten, inputs, **keywords))
        return compiled[-1]

    is_plain = is_functional(gm, example_inputs)
    fake_mode = _fake_mode(example_inputs)
    patches = {"cpp.threads": num_threads} if num_threads else {}
    # The autograd cache would return the wrapped function without calling `keep_inner`; the cache of compiled code is
    # below it and stays on.
    no_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch.no_grad(), tracing(TracingContext(fake_mode)), no_cache:
        wrapped = compile_fx(gm, example_inputs, inner_compile=keep_inner, config_patches=patches)
    if is_plain and len(compiled) == 1:
        function: StageFunction = compiled[0].current_callable
        return function
    logger.debug("a stage of %d nodes mutates or aliases its inputs: calling it through its wrapper", len(gm.graph.nodes))
    return lambda values: wrapped(*values)


def is_functional(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether the stage mutates no input, and its results share memory with no input and not with each other."""
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    with torch.no_grad():
        results = [value for value in gm(*example_inputs) if isinstance(value, torch.Tensor)]
    if versions != [tensor._version for tensor in tensors]:
        return False
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in results]
    given = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
    return len(set(storages)) == len(storages) and not given & set(storages)


def _fake_mode(example_inputs: Sequence[Any]) -> Any:
    from torch._guards import detect_fake_mode

    fake_mode = detect_fake_mode(list(example_inputs))
    assert fake_mode is not None, "a stage without fake inputs"
    return fake_mode
