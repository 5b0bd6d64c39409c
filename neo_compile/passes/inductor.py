"""Compiles one linear stage with Inductor, and finds the cheapest way to call the result.

What `compile_fx` returns wraps the compiled code in what a general graph needs: mutated inputs written back, aliased
outputs rebuilt as views. A linear stage normally has neither, and then the code is called directly, which is worth some
30 us a stage.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from neo_compile.passes.verify import as_fakes, fake_mode_of, is_functional
from neo_compile.staged import Artifact

logger = logging.getLogger(__name__)


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, num_threads: int | None = None
) -> Artifact:
    """The artefact of a stage.

    Args:
        example_inputs: fake tensors and symbolic integers of the placeholders.
        num_threads: threads of its parallel loops, which Inductor bakes in; None takes torch's current number.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    compiled: list[Any] = []

    def keep_inner(aten: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
        compiled.append(compile_fx_inner(aten, inputs, **keywords))
        return compiled[-1]

    inputs = as_fakes(example_inputs)
    is_plain = is_functional(gm, inputs)
    _register_lowerings()
    # Packed weights are opaque, and asserting every stride costs 5 to 10 us a stage. What the assertions would catch is
    # checked where values enter a program: parameters by `Parameters`, sites' results by `StagedModel`.
    patches: dict[str, Any] = {"size_asserts": False}
    if num_threads:
        patches["cpp.threads"] = num_threads
    # The autograd cache would return the wrapped function without calling `keep_inner`; the cache of compiled code is
    # below it and stays on.
    no_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    # That cache knows operators by their names, not by how they are lowered here.
    config: Any = torch.compiler.config
    own_cache = config.patch(cache_key_tag=f"{config.cache_key_tag} neo {_digest_of_lowerings()}")
    with torch.no_grad(), tracing(TracingContext(fake_mode_of(inputs))), no_cache, own_cache:
        wrapped: Any = compile_fx(gm, inputs, inner_compile=keep_inner, config_patches=patches)
    if is_plain and len(compiled) == 1:
        code = compiled[0]
        has_constants = bool(code.constants or code.torchbind_constants)
        return Artifact(code.current_callable, "inductor", None if has_constants else code.source_code)
    logger.info("a stage of %d nodes mutates or aliases its inputs: called through its wrapper", len(gm.graph.nodes))
    return Artifact(lambda values: wrapped(*values), "inductor")


def load_artifact(source: str) -> Artifact:
    """The artefact whose `source` an earlier call of `compile_with_inductor` returned, perhaps in another process.

    Its kernels come from Inductor's cache of compiled code, or are compiled again.
    """
    from torch._inductor.codecache import PyCodeCache

    module: Any = PyCodeCache.load(source)
    return Artifact(module.call, "inductor", source)


@functools.cache
def _digest_of_lowerings() -> str:
    """Of this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


@functools.cache
def _register_lowerings() -> None:
    """Have compiled stages call `packed_linear` as a function: the dispatcher would cost 5 to 10 us a call."""
    from torch._inductor.ir import ExternKernel, ExternKernelAlloc, FixedLayout, FlexibleLayout, TensorBox
    from torch._inductor.lowering import register_lowering, view
    from torch._inductor.utils import sympy_product

    class PackedLinearCall(ExternKernelAlloc):
        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once("from neo_compile.packed_linear import packed_linear as neo_packed_linear")
            super().codegen(wrapper)

    @register_lowering(torch.ops.neo.packed_linear.default, type_promotion_kind=None)
    def lower_packed_linear(x: Any, packed: Any, bias: Any) -> Any:
        *rows, width = x.get_size()
        flat = ExternKernel.require_contiguous(ExternKernel.realize_input(view(x, [sympy_product(rows), width])))
        size = [sympy_product(rows), packed.get_size()[0]]
        inputs = [flat, packed] if bias is None else [flat, packed, ExternKernel.realize_input(bias)]
        call = PackedLinearCall(
            FixedLayout(x.get_device(), x.get_dtype(), size, FlexibleLayout.contiguous_strides(size)),
            inputs,
            constant_args=[None] if bias is None else [],
            python_kernel_name="neo_packed_linear",
        )
        return view(TensorBox.create(call), [*rows, size[1]])
