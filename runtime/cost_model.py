"""How long an iteration takes: the formula, the costs of its parts, and their correction by what was measured.

    device |  linear of batch-0 (+ attention of batch-1)  |  linear of batch-1 + prefill and decode attention of batch-0
    host   |  host attention of batch-1                   |  host attention of batch-0

    pipelined:    T = L * ( max{T_l0 + T_ga1, T_ca1} + max{T_l1 + T_ga0, T_ca0} ) + rows
    one batch:    T = L * ( T_l + max{T_ga, T_ca} ) + rows

T_l linear stage, T_ga device attention (prefills included), T_ca host attention with its launch and transfers. Blocks
that are copied layer by layer (swaps, and the KV of host-bound prefills) load the host side but may run ahead of the
layer or lag behind it, so they only bound the layer's period from below. What depends on the sampled rows comes once
an iteration: their logits and their sampling.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from neo_compile.runtime.plan import Strategy

PARTS = ("linear", "prefill_attention", "device_attention", "host_attention", "launch", "swap", "sampling")

_SMOOTHING = 0.1  # weight of one new measurement; of a part's n-th, 1 / (n + 1) while that is more
_FORGETTING = 0.002  # how fast a strategy that is not chosen forgets that it once looked bad
_MAX_CORRECTION = 4.0
_MAX_STEP = 2.0  # one measurement counts as at most this far off (a page fault, a compilation)


class SubBatchLoad(NamedTuple):
    """What the time of one sub-batch depends on.

    Attributes:
        num_tokens: rows of the linear stages.
        prefill_attention_ms: `CostModel.prefill_attention_ms` of its prefill chunks.
        device_kv_tokens, host_kv_tokens: KV read by the decodes of each tier, the current tokens included.
        leaving_blocks: blocks of KV per layer that its host-bound prefills send to the host.
        num_logits: rows whose logits are computed and sampled.
    """

    num_tokens: int = 0
    prefill_attention_ms: float = 0.0
    num_device_decodes: int = 0
    device_kv_tokens: int = 0
    num_host_decodes: int = 0
    host_kv_tokens: int = 0
    leaving_blocks: int = 0
    num_logits: int = 0


class CostModel(ABC):
    """Milliseconds *per layer* of each part; `iteration_ms` is the whole iteration.

    Attributes:
        num_layers: L of the formula.
        launch_ms: what one host attention costs beside the attention: its submission, wake-up and small transfers.
        overhead_ms: once per sub-batch, on the device's side: its tensors, and what the attention sites take for
            themselves.
        source: where the costs come from, for reports.
    """

    source = "given by the caller"

    def __init__(self, *, num_layers: int, launch_ms: float = 0.0, overhead_ms: float = 0.0) -> None:
        self.num_layers = num_layers
        self.launch_ms = launch_ms
        self.overhead_ms = overhead_ms
        self.part_correction = dict.fromkeys(PARTS, 1.0)
        self._num_observed = dict.fromkeys(PARTS, 0)
        self.strategy_correction = dict.fromkeys(Strategy, 1.0)
        self.prediction_error = dict.fromkeys(Strategy, 0.0)

    # The measured or assumed costs, before correction.
    @abstractmethod
    def raw_linear_ms(self, num_tokens: int) -> float: ...

    @abstractmethod
    def raw_prefill_attention_ms(self, num_tokens: int, start: int) -> float:
        """Causal attention of `num_tokens` prompt tokens that follow `start` others."""

    @abstractmethod
    def raw_device_decode_ms(self, num_requests: int, kv_tokens: int) -> float: ...

    @abstractmethod
    def raw_host_attention_ms(self, num_requests: int, kv_tokens: int) -> float: ...

    @abstractmethod
    def raw_swap_ms(self, num_blocks: int) -> float: ...

    def raw_logits_ms(self, num_logits: int) -> float:
        """Logits beyond the first row's (that one `raw_linear_ms` holds), of a whole iteration."""
        return 0.0

    def raw_sampling_ms(self, num_logits: int) -> float:
        """Choosing a token for each row."""
        return 0.0

    def linear_ms(self, num_tokens: int) -> float:
        return self.raw_linear_ms(num_tokens) * self.part_correction["linear"]

    def prefill_attention_ms(self, chunks: Iterable[tuple[int, int]]) -> float:
        """The sum over chunks (start, length); a later chunk also attends to the tokens before it."""
        total = sum(self.raw_prefill_attention_ms(length, start) for start, length in chunks)
        return total * self.part_correction["prefill_attention"]

    def device_decode_ms(self, num_requests: int, kv_tokens: int) -> float:
        return self.raw_device_decode_ms(num_requests, kv_tokens) * self.part_correction["device_attention"]

    def host_attention_ms(self, num_requests: int, kv_tokens: int) -> float:
        """With the launch; 0 for no requests."""
        if num_requests == 0:
            return 0.0
        attention_ms = self.raw_host_attention_ms(num_requests, kv_tokens)
        launch_ms = self.launch_ms * self.part_correction["launch"]
        return launch_ms + attention_ms * self.part_correction["host_attention"]

    def swap_ms(self, num_blocks: int) -> float:
        return self.raw_swap_ms(num_blocks) * self.part_correction["swap"]

    def iteration_ms(self, strategy: Strategy, loads: Sequence[SubBatchLoad], num_swapped_blocks: int = 0) -> float:
        """The formula above for one or two sub-batches, corrected for this strategy."""
        sides = [self._sides(load) for load in loads]
        leaving = sum(self.swap_ms(load.leaving_blocks) for load in loads if load.leaving_blocks)
        if len(sides) == 2:
            (linear_0, device_0, host_0), (linear_1, device_1, host_1) = sides
            period = max(linear_0 + device_1, host_1) + max(linear_1 + device_0, host_0)
            host = host_0 + host_1
        else:
            ((linear, device, host),) = sides
            period = linear + max(device, host)
        copied = leaving + (self.swap_ms(num_swapped_blocks) if num_swapped_blocks else 0.0)
        layers_ms = self.num_layers * max(period, host + copied)
        return (layers_ms + self._rows_ms(loads)) * self.strategy_correction[strategy]

    def _rows_ms(self, loads: Sequence[SubBatchLoad]) -> float:
        """What comes once an iteration, not once a layer."""
        sampling_ms = self.raw_sampling_ms(sum([load.num_logits for load in loads])) * self.part_correction["sampling"]
        return sampling_ms + sum([self._logits_ms(load.num_logits) + self.overhead_ms for load in loads])

    def _logits_ms(self, num_logits: int) -> float:
        return self.raw_logits_ms(num_logits) * self.part_correction["linear"]

    def predict_parts(self, loads: Sequence[SubBatchLoad]) -> dict[str, float]:
        """Milliseconds of an iteration's parts over all layers, to compare with what was measured.

        "linear" is all that the launching thread does beside device attention and waiting.
        """
        per_layer = dict.fromkeys(PARTS, 0.0)
        for load in loads:
            per_layer["linear"] += self.linear_ms(load.num_tokens)
            per_layer["prefill_attention"] += load.prefill_attention_ms
            per_layer["device_attention"] += self.device_decode_ms(load.num_device_decodes, load.device_kv_tokens)
            if load.num_host_decodes:
                launch_ms = self.launch_ms * self.part_correction["launch"]
                host_ms = self.host_attention_ms(load.num_host_decodes, load.host_kv_tokens)
                per_layer["launch"] += launch_ms
                per_layer["host_attention"] += host_ms - launch_ms
        parts = {part: self.num_layers * part_ms for part, part_ms in per_layer.items()}
        parts["linear"] += sum(self._logits_ms(load.num_logits) + self.overhead_ms for load in loads)
        parts["sampling"] = self.raw_sampling_ms(sum(load.num_logits for load in loads))
        parts["sampling"] *= self.part_correction["sampling"]
        return parts

    def _sides(self, load: SubBatchLoad) -> tuple[float, float, float]:
        """T_l, T_ga, T_ca of one sub-batch, per layer."""
        return (
            self.linear_ms(load.num_tokens),
            load.prefill_attention_ms + self.device_decode_ms(load.num_device_decodes, load.device_kv_tokens),
            self.host_attention_ms(load.num_host_decodes, load.host_kv_tokens),
        )

    def observe(
        self, strategy: Strategy, predicted_ms: float, measured_ms: float, explained_ms: float | None = None
    ) -> None:
        """Learns from one iteration: this strategy's factor and error; the other factors drift towards this one.

        The drift lets a strategy that is never chosen be tried again, without treating an error common to all as one
        strategy's merit.

        Args:
            predicted_ms: what the plan promised.
            explained_ms: what `iteration_ms` says once the parts have learnt from the same iteration. The strategy's
                factor learns what is left, or both would learn the same error and overshoot together.
        """
        if predicted_ms <= 0 or measured_ms <= 0:
            return
        error = min(abs(measured_ms / predicted_ms - 1.0), 1.0)
        self.prediction_error[strategy] += _SMOOTHING * (error - self.prediction_error[strategy])
        factors = self.strategy_correction
        factors[strategy] = _correct(factors[strategy], measured_ms / (explained_ms or predicted_ms), _SMOOTHING)
        for other in Strategy:
            if other is not strategy:
                factors[other] += _FORGETTING * (factors[strategy] - factors[other])

    def observe_part(self, part: str, predicted_ms: float, measured_ms: float) -> None:
        """Learns from one measured part of an iteration (a name of `PARTS`)."""
        factor = self.part_correction[part]
        if predicted_ms > 0 and measured_ms > 0:
            self._num_observed[part] += 1
            weight = max(_SMOOTHING, 1.0 / (self._num_observed[part] + 1))
            self.part_correction[part] = _correct(factor, measured_ms / predicted_ms, weight)


def _correct(factor: float, ratio: float, weight: float) -> float:
    bounded = min(max(ratio, 1.0 / _MAX_STEP), _MAX_STEP)
    return min(max(factor * math.pow(bounded, weight), 1.0 / _MAX_CORRECTION), _MAX_CORRECTION)


class AnalyticCostModel(CostModel):
    """A roofline in a few numbers, for tests and simulations.

    Args (per layer):
        linear_floor_ms: the linear stage up to `knee_tokens` (reading the weights).
        linear_ms_per_token: each token beyond the knee.
        prefill_attention_ms_per_token2: times length squared.
        device_tokens_per_ms, host_tokens_per_ms: KV tokens that decode attention reads.
        host_ms_per_request: small constant work on the host.
        swap_blocks_per_ms: both directions.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        linear_floor_ms: float,
        knee_tokens: int,
        linear_ms_per_token: float,
        device_tokens_per_ms: float,
        host_tokens_per_ms: float,
        swap_blocks_per_ms: float,
        prefill_attention_ms_per_token2: float = 0.0,
        host_ms_per_request: float = 0.0,
        launch_ms: float = 0.0,
        overhead_ms: float = 0.0,
    ) -> None:
        super().__init__(num_layers=num_layers, launch_ms=launch_ms, overhead_ms=overhead_ms)
        self.linear_floor_ms = linear_floor_ms
        self.knee_tokens = knee_tokens
        self.linear_ms_per_token = linear_ms_per_token
        self.device_tokens_per_ms = device_tokens_per_ms
        self.host_tokens_per_ms = host_tokens_per_ms
        self.swap_blocks_per_ms = swap_blocks_per_ms
        self.prefill_attention_ms_per_token2 = prefill_attention_ms_per_token2
        self.host_ms_per_request = host_ms_per_request

    def raw_linear_ms(self, num_tokens: int) -> float:
        if num_tokens == 0:
            return 0.0
        return self.linear_floor_ms + max(0, num_tokens - self.knee_tokens) * self.linear_ms_per_token

    def raw_prefill_attention_ms(self, num_tokens: int, start: int) -> float:
        end = start + num_tokens
        return self.prefill_attention_ms_per_token2 * (end * end - start * start)

    def raw_device_decode_ms(self, num_requests: int, kv_tokens: int) -> float:
        return kv_tokens / self.device_tokens_per_ms

    def raw_host_attention_ms(self, num_requests: int, kv_tokens: int) -> float:
        return self.host_ms_per_request * num_requests + kv_tokens / self.host_tokens_per_ms

    def raw_swap_ms(self, num_blocks: int) -> float:
        return num_blocks / self.swap_blocks_per_ms
