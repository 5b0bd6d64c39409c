"""What an engine is made of, and one iteration of it: scheduler, executor, caches, the requests' outputs.

    Scheduler.schedule -> Executor.execute -> sample_rows -> Scheduler.complete -> Outbox
            |                     |
        BlockPools        KVCaches (device, host), StagedModel

Nothing here takes a lock or reads a prompt: that is `Engine`'s part.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

import torch

from neo_compile.config import StageKind
from neo_compile.errors import ConfigError
from neo_compile.runtime.block_pool import BlockPool
from neo_compile.runtime.captured import captured_model, contents_key
from neo_compile.runtime.cost_model import CostModel
from neo_compile.runtime.cost_tables import TableCostModel
from neo_compile.runtime.device import DeviceConfig, open_device
from neo_compile.runtime.executor import Executor, IterationResult
from neo_compile.runtime.kv_cache import CacheConfig, KVCache
from neo_compile.runtime.measurements import OnProgress
from neo_compile.runtime.model_info import ModelInfo
from neo_compile.runtime.outbox import Outbox
from neo_compile.runtime.profiler import load_or_measure_costs, profile
from neo_compile.runtime.request import FinishReason, Request, Tier
from neo_compile.runtime.sampler import SampledToken, sample_rows
from neo_compile.runtime.scheduler import Scheduler
from neo_compile.runtime.scheduler_config import SchedulerConfig
from neo_compile.runtime.session import Session
from neo_compile.runtime.stats import EngineStats
from neo_compile.runtime.tier_sizes import tier_sizes

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs iterations over the requests it was given. Arguments and errors are those of `Engine`.

    Attributes:
        sessions: of every request that has not ended, one per output, by request id.
        outbox: outputs that nobody has taken yet.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        device: DeviceConfig,
        stages: StageKind,
        cost_model: CostModel | None,
    ) -> None:
        self.info = ModelInfo.of(model)
        self.sessions: dict[str, list[Session]] = {}
        self.outbox = Outbox()
        has_host = cache.host_blocks != 0 and cache.num_blocks("device", 1) is not None
        self.device = open_device(device, has_host_cache=has_host)
        try:
            with self.device.launching(), torch.no_grad():
                staged = captured_model(model, stages, self.device.device_threads)
                self._model, self._contents = model, contents_key(model)
                dtype = cache.dtype or self.info.dtype
                sizes = tier_sizes(cache, scheduler, staged.sites, dtype, self.info.max_model_len)
                caches = {
                    tier: KVCache(staged.sites, sizes[tier], cache.block_size, dtype, self.device.torch_device)
                    for tier in Tier
                }
                caches[Tier.HOST].place(self.device.host_pool)
                self.executor = Executor(staged, self.device, caches, staging_blocks=cache.staging_blocks)
                if cost_model is None:
                    cost_model = load_or_measure_costs(self.executor, self.info)
            self.scheduler = Scheduler(
                scheduler,
                BlockPool(sizes[Tier.DEVICE], cache.block_size, Tier.DEVICE),
                BlockPool(sizes[Tier.HOST], cache.block_size, Tier.HOST),
                cost_model,
            )
        except BaseException:
            self.device.close()
            raise
        self._stats = EngineStats(
            device_blocks=sizes[Tier.DEVICE],
            host_blocks=sizes[Tier.HOST],
            block_size=cache.block_size,
            bytes_per_block=caches[Tier.DEVICE].num_bytes // max(1, sizes[Tier.DEVICE]),
            device_threads=self.device.device_threads,
            host_threads=self.device.host_threads,
            policy=scheduler.policy,
            num_stages=staged.num_stages,
            num_artifacts=staged.num_artifacts,
            cost_tables=cost_model.source,
        )

    def is_in_use(self, output_id: str) -> bool:
        """Whether a request of this id runs, or has an output that is not taken yet."""
        return output_id in self.sessions or self.outbox.knows(output_id)

    def check_model(self) -> None:
        """Refuse new work where the captured model is not the caller's any more, and see which weights were written.

        Only while idle: it takes 0.4 ms, and a reading of the weights.

        Raises:
            ConfigError: parameters, buffers or modules were replaced; nothing has changed here.
        """
        if self.scheduler.has_unfinished:
            return
        if contents_key(self._model) != self._contents:
            raise ConfigError(
                "the model's parameters were replaced (or its buffers, modules, dtypes, layouts) after this Engine "
                f"captured {type(self._model).__name__}: make another Engine, or put the old ones back"
            )
        self.executor.staged.recheck()

    def add(self, output_id: str, sessions: list[Session]) -> None:
        """Queue the outputs of one request: all of them fit or none does, for they have the same length.

        Raises:
            CapacityError: they fit neither the model's context nor the larger tier.
        """
        for session in sessions:
            self.scheduler.add(session.request)
        self.sessions[output_id] = sessions

    def abort(self, request_id: str) -> bool:
        """End a request in any state and free its blocks; False if it is unknown or already finished."""
        running = [session for session in self.sessions.get(request_id, []) if not session.request.is_finished]
        for session in running:
            self.scheduler.abort(session.request.request_id)
        self._collect(running)
        return bool(running)

    def stats(self) -> EngineStats:
        """A copy of the counters."""
        counters = dataclasses.replace(self._stats)
        counters.iterations_by_strategy = dict(self._stats.iterations_by_strategy)
        counters.predictions = self._stats.predictions.copy()
        return counters

    def profile(self, *, force: bool, on_progress: OnProgress | None) -> TableCostModel:
        """See `Engine.profile`."""
        if self.scheduler.has_unfinished:
            raise ConfigError("Engine.profile needs an idle engine: finish or abort its requests first")
        budget = self.scheduler.config.max_num_batched_tokens
        with self.device.launching(), torch.no_grad():
            return profile(
                self.executor, self.info, max_num_batched_tokens=budget, force=force, on_progress=on_progress
            )

    def close(self) -> None:
        """Stop the worker threads; unfinished requests are dropped."""
        self.sessions.clear()
        self.device.close()

    def advance(self) -> None:
        """Run one iteration, if there is anything to do, and put what changed into the outbox."""
        if not self.scheduler.has_unfinished:
            return
        try:
            with self.device.launching(), torch.no_grad():
                if self.device.poisons_freed_blocks:
                    self._poison_free_blocks()
                plan = self.scheduler.schedule()
                result = self.executor.execute(plan)
                changed, stops = self._append_tokens(result)
                times = result.times
                measured_ms = times.total_ms + times.sampling_ms
                self.scheduler.complete(plan, stops, measured_ms=measured_ms, measured_parts=times.parts())
        except BaseException as error:  # Ctrl-C too: cache and books may disagree about every request under way
            self._end_running(f"an iteration failed: {error!r}")
            raise
        self._stats.count(plan, result.times, num_outputs=len(result.requests))
        self._collect([*changed, *map(_session_of, plan.finished)])

    def _poison_free_blocks(self) -> None:
        """Between iterations: no copy is under way, so nobody has any more business with a free block."""
        for tier, cache in self.executor.caches.items():
            cache.poison(self.scheduler.queues.pools[tier].free_block_ids)

    def _end_running(self, error: str) -> None:
        """End all requests that hold KV with `error`, and hand over those that ended in a failed iteration."""
        for request in self.scheduler.queues.list_running():
            _session_of(request).error = error
            self.scheduler.abort(request.request_id, "error")
        sessions = [session for siblings in self.sessions.values() for session in siblings]
        self._collect([s for s in sessions if s.request.is_finished and s.finish_time is None])

    def _append_tokens(self, result: IterationResult) -> tuple[list[Session], dict[str, FinishReason]]:
        """Sample for every request of `result`; the sessions that changed, and why some of them end."""
        start_ns = time.perf_counter_ns()
        sessions = [_session_of(request) for request in result.requests]
        if not sessions:
            return [], {}
        tokens: list[SampledToken | Exception] = []
        for logits_RV in result.logits:
            sampling = sessions[len(tokens) : len(tokens) + len(logits_RV)]
            samplers = [session.sampler for session in sampling]
            tokens += sample_rows(logits_RV, samplers, [_token_ids_of(session.request) for session in sampling])
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
                if all(sibling.request.is_finished for sibling in self.sessions.get(session.output_id, ())):
                    self.sessions.pop(session.output_id, None)
            self.outbox.put(session.output())


def _token_ids_of(request: Request) -> Callable[[], list[int]]:
    return lambda: request.all_token_ids


def _session_of(request: Request) -> Session:
    assert isinstance(request.payload, Session), request
    return request.payload
