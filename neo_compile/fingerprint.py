"""A text that is equal for models whose captures are equal: code, configuration, parameters' layouts, versions.

The values of parameters are not part of it. What it cannot see (a helper function that somebody replaced) is left to
the numeric probe, which every capture passes, saved or not.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def fingerprint(model: torch.nn.Module, **options: Any) -> str | None:
    """Hexadecimal digest of all that a capture of `model` depends on; None if something cannot be described."""
    try:
        lines = [*_environment(), repr(sorted(options.items())), *_modules(model), *_tensors(model)]
    except _IndescribableError:
        return None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


class _IndescribableError(Exception):
    pass


def _environment() -> Iterator[str]:
    import transformers
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    yield f"{sys.version} {platform.machine()} torch {torch.__version__} transformers {transformers.__version__}"
    yield f"{pick_vec_isa()} {config.get_hash().hex()} {_own_code()}"
    yield f"{torch.get_default_dtype()} {torch.get_float32_matmul_precision()} {torch.is_autocast_enabled('cpu')}"
    yield f"{torch.are_deterministic_algorithms_enabled()} {torch.backends.mkldnn.is_available()}"  # type: ignore[no-untyped-call]


def _modules(model: torch.nn.Module) -> Iterator[str]:
    config = getattr(model, "config", None)
    if config is not None:
        yield json.dumps(config.to_dict(), sort_keys=True, default=str)
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            raise _IndescribableError  # code that belongs to this one object
        kind: Any = type(module)
        attributes = {key: value for key, value in vars(module).items() if key[0] != "_" and _is_plain(value)}
        code = _class_code(kind, kind.forward)
        yield f"{name} {kind.__module__}.{kind.__qualname__} {code} {sorted(attributes.items())!r}"


def _tensors(model: torch.nn.Module) -> Iterator[str]:
    first_name: dict[int, str] = {}
    for name, tensor in named_tensors(model):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _IndescribableError  # a subclass may hold anything
        same = first_name.setdefault(id(tensor), name)
        yield f"{name} {same} {list(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


@functools.cache
def _class_code(kind: type, forward: Any) -> str:
    """Digest of the files that define `kind` and its bases, and of its forward, which may come from elsewhere."""
    digest = hashlib.sha256()
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        path = getattr(module, "__file__", None)
        if base.__module__.split(".")[0] in ("torch", "builtins"):  # their version is part of the environment
            continue
        if path is None:
            raise _IndescribableError  # typed into a prompt or a notebook
        digest.update(_file_digest(path))
    digest.update(f"{getattr(forward, '__module__', None)} {getattr(forward, '__qualname__', None)}".encode())
    code = getattr(forward, "__code__", None)
    if code:
        digest.update(code.co_code + repr((code.co_names, list(filter(_is_plain, code.co_consts)))).encode())
    return digest.hexdigest()


@functools.cache
def _file_digest(path: str) -> bytes:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return path.encode()


@functools.cache
def _own_code() -> str:
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.glob("passes/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
