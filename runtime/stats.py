"""Counters of an engine: what its iterations did, and the configuration that is in effect."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from neo_compile.runtime.executor import IterationTimes
from neo_compile.runtime.plan import IterationPlan
from neo_compile.runtime.predictions import MAX_KEPT, Prediction
from neo_compile.runtime.session import Session


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made, and its effective configuration."""

    num_iterations: int = 0
    iterations_by_strategy: dict[str, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_swap_outs: int = 0
    num_swap_ins: int = 0
    num_preemptions: int = 0
    num_host_requests: int = 0
    """Requests that had at least one decode token served from the host cache."""
    num_host_decode_tokens: int = 0
    busy_s: float = 0.0
    host_attention_s: float = 0.0
    wait_s: float = 0.0
    device_blocks: int = 0
    host_blocks: int = 0
    block_size: int = 0
    bytes_per_block: int = 0
    device_threads: int = 0
    host_threads: int = 0
    policy: str = ""
    num_stages: int = 0
    num_artifacts: int = 0
    cost_tables: str = ""
    """Which cost tables serve: a full profile, quick tables, or a model that the caller gave."""
    predictions: deque[Prediction] = field(default_factory=lambda: deque(maxlen=MAX_KEPT), repr=False)
    """The newest iterations' predicted and measured times (`predictions.error_summaries` sums them up)."""

    def count(self, plan: IterationPlan, times: IterationTimes, num_outputs: int) -> None:
        """Add one iteration, in which `num_outputs` tokens were sampled."""
        self.num_iterations += 1
        measured_ms = times.total_ms + times.sampling_ms
        if plan.predicted_ms > 0 and measured_ms > 0:
            self.predictions.append(Prediction(plan.strategy.value, plan.predicted_ms, measured_ms))
        name = plan.strategy.value
        self.iterations_by_strategy[name] = self.iterations_by_strategy.get(name, 0) + 1
        self.num_swap_outs += len(plan.swap_outs)
        self.num_swap_ins += len(plan.swap_ins)
        self.num_preemptions += len(plan.preempted)
        self.num_output_tokens += num_outputs
        self.busy_s += times.total_ms / 1e3
        self.host_attention_s += sum(times.host_attention_ms) / 1e3
        self.wait_s += times.wait_ms / 1e3
        for sub_batch in plan.sub_batches:
            self.num_prompt_tokens += sum(prefill.num_tokens for prefill in sub_batch.prefills)
            self.num_host_decode_tokens += len(sub_batch.host_decodes)
            for request in sub_batch.host_decodes:
                if isinstance(request.payload, Session) and not request.payload.was_on_host:
                    request.payload.was_on_host = True
                    self.num_host_requests += 1
