"""Captures that outlive their process: the program and the source of its artefacts, under the cache directory.

    captures/<fingerprint>.pickle     registers of stages and sites, names of parameters, Inductor's Python sources

Tracing a model takes Dynamo about 0.25 s a layer, and lowering a stage takes Inductor seconds even where the machine
code is cached. Loading a saved capture does neither; the numeric probe runs either way. Files are written by rename,
and one that cannot be read is as good as none. `NEO_SAVE_CAPTURES=0` neither reads nor writes them.
"""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from neo_compile.fingerprint import named_tensors
from neo_compile.paths import cache_dir
from neo_compile.staged import Artifact, Program, SizeInput, StagedModel

logger = logging.getLogger(__name__)

_MAX_FILES = 64
_MAX_CONSTANT_BYTES = 1 << 20


@dataclass(frozen=True)
class _Saved:
    """A `StagedModel` without what belongs to a process: its stages' artefacts are indices into `sources`."""

    program: Program
    sources: tuple[str, ...]
    stage_keys: tuple[int | None, ...]
    named_inputs: tuple[str | SizeInput | None, ...]
    parameter_names: dict[int, str]


def is_enabled() -> bool:
    """Whether captures are kept between processes."""
    return os.environ.get("NEO_SAVE_CAPTURES", "1") != "0"


def save_capture(key: str, model: torch.nn.Module, staged: StagedModel) -> bool:
    """Keep `staged`, a capture of `model`, as `key`. False if it holds something that cannot be kept."""
    saved = _strip(model, staged)
    if saved is None:
        return False
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            pickle.dump(saved, file)
        Path(file.name).replace(path)
        _forget_oldest(path.parent)
    except OSError as error:
        logger.warning("the capture cannot be saved for the next process: %s", error)
        return False
    return True


def load_capture(key: str, model: torch.nn.Module) -> StagedModel | None:
    """What was kept as `key`, for `model`; None if there is nothing that can be used."""
    path = _path(key)
    try:
        saved: _Saved = pickle.loads(path.read_bytes())
        tensors = dict(named_tensors(model))
        constants = {register: tensors[name] for register, name in saved.parameter_names.items()}
        from neo_compile.passes.inductor import load_artifact

        artifacts = [load_artifact(source) for source in saved.sources]
    except FileNotFoundError:
        return None
    except Exception as error:
        # Whatever is wrong with a file, it is no more than a cache: the model is captured again.
        logger.warning("saved capture %s cannot be used (%s: %s)", path, type(error).__name__, error)
        return None
    stages = tuple(
        replace(stage, artifact=None if artifact is None else artifacts[artifact])
        for stage, artifact in zip(saved.program.stages, saved.stage_keys, strict=True)
    )
    os.utime(path)
    program = replace(saved.program, stages=stages, constants={**saved.program.constants, **constants})
    return StagedModel(program, stage_keys=saved.stage_keys, named_inputs=saved.named_inputs)


def forget_capture(key: str) -> None:
    """Remove what was kept as `key`."""
    _path(key).unlink(missing_ok=True)


def _strip(model: torch.nn.Module, staged: StagedModel) -> _Saved | None:
    names: dict[int, str] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), name)
    program = staged.program
    parameter_names = {
        register: names[id(value)] for register, value in program.constants.items() if id(value) in names
    }
    constants = {register: value for register, value in program.constants.items() if register not in parameter_names}
    if (
        sum(value.nbytes if isinstance(value, torch.Tensor) else 0 for value in constants.values())
        > _MAX_CONSTANT_BYTES
    ):
        return None
    sources = _sources(program, staged.stage_keys)
    if sources is None:
        return None
    stages = tuple(replace(stage, artifact=None) for stage in program.stages)
    program = replace(program, stages=stages, constants=constants)
    return _Saved(program, sources, staged.stage_keys, tuple(staged.named_inputs), parameter_names)


def _sources(program: Program, keys: Sequence[int | None]) -> tuple[str, ...] | None:
    artifacts: dict[int, Artifact] = {
        key: stage.artifact
        for stage, key in zip(program.stages, keys, strict=True)
        if key is not None and stage.artifact is not None
    }
    sources: list[Any] = [artifacts[key].source for key in sorted(artifacts)]
    return None if None in sources else tuple(sources)


def _path(key: str) -> Path:
    return cache_dir() / "captures" / f"{key}.pickle"


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.pickle"), key=lambda path: path.stat().st_mtime)
    for path in files[:-_MAX_FILES]:
        path.unlink(missing_ok=True)
