"""The serving engine: requests in, tokens out, one iteration per `step()`.

    prompt -> Session -> EngineCore.advance, iteration after iteration -> Outbox -> RequestOutput

One lock per engine: calls from several threads are serialised. A failing request ends alone; the engine goes on.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from neo_compile.config import StageKind
from neo_compile.errors import CapacityError, ConfigError
from neo_compile.runtime.cost_model import CostModel
from neo_compile.runtime.cost_tables import TableCostModel
from neo_compile.runtime.detokenizer import Tokenizer
from neo_compile.runtime.device import DeviceConfig
from neo_compile.runtime.engine_core import EngineCore
from neo_compile.runtime.kv_cache import CacheConfig
from neo_compile.runtime.measurements import OnProgress
from neo_compile.runtime.outputs import RequestOutput
from neo_compile.runtime.prompts import Prompt, as_params_list, as_prompt_list, read_prompt
from neo_compile.runtime.request import Request
from neo_compile.runtime.sampling_params import SamplingParams
from neo_compile.runtime.scheduler_config import SchedulerConfig
from neo_compile.runtime.session import Session, failed_output
from neo_compile.runtime.stats import EngineStats
from neo_compile.runtime.timeline import Timeline


class Engine:
    """Serves a Hugging Face causal language model with its KV cache in two tiers.

    Args:
        model: in eval mode on the CPU, dtype float32, float16 or bfloat16. Its parameters may get new values; once they
            are replaced, requests are refused.
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
        self._tokenizer = tokenizer
        self._lock = threading.RLock()
        self._ids = itertools.count()
        self._is_closed = False
        self._core = EngineCore(
            model,
            cache=cache or CacheConfig(),
            scheduler=scheduler or SchedulerConfig(),
            device=device or DeviceConfig(),
            stages=stages,
            cost_model=cost_model,
        )

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a prompt: a string (with a tokenizer) or a list of token ids.

        Returns:
            The request's id; its outputs come out of `step()`.

        Raises:
            ConfigError: an empty prompt, a token id outside the vocabulary, an id already in use (until its last output
                is taken), a string or stop strings without a tokenizer; the model's parameters were replaced.
            CapacityError: prompt and one token fit neither the model's context nor the larger tier.
        """
        with self._lock:
            self._check_open()
            self._core.check_model()
            return self._add(prompt, params or SamplingParams(), request_id)

    def step(self) -> list[RequestOutput]:
        """Run one iteration; the cumulative outputs of the requests that changed.

        Outputs of requests that `generate` or `stream` are waiting for in another thread go there.
        """
        with self._lock:
            self._check_open()
            self._core.advance()
            return self._core.outbox.take_unclaimed()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Serve `prompts` to the end; outputs in their order (`n` per prompt).

        A prompt that is refused, or fails, gives an output with `finish_reason` "error"; the others go on.

        Raises:
            ConfigError: the model's parameters were replaced, or the engine is closed.
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
                    outputs = [output for request_id in request_ids for output in self._core.outbox.take(request_id)]
                    if not outputs:
                        self._core.advance()
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
            self._core.outbox.claim(request_id)
        stream = self._stream(request_id, params.n)
        next(stream)  # starts it: only a started generator's `finally` runs when it is dropped
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request in any state and free its blocks; False if it is unknown or already finished.

        Its last output has `finish_reason` "abort".
        """
        with self._lock:
            return self._core.abort(request_id)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._core.info.vocab_size

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()` has anything to do or to hand over."""
        return not self._is_closed and (self._core.scheduler.has_unfinished or self._core.outbox.has_unclaimed)

    def stats(self) -> EngineStats:
        """Counters so far and the effective configuration (a copy)."""
        with self._lock:
            return self._core.stats()

    def profile(self, *, force: bool = False, on_progress: OnProgress | None = None) -> TableCostModel:
        """Measure all costs of this model on this machine, a minute or two, and keep them for the engines to come.

        Where a full profile is kept already that one is returned, unless `force`. This engine goes on with the costs it
        has.

        Raises:
            ConfigError: there are unfinished requests.
        """
        with self._lock:
            self._check_open()
            return self._core.profile(force=force, on_progress=on_progress)

    def start_timeline(self) -> None:
        """Record who computes what when, from the next iteration on."""
        with self._lock:
            self._core.executor.timeline = Timeline()

    def stop_timeline(self) -> Timeline:
        """Stop recording and hand over what was recorded.

        Raises:
            ConfigError: no recording was started.
        """
        with self._lock:
            timeline, self._core.executor.timeline = self._core.executor.timeline, None
            if timeline is None:
                raise ConfigError("no timeline is being recorded: call start_timeline() first")
            return timeline

    def close(self) -> None:
        """Stop the worker threads. Unfinished requests are dropped. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._core.close()

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
        return next(name for name in map(str, self._ids) if not self._core.is_in_use(name))

    def _add(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> str:
        """Queue a prompt; errors are `add_request`'s."""
        token_ids = read_prompt(prompt, self._tokenizer, self._core.info)
        if params.stop and self._tokenizer is None:
            raise ConfigError("SamplingParams.stop needs a tokenizer: pass Engine(tokenizer=...)")
        output_id = self._new_id() if request_id is None else request_id
        if self._core.is_in_use(output_id):
            raise ConfigError(
                f"request id {output_id!r} is in use until its last output is taken: take it with step(), "
                "or choose another id, or none"
            )
        sessions = [self._session(output_id, index, token_ids, params) for index in range(params.n)]
        if any(self._core.scheduler.queues.find(session.request.request_id) for session in sessions):
            raise ConfigError(f"request id {output_id!r} is in use (ID#INDEX names an output): choose another")
        self._core.add(output_id, sessions)
        return output_id

    def _session(self, output_id: str, index: int, token_ids: list[int], params: SamplingParams) -> Session:
        request = Request(
            request_id=output_id if params.n == 1 else f"{output_id}#{index}",
            prompt_token_ids=token_ids,
            max_tokens=min(params.max_tokens, self._core.info.max_model_len - len(token_ids)),
            arrival_time=time.perf_counter(),
        )
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= self._core.info.eos_token_ids
        session = Session(request, output_id, index, params, stop_token_ids, self._tokenizer)
        request.payload = session
        return session

    def _add_claimed(
        self, prompt: Prompt, params: SamplingParams, finished: dict[tuple[str, int], RequestOutput]
    ) -> list[tuple[str, int]]:
        """Queue one of `generate`'s prompts; the keys of its outputs. A refused one is finished at once."""
        with self._lock:
            self._check_open()
            self._core.check_model()
            num_outputs = params.n
            try:
                request_id = self._add(prompt, params, None)
            except (ConfigError, CapacityError) as error:
                request_id, num_outputs = self._new_id(), 1
                token_ids = prompt if isinstance(prompt, (list, tuple)) else []
                finished[request_id, 0] = failed_output(request_id, token_ids, str(error))
            self._core.outbox.claim(request_id)  # a refused one's too: its id is dropped at the end like the others'
            return [(request_id, index) for index in range(num_outputs)]

    def _stream(self, request_id: str, num_open: int) -> Iterator[Any]:
        try:
            yield None  # `stream` takes it
            while num_open:
                with self._lock:
                    self._check_open()
                    outputs = self._core.outbox.take(request_id)
                    if not outputs:
                        self._core.advance()
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
            self._core.outbox.release(request_id)
