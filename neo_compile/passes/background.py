"""Compiles stages in another process while eager ones serve; each is replaced as soon as its code is there.

    capturing thread    fork ------------------------------------------- serves: eager stages, then compiled ones
    child process          | lower + compile artefact 0 | artefact 1 | ...
    watching thread                        load, compare, swap 0        load, compare, swap 1

A process, because lowering is Python: in a thread it would take the GIL for seconds, and every operator of the serving
thread gives the GIL away and has to wait for it again. A forked one, because it has the traced stages and their
symbolic sizes already. The child runs no parallel region and starts no thread, it only reads fake tensors; what it
sends back is the source that Inductor wrote, whose machine code lies in Inductor's cache by then. It dies with its
parent.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._prims_common import clone_preserve_strides
from torch._subclasses.fake_tensor import FakeTensor

from neo_compile.errors import ConfigError
from neo_compile.passes.split_stages import StageGraph
from neo_compile.staged import Artifact, StageFunction

logger = logging.getLogger(__name__)

# Largest difference of compiled from eager results, relative to their largest magnitude, that rounding explains.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}


class BackgroundCompilation:
    """Replaces the functions of `artifacts` by compiled ones, the most used first.

    Args:
        stages: the stage that each artefact stands for.
        uses: for each stage of the program the index of its artefact.
        on_done: called by the watching thread once every artefact is compiled; not called if one stays eager.

    Raises:
        ConfigError: the stages do not run on the CPU.
    """

    def __init__(
        self,
        artifacts: Sequence[Artifact],
        stages: Sequence[StageGraph],
        uses: Sequence[int | None],
        *,
        num_threads: int,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        _check_device(stages)
        self._artifacts = artifacts
        self._eager = [artifact.function for artifact in artifacts]
        self._samples: dict[int, list[Any]] = {}
        self._on_done = on_done
        self._lock = threading.Lock()  # the serving thread's first calls and the watching thread's swaps
        for index, artifact in enumerate(artifacts):
            artifact.function = self._sampled(index, artifact)
        order = [index for index, _ in Counter(use for use in uses if use is not None).most_common()]
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_compile_all, args=(sender, order, stages, num_threads), daemon=True)
        with warnings.catch_warnings():
            # "... use of fork() may lead to deadlocks in the child": see above for why it does not.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sender.close()
        self._process = process
        self._is_cancelled = False
        self._thread = threading.Thread(
            target=self._watch, args=(receiver, set(order)), name="neo-background-compilation", daemon=True
        )
        self._thread.start()

    @property
    def process_id(self) -> int:
        """Of the compiling process."""
        assert self._process.pid is not None
        return int(self._process.pid)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether all has been tried; waits for it, `timeout_s` at most."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Compile no further; stages that are eager stay so, without a warning."""
        self._is_cancelled = True
        self._process.terminate()

    def _sampled(self, index: int, artifact: Artifact) -> StageFunction:
        """The eager function, which keeps its first call's inputs to check the compiled function with."""

        def first_call(values: list[Any]) -> Sequence[Any]:
            with self._lock:
                if artifact.function is first_call:
                    artifact.function = self._eager[index]
                    self._samples[index] = [_kept(value) for value in values]
            return self._eager[index](values)

        return first_call

    def _watch(self, receiver: Connection, missing: set[int]) -> None:
        problem = None
        while missing and not problem:
            try:
                index, source, problem = receiver.recv()
            except EOFError:
                self._process.join()
                problem = f"the compiling process ended with exit code {self._process.exitcode}"
            else:
                problem = problem or self._swap(index, source)
                if not problem:
                    missing.discard(index)
        receiver.close()
        on_done, self._on_done = self._on_done, None  # it may hold what holds this object
        if not missing and on_done:
            on_done()
        elif missing and not self._is_cancelled:
            self._process.terminate()
            names = ", ".join(f"#{index}" for index in sorted(missing))
            warnings.warn(f"neo keeps linear stages of kind {names} eager: {problem}", UserWarning, stacklevel=2)
        self._process.join()
        self._samples.clear()

    def _swap(self, index: int, source: str) -> str | None:
        """Replace artefact `index`, or say why not."""
        from neo_compile.passes.inductor import load_artifact

        try:
            compiled = load_artifact(source)
            error = self._difference(index, compiled)
        except Exception as error_of_code:
            # Whatever is wrong with compiled code, the eager stage is right and stays.
            return f"{type(error_of_code).__name__}: {error_of_code}"
        if error:
            return f"compiled results differ from eager ones by {error:.1e} of their magnitude"
        artifact = self._artifacts[index]
        with self._lock:
            artifact.source, artifact.kind, artifact.function = source, compiled.kind, compiled.function
        logger.info("linear stages of kind #%d are compiled", index)
        return None

    def _difference(self, index: int, compiled: Artifact) -> float:
        """By how much compiled results differ from eager ones, if that is more than rounding explains; otherwise 0."""
        sample = self._samples.pop(index, None)
        if sample is None:
            return 0.0
        with torch.no_grad():
            expected = self._eager[index](list(sample))
            actual = compiled.function(list(sample))
        errors = [_relative(one, other) for one, other in zip(actual, expected, strict=True)]
        return max((error for error, tolerance in errors if not error <= tolerance), default=0.0)


def _compile_all(sender: Connection, order: Sequence[int], stages: Sequence[StageGraph], num_threads: int) -> None:
    """The child: sends (index, source, problem) for each artefact."""
    import torch._inductor.config as inductor_config

    from neo_compile.passes.inductor import compile_with_inductor

    os.nice(5)  # serving comes first
    torch.set_num_threads(1)
    inductor_config.compile_threads = 1  # the parent's pools of threads and processes did not survive the fork
    for index in order:
        stage = stages[index]
        assumed = _assumptions(stage)
        try:
            artifact = compile_with_inductor(stage.graph_module, stage.example_inputs(), num_threads=num_threads)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            sender.send((index, None, f"{type(error).__name__}: {lines[0]}"))
            return
        problem = None
        if _assumptions(stage) != assumed:
            # In the foreground they would become guards of the caller; here nobody would check them.
            problem = "its code would hold for some sizes only"
        elif artifact.source is None:
            problem = "its code needs a wrapper that cannot be handed over"
        sender.send((index, None if problem else artifact.source, problem))


def _assumptions(stage: StageGraph) -> tuple[int, int, int]:
    """How much is assumed of the sizes of `stage`."""
    for value in stage.example_inputs():
        environment = value.fake_mode.shape_env if isinstance(value, FakeTensor) else None
        if environment is not None:
            runtime_asserts = sum(map(len, environment.deferred_runtime_asserts.values()))
            return len(environment.guards), len(environment.replacements), runtime_asserts
    return 0, 0, 0


def _check_device(stages: Sequence[StageGraph]) -> None:
    for stage in stages:
        for value in stage.example_inputs():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                raise ConfigError(
                    f"stages='background' compiles for CPUs only, this stage runs on {value.device}: use 'inductor'"
                )


def _kept(value: Any) -> Any:
    """`value` with memory of its own, but for parameters and packed weights."""
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or value.layout != torch.strided:
        return value
    copied: torch.Tensor = clone_preserve_strides(value)  # type: ignore[no-untyped-call]
    return copied


def _relative(actual: Any, expected: Any) -> tuple[float, float]:
    """Largest difference relative to the largest magnitude, and what of it rounding explains."""
    tolerance = _TOLERANCE.get(expected.dtype, 0.0)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf, tolerance
    if not expected.numel():
        return 0.0, tolerance
    magnitude = expected.double().abs().max().clamp_min(1e-6)
    return float((actual.double() - expected.double()).abs().max() / magnitude), tolerance
