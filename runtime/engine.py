"""The serving engine: requests in, tokens out, one iteration per `step()`.

    add_request -> Scheduler.schedule -> Executor.execute -> sample_rows -> Scheduler.complete -> RequestOutput
                        |                     |
                    BlockPools             KVCaches (device, host), StagedModel

One lock per engine: calls from several threads are serialised. A failing request ends alone; the engine goes on.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from neo_compile.config import StageKind
from neo_compile.errors import CapacityError, ConfigError
from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.captured import captured_model
from neo_compile.runtime.cost_model import CostModel
from neo_compile.runtime.cost_tables import TableCostModel
from neo_compile.runtime.detokenizer import Tokenizer
from neo_compile.runtime.device import DeviceConfig, open_device
from neo_compile.runtime.executor import Executor, IterationResult
from neo_compile.runtime.kv_cache import CacheConfig, KVCache
from neo_compile.runtime.measurements import OnProgress
from neo_compile.runtime.model_info import ModelInfo
from neo_compile.runtime.outbox import Outbox
from neo_compile.runtime.outputs import RequestOutput
from neo_compile.runtime.profiler import load_or_measure_costs, profile
from neo_compile.runtime.prompts import Prompt, as_params_list, as_prompt_list, read_prompt
from neo_compile.runtime.request import FinishReason, Request, Tier
from neo_compile.runtime.sampler import sample_rows
from neo_compile.runtime.sampling_params import SamplingParams
from neo_compile.runtime.scheduler import Scheduler
from neo_compile.runtime.scheduler_config import SchedulerConfig
from neo_compile.runtime.session import Session, failed_output
from neo_compile.runtime.stats import EngineStats
from neo_compile.runtime.tier_sizes import tier_sizes
from neo_compile.runtime.timeline import Timeline

logger = logging.getLogger(__name__)


class Engine:
    """Serves a Hugging Face causal language model with its KV cache in two tiers.

    Args:
        model: in eval mode on the CPU, dtype float32, float16 or bfloat16.
        tokenizer: needed for string prompts, texts and stop strings.
        cache: sizes of the two tiers.
        scheduler: policy and budgets.
        device: how the machine is divided.
        stages: "inductor" compiles the linear stages, "eager" runs them as they are (no C++ compiler needed).
        cost_model: replaces the one measured at start (`runtime.profiler`).

    Raises:
        ConfigError: an option's value cannot be used; the message names the value, the limit and the option.
        UnsupportedModelError: the model's attention cannot be served, with the reason.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        device: DeviceConfig | None = None,
        stages: StageKind = "inductor",
        cost_model: CostModel | None = None,
    ) -> None:
        cache, scheduler, device = cache or CacheConfig(), scheduler or SchedulerConfig(), device or DeviceConfig()
        self._info = ModelInfo.of(model)
        self._tokenizer = tokenizer
        self._lock = threading.RLock()
        self._ids = itertools.count()
        self._sessions: dict[str, list[Session]] = {}
        self._outbox = Outbox()
        self._is_closed = False
        has_host = cache.host_blocks != 0 and cache.num_blocks("device", 1) is not None
        self._device = open_device(device, has_host_cache=has_host)
        try:
            with self._device.launching(), torch.no_grad():
                staged = captured_model(model, stages, self._device.device_threads)
                dtype = cache.dtype or self._info.dtype
                sizes = tier_sizes(cache, scheduler, staged.sites, dtype, self._info.max_model_len)
                caches = {
                    tier: KVCache(staged.sites, sizes[tier], cache.block_size, dtype, self._device.torch_device)
                    for tier in Tier
                }
                caches[Tier.HOST].place(self._device.host_pool)
                self._executor = Executor(staged, self._device, caches, staging_blocks=cache.staging_blocks)
                if cost_model is None:
                    cost_model = load_or_measure_costs(self._executor, self._info)
            self._scheduler = Scheduler(
                scheduler,
                BlockPool(sizes[Tier.DEVICE], cache.block_size, Tier.DEVICE),
                BlockPool(sizes[Tier.HOST], cache.block_size, Tier.HOST),
                cost_model,
            )
        except BaseException:
            self._device.close()
            raise
        self._stats = EngineStats(
            device_blocks=sizes[Tier.DEVICE],
            host_blocks=sizes[Tier.HOST],
            block_size=cache.block_size,
            bytes_per_block=caches[Tier.DEVICE].num_bytes // max(1, sizes[Tier.DEVICE]),
            device_threads=self._device.device_threads,
            host_threads=self._device.host_threads,
            policy=scheduler.policy,
            num_stages=staged.num_stages,
            num_artifacts=staged.num_artifacts,
            cost_tables=cost_model.source,
        )

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a prompt: a string (with a tokenizer) or a list of token ids.

        Returns:
            The request's id; its outputs come out of `step()`.

        Raises:
            ConfigError: an empty prompt, a token id outside the vocabulary, an id already in use, a string or stop
                strings without a tokenizer.
            CapacityError: prompt and one token fit neither the model's context nor the larger tier.
        """
        params = params or SamplingParams()
        with self._lock:
            self._check_open()
            token_ids = read_prompt(prompt, self._tokenizer, self._info)
            if params.stop and self._tokenizer is None:
                raise ConfigError("SamplingParams.stop needs a tokenizer: pass Engine(tokenizer=...)")
            output_id = self._new_id() if request_id is None else request_id
            if output_id in self._sessions:
                raise ConfigError(f"request id {output_id!r} is in use: choose another, or none")
            sessions = [self._session(output_id, index, token_ids, params) for index in range(params.n)]
            if any(self._scheduler.queues.find(session.request.request_id) for session in sessions):
                raise ConfigError(f"request id {output_id!r} is in use (ID#INDEX names an output): choose another")
            for session in sessions:  # all fit or none does: they have the same length
                self._scheduler.add(session.request)
            self._sessions[output_id] = sessions
            return output_id

    def step(self) -> list[RequestOutput]:
        """Run one iteration; the cumulative outputs of the requests that changed.

        Outputs of requests that `generate` or `stream` are waiting for in another thread go there.
        """
        with self._lock:
            self._check_open()
            self._advance()
            return self._outbox.take_unclaimed()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Serve `prompts` to the end; outputs in their order (`n` per prompt).

        A prompt that is refused, or fails, gives an output with `finish_reason` "error"; the others go on.
        """
        prompt_list = as_prompt_list(prompts)
        params_list = as_params_list(params, len(prompt_list))
        finished: dict[tuple[str, int], RequestOutput] = {}
        order: list[tuple[str, int]] = []
        try:
            for prompt, own_params in zip(prompt_list, params_list, strict=True):
                order += self._add_claimed(prompt, own_params, finished)
            request_ids = dict.fromkeys(request_id for request_id, _ in order)
            while len(finished) < len(order):
                with self._lock:
                    self._check_open()
                    outputs = [output for request_id in request_ids for output in self._outbox.take(request_id)]
                    if not outputs:
                        self._advance()
                finished.update({(o.request_id, o.index): o for o in outputs if o.is_finished})
        finally:
            for request_id, _ in order:
                self._drop(request_id)
        return [finished[key] for key in order]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield one prompt's cumulative outputs as they grow. Leaving the iterator early aborts the request."""
        params = params or SamplingParams()
        with self._lock:
            request_id = self.add_request(prompt, params)
            self._outbox.claim(request_id)
        stream = self._stream(request_id, params.n)
        next(stream)  # starts it: only a started generator's `finally` runs when it is dropped
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request in any state and free its blocks; False if it is unknown or already finished.

        Its last output has `finish_reason` "abort".
        """
        with self._lock:
            sessions = self._sessions.get(request_id, [])
            running = [session for session in sessions if not session.request.is_finished]
            for session in running:
                self._scheduler.abort(session.request.request_id)
            self._collect(running)
            return bool(running)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._info.vocab_size

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()` has anything to do or to hand over."""
        return not self._is_closed and (self._scheduler.has_unfinished or self._outbox.has_unclaimed)

    def stats(self) -> EngineStats:
        """Counters so far and the effective configuration (a copy)."""
        with self._lock:
            counters = dataclasses.replace(self._stats)
            counters.iterations_by_strategy = dict(self._stats.iterations_by_strategy)
            counters.predictions = self._stats.predictions.copy()
            return counters

    def profile(self, *, force: bool = False, on_progress: OnProgress | None = None) -> TableCostModel:
        """Measure all costs of this model on this machine, a minute or two, and keep them for the engines to come.

        Where a full profile is kept already that one is returned, unless `force`. This engine goes on with the costs it
        has.

        Raises:
            ConfigError: there are unfinished requests.
        """
        with self._lock:
            self._check_open()
            if self._scheduler.has_unfinished:
                raise ConfigError("Engine.profile needs an idle engine: finish or abort its requests first")
            budget = self._scheduler.config.max_num_batched_tokens
            with self._device.launching(), torch.no_grad():
                return profile(
                    self._executor, self._info, max_num_batched_tokens=budget, force=force, on_progress=on_progress
                )

    def start_timeline(self) -> None:
        """Record who computes what when, from the next iteration on."""
        with self._lock:
            self._executor.timeline = Timeline()

    def stop_timeline(self) -> Timeline:
        """Stop recording and hand over what was recorded.

        Raises:
            ConfigError: no recording was started.
        """
        with self._lock:
            timeline, self._executor.timeline = self._executor.timeline, None
            if timeline is None:
                raise ConfigError("no timeline is being recorded: call start_timeline() first")
            return timeline

    def close(self) -> None:
        """Stop the worker threads. Unfinished requests are dropped. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._sessions.clear()
                self._device.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this engine is closed: make another one")

    def _new_id(self) -> str:
        return next(name for name in map(str, self._ids) if name not in self._sessions)

    def _session(self, output_id: str, index: int, token_ids: list[int], params: SamplingParams) -> Session:
        request = Request(
            request_id=output_id if params.n == 1 else f"{output_id}#{index}",
            prompt_token_ids=token_ids,
            max_tokens=min(params.max_tokens, self._info.max_model_len - len(token_ids)),
            arrival_time=time.perf_counter(),
        )
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self._info.eos_token_ids
        session = Session(request, output_id, index, params, stop_token_ids, self._tokenizer)
        request.payload = session
        return session

    def _add_claimed(
        self, prompt: Prompt, params: SamplingParams, finished: dict[tuple[str, int], RequestOutput]
    ) -> list[tuple[str, int]]:
        """Queue one of `generate`'s prompts; the keys of its outputs. A refused one is finished at once."""
        with self._lock:
            self._check_open()
            try:
                request_id = self.add_request(prompt, params)
            except (ConfigError, CapacityError) as error:
                request_id = self._new_id()
                token_ids = prompt if isinstance(prompt, (list, tuple)) else []
                finished[request_id, 0] = failed_output(request_id, token_ids, str(error))
                return [(request_id, 0)]
            self._outbox.claim(request_id)
            return [(request_id, index) for index in range(params.n)]

    def _stream(self, request_id: str, num_open: int) -> Iterator[Any]:
        try:
            yield None  # `stream` takes it
            while num_open:
                with self._lock:
                    self._check_open()
                    outputs = self._outbox.take(request_id)
                    if not outputs:
                        self._advance()
                for output in outputs:
                    num_open -= output.is_finished
                    yield output
        finally:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        with self._lock:
            if not self._is_closed:
                self.abort(request_id)
            self._outbox.release(request_id)

    # -- one iteration

    def _advance(self) -> None:
        """Run one iteration, if there is anything to do, and put what changed into the outbox."""
        if not self._scheduler.has_unfinished:
            return
        try:
            with self._device.launching(), torch.no_grad():
                if self._device.poisons_freed_blocks:
                    self._poison_free_blocks()
                plan = self._scheduler.schedule()
                result = self._executor.execute(plan)
                changed, stops = self._append_tokens(result)
                times = result.times
                measured_ms = times.total_ms + times.sampling_ms
                self._scheduler.complete(plan, stops, measured_ms=measured_ms, measured_parts=times.parts())
        except BaseException as error:  # Ctrl-C too: cache and books may disagree about every request under way
            self._end_running(f"an iteration failed: {error!r}")
            raise
        self._stats.count(plan, result.times, num_outputs=len(result.requests))
        self._collect([*changed, *map(_session_of, plan.finished)])

    def _poison_free_blocks(self) -> None:
        """Between iterations: no copy is under way, so nobody has any more business with a free block."""
        for tier, cache in self._executor.caches.items():
            cache.poison(self._scheduler.queues.pools[tier].free_block_ids)

    def _end_running(self, error: str) -> None:
        """End all requests that hold KV with `error`, and hand over those that ended in a failed iteration."""
        for request in self._scheduler.queues.list_running():
            _session_of(request).error = error
            self._scheduler.abort(request.request_id, "error")
        sessions = [session for siblings in self._sessions.values() for session in siblings]
        self._collect([s for s in sessions if s.request.is_finished and s.finish_time is None])

    def _append_tokens(self, result: IterationResult) -> tuple[list[Session], dict[str, FinishReason]]:
        """Sample for every request of `result`; the sessions that changed, and why some of them end."""
        start_ns = time.perf_counter_ns()
        sessions = [_session_of(request) for request in result.requests]
        if not sessions:
            return [], {}
        tokens = sample_rows(
            result.logits,
            [session.sampler for session in sessions],
            [_token_ids_of(session.request) for session in sessions],
        )
        stops: dict[str, FinishReason] = {}
        for session, token in zip(sessions, tokens, strict=True):
            reason: FinishReason | None
            if isinstance(token, Exception):
                session.error = f"sampling failed: {token}"
                reason = "error"
            else:
                reason = session.append(token)
            if reason == "error":
                logger.warning("request %s ends: %s", session.output_id, session.error)
            if reason is not None:
                stops[session.request.request_id] = reason
        result.times.sampling_ms = (time.perf_counter_ns() - start_ns) / 1e6
        return sessions, stops

    def _collect(self, sessions: list[Session]) -> None:
        """Put the outputs of `sessions` into the outbox; forget the requests that have ended."""
        for session in sessions:
            if session.request.is_finished:
                session.finish()
                self._stats.num_finished += 1
                if all(sibling.request.is_finished for sibling in self._sessions.get(session.output_id, ())):
                    self._sessions.pop(session.output_id, None)
            self._outbox.put(session.output())


def _token_ids_of(request: Request) -> Callable[[], list[int]]:
    return lambda: request.all_token_ids


def _session_of(request: Request) -> Session:
    assert isinstance(request.payload, Session), request
    return request.payload
