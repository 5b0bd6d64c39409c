"""Makes `generate` of a compiled Hugging Face model run on neo.

Without this, `torch.compile(model, backend="neo").generate(...)` would silently not: `OptimizedModule` hands it to the
model inside, whose forward is not the compiled one. So for our backend and for Hugging Face models the compiled module
gets a `generate` of its own, and `model.compile(backend="neo")` a compiled call that serves forwards with a KV cache.
Neither is built before the first `generate`. The model inside is not touched, nor is another backend's module.

torch has no hook for this; two methods of `torch._dynamo.eval_frame` are wrapped when the backend's entry point is
loaded.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._dynamo import eval_frame

from neo_compile.config import CompileOptions, check_mode

if TYPE_CHECKING:
    from neo_compile.runtime.generate.enabling import EnabledModel

logger = logging.getLogger(__name__)

_MARK = "_wrapped_by_neo"


def install() -> None:
    """Wrap the two methods. Idempotent."""
    _wrap(eval_frame.OptimizedModule, "_initialize", _initialize)
    _wrap(eval_frame._TorchDynamoContext, "__call__", _compile_call)


def _wrap(owner: type[Any], name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _MARK):

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


def _initialize(original: Callable[..., Any], module: Any) -> None:
    """`OptimizedModule._initialize`, which every way of making one goes through."""
    original(module)
    backend = _our_backend(module.dynamo_ctx)
    if backend is not None and _generates(module._orig_mod):
        module.__dict__["generate"] = _LazyGenerate(module._orig_mod, backend)


def _compile_call(original: Callable[..., Any], context: Any, fn: Any) -> Any:
    """Compiling `model._call_impl` is `model.compile()`."""
    compiled = original(context, fn)
    model = getattr(fn, "__self__", None)
    if getattr(fn, "__name__", "") != "_call_impl" or not _generates(model):
        return compiled
    backend = _our_backend(context)
    return compiled if backend is None else _LazyCall(model, backend, compiled)


def _our_backend(context: Any) -> Any:
    """The backend of a compilation context if it is ours by name, with its `kwargs`."""
    callback = getattr(context, "callback", None)
    if not callable(callback):
        return None
    backend = eval_frame.innermost_backend(callback)
    return backend if getattr(backend, "compiler_name", None) == "neo" else None


def _generates(model: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel) and model.can_generate()


def _enable(model: Any, backend: Any, original: Callable[..., Any] | None = None) -> EnabledModel:
    """How `model` is served with the options of `torch.compile`."""
    from neo_compile.runtime.generate.enabling import EnabledModel, serving_options

    check_mode(backend.kwargs.get("mode"))
    options = CompileOptions.from_mapping(backend.kwargs.get("options"))
    return EnabledModel(model, serving_options(**options.for_generate()), original)


class _LazyGenerate:
    """`generate` of a compiled module; what serves it is made at the first call."""

    def __init__(self, model: Any, backend: Any) -> None:
        self._model, self._backend = model, backend
        self.enabled: EnabledModel | None = None
        functools.update_wrapper(self, model.generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from neo_compile.runtime.generate.custom import twin_of

        if self.enabled is None:
            self.enabled = _enable(self._model, self._backend)
        return twin_of(self._model, self.enabled).generate(*args, **kwargs)


class _LazyCall:
    """`model._compiled_call_impl`: forwards with a KV cache are served, others run as compiled.

    While the model is enabled as well, what `enable` was given counts, and it gets all calls.
    """

    def __init__(self, model: Any, backend: Any, compiled: Callable[..., Any]) -> None:
        self._model, self._backend, self._compiled = model, backend, compiled
        self.enabled: EnabledModel | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from neo_compile.runtime.generate.enabling import EnabledModel

        explicit = self._model.__dict__.get("forward")
        if isinstance(explicit, EnabledModel):
            return explicit(*args, **kwargs)
        if kwargs.get("cache") is None and kwargs.get("past_key_values") is None:
            return self._compiled(*args, **kwargs)
        if self.enabled is None:
            self.enabled = _enable(self._model, self._backend, self._compiled)
        return self.enabled(*args, **kwargs)
