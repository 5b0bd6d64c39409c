"""`enable(model)`: Hugging Face's own decoding loop, with forwards that run on the captured model.

model.generate(...)  ->  model.forward  (replaced on the instance)
                             |  input_ids [B, S], attention_mask, the caller's cache
                             |-> served:   tokens [1, T], KV in our blocks, logits [B, K, V] in the model's own class
                             |-> refused:  the model's own forward, the cache made dense first; counted by reason
"""

from __future__ import annotations

import inspect
import threading
import types
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from neo_compile.checks import check_choice
from neo_compile.config import GENERATE_POLICIES, STAGE_KINDS, StageKind, parse_bytes
from neo_compile.errors import ConfigError, UnsupportedModelError
from neo_compile.runtime.captured import contents_key
from neo_compile.runtime.cost_model import CostModel
from neo_compile.runtime.device import DeviceConfig
from neo_compile.runtime.generate.calls import CallReader, CannotServeError
from neo_compile.runtime.generate.counters import GenerateStats
from neo_compile.runtime.generate.forward import OutputForm, serve_forward
from neo_compile.runtime.generate.rows import TIERS
from neo_compile.runtime.generate.serving import Serving, ServingOptions
from neo_compile.runtime.generate.views import paged_cache_of
from neo_compile.runtime.kv_cache import CacheConfig
from neo_compile.runtime.scheduler_config import POLICIES

CUSTOM_GENERATE = "_neo_generate"
"""Where a model keeps what serves its calls with `custom_generate=neo_compile.generate`."""


def enable(
    model: torch.nn.Module,
    *,
    device_cache: int | str | None = None,
    host_cache: int | str | None = None,
    policy: str = "neo",
    device: DeviceConfig | None = None,
    stages: StageKind = "inductor",
    block_size: int = 16,
    cost_model: CostModel | None = None,
) -> EnabledModel:
    """Run `model.generate` (and plain calls under `torch.no_grad()`) on neo, until `disable(model)`.

    Args:
        model: a Hugging Face causal language model in eval mode. Its `forward` is replaced on the instance.
        device_cache, host_cache: bytes of the KV caches, integers or strings such as "2GiB". Neither: one tier, on all
            cores. With a device cache, rows beyond it live on the host.
        policy: "neo", "device-only" (rows that do not fit are refused) or "host-only".
        device: how the machine is divided.
        stages: "inductor" compiles the linear stages, "eager" runs them as they are (no C++ compiler needed).
        block_size: tokens of a KV block.
        cost_model: replaces the one measured at start, which decides how rows on the host are pipelined.

    Returns:
        A context manager that disables at its exit. A model that cannot be captured is left as it is, with a warning
        that names the reason; so is every call that cannot be served (`stats(model).fallbacks`).

    Raises:
        ConfigError: an option's value cannot be used; the message names the value, the limit and the option.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is not a Hugging Face PreTrainedModel: enable() serves its generate()"
        )
    options = serving_options(device_cache, host_cache, policy, device, stages, block_size, cost_model)
    disable(model)
    enabled = EnabledModel(model, options)
    enabled.prepare()
    model.forward = enabled
    return enabled


def disable(model: torch.nn.Module) -> None:
    """Undo `enable`. Caches that live keep their KV. Nothing happens to a model that is not enabled."""
    enabled = model.__dict__.get("forward")
    if isinstance(enabled, EnabledModel):
        del model.__dict__["forward"]
        if enabled.patched is not None:
            model.forward = enabled.patched
        enabled.close()


def stats(model: torch.nn.Module) -> GenerateStats:
    """What the enabled model has done so far (a copy).

    Raises:
        ConfigError: the model is not enabled.
    """
    enabled = enabled_model(model)
    if enabled is None:
        raise ConfigError(f"this {type(model).__name__} is not enabled: call neo_compile.enable(model) first")
    return enabled.stats()


def enabled_model(model: torch.nn.Module) -> EnabledModel | None:
    """What serves `model`, if anything does: after `enable`, `model.compile(backend="neo")`, `torch.compile`, or
    `custom_generate`."""
    attributes = model.__dict__
    for holder in (
        attributes.get("forward"),
        getattr(attributes.get("_compiled_call_impl"), "enabled", None),
        getattr(attributes.get("generate"), "enabled", None),
        attributes.get(CUSTOM_GENERATE),
    ):
        if isinstance(holder, EnabledModel):
            return holder
    return None


def serving_options(
    device_cache: int | str | None = None,
    host_cache: int | str | None = None,
    policy: str = "neo",
    device: DeviceConfig | None = None,
    stages: StageKind = "inductor",
    block_size: int = 16,
    cost_model: CostModel | None = None,
) -> ServingOptions:
    """`enable`'s options, checked."""
    check_choice("stages", stages, STAGE_KINDS)
    check_choice("policy", policy, GENERATE_POLICIES)
    for name, size in (("device_cache", device_cache), ("host_cache", host_cache)):
        if size is not None:
            parse_bytes(size, name)
    if policy == "host-only" and device_cache is None:
        raise ConfigError("policy='host-only' needs a device_cache: without one there is one tier, the device's")
    return ServingOptions(
        cache=CacheConfig(block_size=block_size, device_bytes=device_cache, host_bytes=host_cache),
        policy=POLICIES[policy],
        device=device or DeviceConfig(),
        stages=stages,
        cost_model=cost_model,
    )


class EnabledModel:
    """What `model.forward` is while the model is enabled. One lock: forwards of several threads follow each other.

    Args:
        model: the model whose parameters are served.
        options: see `enable`.
        original: what runs a forward that is not served; None is the forward that the model has now.

    Attributes:
        patched: the forward that somebody else has put on the instance, which `disable` puts back; else None.
    """

    def __init__(
        self, model: PreTrainedModel, options: ServingOptions, original: Callable[..., Any] | None = None
    ) -> None:
        self._model = model
        self.patched = _patched_forward(model)
        self._original = original or model.forward
        self._options = options
        self._stats = GenerateStats()
        self._lock = threading.RLock()
        self._serving: Serving | None = None
        self._unsupported: str | None = None
        self._key: tuple[Any, ...] | None = None
        self._form: OutputForm | None = None
        self._warned: set[str] = set()
        self._reader = CallReader(model, model.forward)
        self.__signature__ = inspect.signature(model.forward)
        self.__wrapped__ = self._original

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward of the model."""
        cache = None
        with self._lock:
            self._stats.num_forwards += 1
            try:
                call = self._reader.read(args, kwargs)
                cache = call.cache
                serving, form = self._serving_now(is_first=paged_cache_of(cache) is None)
                outputs = serve_forward(serving, form, call)
                self._stats.num_served += 1
                return outputs if call.return_dict else outputs.to_tuple()
            except CannotServeError as error:
                self._count_fallback(error.reason)
                self._densify(args, kwargs)
        return self._original(*args, **kwargs)

    def prepare(self) -> None:
        """Capture the model now rather than at its first forward."""
        with self._lock:
            self._capture()

    def stats(self) -> GenerateStats:
        """A copy of the counters."""
        with self._lock:
            copied = GenerateStats(**vars(self._stats))
            copied.fallbacks = dict(self._stats.fallbacks)
            if self._serving is not None:
                self._serving.blocks.settle()
                pools = self._serving.blocks.pools
                copied.block_size = self._serving.blocks.block_size
                copied.device_blocks, copied.host_blocks = (pools[tier].num_blocks for tier in TIERS)
                copied.device_blocks_taken, copied.host_blocks_taken = (pools[tier].num_taken for tier in TIERS)
            return copied

    def close(self) -> None:
        """Stop the worker threads. Caches that live can still be read."""
        with self._lock:
            if self._serving is not None:
                self._serving.device.close()
                self._serving = None
            self._unsupported = "the model was disabled"

    def __enter__(self) -> EnabledModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._model.__dict__.get("forward") is self:
            disable(self._model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model is not enabled."""
        copied = memo.get(id(self._model))
        return None if copied is None else types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """None, where it is only kept for `custom_generate`."""
        if self._model.__dict__.get("forward") is self:
            raise TypeError("an enabled model cannot be pickled: call neo_compile.disable(model) first")
        return type(None), ()

    def _serving_now(self, is_first: bool) -> tuple[Serving, OutputForm]:
        """The captured model, captured anew where the parameters have changed.

        Args:
            is_first: no cache of ours comes with the call; only then the parameters are looked at, all of them.
        """
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._model.parameters()):
            raise CannotServeError("gradients are needed (call it under torch.no_grad())")
        if self._model.training:
            raise CannotServeError("the model is in training mode (call model.eval())")
        if torch.is_autocast_enabled("cpu"):
            raise CannotServeError("autocast (load the model in that dtype instead)")
        if is_first:
            if _has_hooks(self._model):
                raise CannotServeError("modules have forward hooks")
            if self._key != contents_key(self._model) and self._unsupported != "the model was disabled":
                self._capture()
            elif self._serving is not None:
                self._serving.staged.recheck()
        if self._serving is None or self._form is None:
            raise CannotServeError(self._unsupported or "the model was disabled")
        return self._serving, self._form

    def _capture(self) -> None:
        self._key, self._unsupported = contents_key(self._model), None
        if self._serving is not None:
            self._serving.device.close()
            self._serving = None
        replaced = {name: self._model.__dict__.pop(name) for name in ("forward",) if name in self._model.__dict__}
        try:
            if self.patched is not None:
                raise UnsupportedModelError("its forward was replaced on the instance")
            self._form = OutputForm.of(self._model)
            serving = Serving(self._model, self._options, self._stats, self._lock)
            self._form.check(serving.staged.sites)
            self._serving = serving
            self._stats.num_captures += 1
        except UnsupportedModelError as error:
            self._unsupported = error.reason
            self._warn(error.reason)
        finally:
            self._model.__dict__.update(replaced)

    def _count_fallback(self, reason: str) -> None:
        self._stats.fallbacks[reason] = self._stats.fallbacks.get(reason, 0) + 1
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            name = type(self._model).__name__
            warnings.warn(f"neo leaves a call of {name} to the model itself: {reason}", UserWarning, stacklevel=4)

    def _densify(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model's own forward is about to read and extend the cache."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, DynamicCache):
                paged = paged_cache_of(value)
                if paged is not None:
                    paged.densify()


def _patched_forward(model: torch.nn.Module) -> Callable[..., Any] | None:
    """What stands in for the class's forward on this instance, if it is not ours."""
    forward: Callable[..., Any] | None = model.__dict__.get("forward")
    is_own = isinstance(forward, EnabledModel) or getattr(forward, "__func__", None) is type(model).forward
    return None if is_own else forward


def _has_hooks(model: torch.nn.Module) -> bool:
    """Whether a module inside the model has hooks, which a captured model would not call.

    transformers' own hooks that collect hidden states do nothing unless those are asked for.
    """
    for module in model.modules():
        if module is model or not (module._forward_hooks or module._forward_pre_hooks):
            continue
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks):
            return True
    return False
