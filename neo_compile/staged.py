"""A captured model as a flat program over linear stages and attention sites. Runs outside Dynamo: guards are paid once.

    registers   inputs, parameters, and every value that crosses a cut
    program     stage 0 | site 0 | stage 1 | site 1 | ... | stage L

Three ways to run the same program:

    __call__(*inputs)             plain meaning, each site computed by `neo::attention`
    run(handler, **inputs)        one batch, sites served by a handler
    coroutine(handler, **inputs)  as run, but yields between a site's begin and finish, so that a driver can put the
                                  linear stage of another sub-batch there
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from neo_compile.attention import AttentionHandler, AttentionSite, active_handler
from neo_compile.ops import plain_attention
from neo_compile.parameters import DerivedCall, Parameters

# A stage takes its inputs as a list that it may empty, and returns its outputs in order.
StageFunction = Callable[[list[Any]], Sequence[Any]]
StageHook = Callable[[int, int, int], None]


@dataclass(eq=False)
class Artifact:
    """What equal stages share. Replacing `function` replaces it in all of them, at their next call.

    Attributes:
        kind: how it runs now.
        source: Python code that has `function` as `call`; None if there is none.
    """

    function: StageFunction
    kind: Literal["eager", "inductor"]
    source: str | None = None


@dataclass(frozen=True)
class StageCall:
    """One linear stage: registers read, registers written, and registers whose last reader it is.

    `artifact` is None for a stage without operators (two sites back to back).
    """

    artifact: Artifact | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True)
class SiteCall:
    """One attention site. `has_batch_dim`: registers are [1, T, H, D] rather than [T, H, D]."""

    site: AttentionSite
    q: int
    k: int
    v: int
    mask: int | None
    sinks: int | None
    output: int
    is_causal: bool
    has_batch_dim: bool
    dead: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Stages and sites alternate: stages[i], sites[i], stages[i + 1].

    Attributes:
        inputs: register of each input of `__call__`, in order; None for an input that nothing reads.
        outputs: registers of the results, in order.
        constants: registers that hold the same value in every run (parameters, when bound; tensors of the graph).
        derived: registers computed from parameters once per change of them.
    """

    stages: tuple[StageCall, ...]
    sites: tuple[SiteCall, ...]
    num_registers: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    constants: Mapping[int, Any]
    derived: tuple[DerivedCall, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.stages) == len(self.sites) + 1, f"{len(self.stages)} stages, {len(self.sites)} sites"


@dataclass(frozen=True)
class SizeInput:
    """An integer input that is the size of a named tensor input."""

    name: str
    dim: int

    def of(self, inputs: Mapping[str, torch.Tensor]) -> int:
        """The size among a run's `inputs`."""
        return inputs[self.name].shape[self.dim]


class Compilation(Protocol):
    """Stages that are being compiled in the background."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, after `timeout_s` at most; None waits for it."""


class StagedModel:
    """Runs a `Program`.

    Attributes:
        sites: constants of the attention sites, in program order.
        num_stages: len(sites) + 1.
        num_artifacts: how many different stages were compiled.
        input_names: keywords of `run` and `coroutine`, in the order of `__call__`'s tensors; empty when the program's
            inputs have no names (a graph of `torch.compile`).
        named_inputs: name (or size of a named one) of each of the program's inputs; empty as above.
        stage_keys: which artefact each stage runs, as an index below `num_artifacts`; None for a stage without
            operators.
        compilation: what compiles the stages in the background, if something does.
    """

    def __init__(
        self,
        program: Program,
        *,
        stage_keys: Sequence[int | None],
        named_inputs: Sequence[str | SizeInput | None] = (),
    ) -> None:
        self.program = program
        self.compilation: Compilation | None = None
        self.sites: tuple[AttentionSite, ...] = tuple(call.site for call in program.sites)
        self.num_stages = len(program.stages)
        self.stage_keys = tuple(stage_keys)
        self.num_artifacts = len(set(self.stage_keys) - {None})
        self.input_names: tuple[str, ...] = tuple(name for name in named_inputs if isinstance(name, str))
        self.named_inputs = tuple(named_inputs)
        self._template: list[Any] = [None] * program.num_registers
        for register, value in program.constants.items():
            self._template[register] = value
        self._parameters = Parameters(program.constants, program.derived)

    @property
    def stage_kind(self) -> Literal["eager", "inductor"]:
        """How the stages run now: "inductor" once all are compiled."""
        kinds = {stage.artifact.kind for stage in self.program.stages if stage.artifact}
        return "inductor" if kinds == {"inductor"} else "eager"

    def recheck(self) -> None:
        """Compare all that was made of parameters with them, whole: a run sees no write to a part of one.

        Takes as long as reading them with torch's threads. Only where the parameters are bound (`capture`).
        """
        self._parameters.recheck()
        self._parameters.load(self._template.copy())

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Results on `args`, the program's inputs in order; attention is computed on the tensors given."""
        handler = active_handler()
        if self.named_inputs:
            inputs = dict(zip(self.input_names, args, strict=True))
            if handler is not None:
                return self.run(handler, **inputs)
            registers = self._load_named(inputs)
        else:
            registers = self._load(args)
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for stage, site in zip(self.program.stages, self.program.sites, strict=False):
                _run_stage(stage, registers)
                _run_site(site, registers, handler)
            _run_stage(self.program.stages[-1], registers)
        finally:
            torch._C._set_grad_enabled(was_enabled)
        return tuple(registers[register] for register in self.program.outputs)

    def load(self) -> list[Any]:
        """Registers with the parameters as they are now, for several coroutines of one iteration."""
        registers = self._template.copy()
        self._parameters.load(registers)
        return registers

    def run(
        self, handler: AttentionHandler, *, on_stage: StageHook | None = None, **inputs: torch.Tensor
    ) -> tuple[Any, ...]:
        """Results of one batch whose attention sites are served by `handler`."""
        coroutine = self.coroutine(handler, loaded=None, on_stage=on_stage, **inputs)
        while True:
            try:
                next(coroutine)
            except StopIteration as stop:
                results: tuple[Any, ...] = stop.value
                return results

    def coroutine(
        self,
        handler: AttentionHandler,
        *,
        loaded: Sequence[Any] | None = None,
        on_stage: StageHook | None = None,
        **inputs: torch.Tensor,
    ) -> Generator[None, None, tuple[Any, ...]]:
        """As `run`, yielding once per site, after `handler.begin` and before `handler.finish`.

        Args:
            loaded: what `load` gave, as looking at every parameter takes a while; None looks at them now.
            on_stage: called with (stage index, start, end) after each stage, in nanoseconds of `time.perf_counter_ns`.
        """
        program = self.program
        registers = self._load_named(inputs, loaded)
        set_grad_enabled = torch._C._set_grad_enabled
        is_enabled = torch.is_grad_enabled
        begin, finish = handler.begin, handler.finish
        for index, (stage, call) in enumerate(zip(program.stages, program.sites, strict=False)):
            was_enabled = is_enabled()
            set_grad_enabled(False)
            try:
                start_ns = time.perf_counter_ns() if on_stage else 0
                _run_stage(stage, registers)
                if on_stage:
                    on_stage(index, start_ns, time.perf_counter_ns())
                q, k, v = registers[call.q], registers[call.k], registers[call.v]
                if call.has_batch_dim:
                    q, k, v = q.squeeze(0).contiguous(), k.squeeze(0).contiguous(), v.squeeze(0).contiguous()
                ticket = begin(call.site, q, k, v, None if call.sinks is None else registers[call.sinks])
                del q, k, v
                for register in call.dead:
                    registers[register] = None
            finally:
                set_grad_enabled(was_enabled)
            yield
            out = finish(ticket)
            del ticket
            assert _is_right_result(call.site, out), _wrong_result(call.site, out)
            registers[call.output] = out.unsqueeze(0) if call.has_batch_dim else out
            del out
        was_enabled = is_enabled()
        set_grad_enabled(False)
        try:
            start_ns = time.perf_counter_ns() if on_stage else 0
            _run_stage(program.stages[-1], registers)
            if on_stage:
                on_stage(len(program.stages) - 1, start_ns, time.perf_counter_ns())
        finally:
            set_grad_enabled(was_enabled)
        return tuple(registers[register] for register in program.outputs)

    def _load(self, args: Sequence[Any]) -> list[Any]:
        registers = self._template.copy()
        for register, value in zip(self.program.inputs, args, strict=True):
            if register is not None:
                registers[register] = value
        self._parameters.load(registers)
        return registers

    def _load_named(self, inputs: Mapping[str, torch.Tensor], loaded: Sequence[Any] | None = None) -> list[Any]:
        if not self.named_inputs:
            raise TypeError("this staged model's inputs have no names: call it with positional inputs")
        if inputs.keys() != set(self.input_names):
            raise TypeError(f"expected the inputs {', '.join(self.input_names)}, got {', '.join(inputs) or 'none'}")
        registers = self.load() if loaded is None else list(loaded)
        for register, name in zip(self.program.inputs, self.named_inputs, strict=True):
            if register is not None:
                assert name is not None, f"input register {register} is neither named nor bound"
                registers[register] = _checked(name, inputs[name]) if isinstance(name, str) else name.of(inputs)
        return registers


def _run_stage(stage: StageCall, registers: list[Any]) -> None:
    artifact = stage.artifact
    if artifact is None:
        return
    values = [registers[register] for register in stage.inputs]
    for register in stage.dead:
        registers[register] = None
    for register, value in zip(stage.outputs, artifact.function(values), strict=True):
        registers[register] = value


def _run_site(call: SiteCall, registers: list[Any], handler: AttentionHandler | None) -> None:
    q, k, v = registers[call.q], registers[call.k], registers[call.v]
    mask = None if call.mask is None else registers[call.mask]
    sinks = None if call.sinks is None else registers[call.sinks]
    if not call.has_batch_dim:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    site = call.site
    if handler is None:
        out = plain_attention(q, k, v, mask, sinks, site.scale, call.is_causal, site.window, site.softcap)
    else:
        assert q.shape[0] == 1, f"a forward batch is one row of tokens, got q {q.shape}"
        assert mask is None, "a forward batch has no mask: its handler knows which tokens are whose"
        out = handler.finish(handler.begin(site, q[0].contiguous(), k[0].contiguous(), v[0].contiguous(), sinks))[None]
    assert _is_right_result(site, out), _wrong_result(site, out)
    for register in call.dead:
        registers[register] = None
    registers[call.output] = out if call.has_batch_dim else out.squeeze(0)


def _checked(name: str, value: torch.Tensor) -> torch.Tensor:
    if value.dtype is not torch.int64:
        raise TypeError(f"input {name} is {value.dtype}, must be torch.int64")
    return value.contiguous()


def _is_right_result(site: AttentionSite, out: torch.Tensor) -> bool:
    """Compiled stages read memory without looking at dtypes and strides."""
    return out.is_contiguous() and out.dtype is site.dtype


def _wrong_result(site: AttentionSite, out: torch.Tensor) -> str:
    return (
        f"site {site.index}: result {out.dtype} {list(out.shape)}, strides {out.stride()}; contiguous {site.dtype} due"
    )
