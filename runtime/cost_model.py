"""How long an iteration takes: the formula, the costs of its parts, and their correction by what was measured.

    device |  linear of batch-0 (+ attention of batch-1)  |  linear of batch-1 + prefill and decode attention of batch-0
    host   |  host attention of batch-1                   |  host attention of batch-0

    pipelined:    T = L * ( max{T_l0 + T_ga1, T_ca1} + max{T_l1 + T_ga0, T_ca0} )
    one batch:    T = L * ( T_l + max{T_ga, T_ca} )

T_l linear stage, T_ga device attention (prefills included), T_ca host attention with its launch and transfers. KV that
leaves the device layer by layer (host-bound prefills) loads the host side but may lag into the next layer, so it only
bounds the layer's period from below. Whole-request swaps come before the iteration and are added.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from neo_compile.runtime.plan import Strategy

PARTS = ("linear", "prefill_attention", "device_attention", "host_attention", "swap")

_SMOOTHING = 0.1  # weight of one new measurement
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
    """

    num_tokens: int = 0
    prefill_attention_ms: float = 0.0
    num_device_decodes: int = 0
    device_kv_tokens: int = 0
    num_host_decodes: int = 0
    host_kv_tokens: int = 0
    leaving_blocks: int = 0


class CostModel(ABC):
    """Milliseconds *per layer* of each part; `iteration_ms` is the whole iteration.

    Attributes:
        num_layers: L of the formula.
        launch_ms: what one host attention costs beside the attention: its submission, wake-up and small transfers.
        overhead_ms: once per iteration (embedding, logits, sampling).
    """

    def __init__(self, *, num_layers: int, launch_ms: float = 0.0, overhead_ms: float = 0.0) -> None:
        self.num_layers = num_layers
        self.launch_ms = launch_ms
        self.overhead_ms = overhead_ms
        self.part_correction = dict.fromkeys(PARTS, 1.0)
        self.strategy_correction = dict.fromkeys(Strategy, 1.0)
        self.prediction_error = dict.fromkeys(Strategy, 0.0)

    # The measured or assumed costs, before correction.
    @abstractmethod
    def raw_linear_ms(self, num_tokens: int) -> float: ...

    @abstractmethod
    def raw_prefill_attention_ms(self, num_tokens: int) -> float:
        """Causal attention of one prompt from its beginning."""

    @abstractmethod
    def raw_device_decode_ms(self, num_requests: int, kv_tokens: int) -> float: ...

    @abstractmethod
    def raw_host_attention_ms(self, num_requests: int, kv_tokens: int) -> float: ...

    @abstractmethod
    def raw_swap_ms(self, num_blocks: int) -> float: ...

    def linear_ms(self, num_tokens: int) -> float:
        return self.raw_linear_ms(num_tokens) * self.part_correction["linear"]

    def prefill_attention_ms(self, chunks: Iterable[tuple[int, int]]) -> float:
        """The sum over chunks (start, length); a later chunk also attends to the tokens before it."""
        total = 0.0
        for start, length in chunks:
            cost = self.raw_prefill_attention_ms(start + length)
            if start:  # the difference loses the constant part of a call, so it is floored
                cost = max(cost - self.raw_prefill_attention_ms(start), self.raw_prefill_attention_ms(1))
            total += cost
        return total * self.part_correction["prefill_attention"]

    def device_decode_ms(self, num_requests: int, kv_tokens: int) -> float:
        return self.raw_device_decode_ms(num_requests, kv_tokens) * self.part_correction["device_attention"]

    def host_attention_ms(self, num_requests: int, kv_tokens: int) -> float:
        """With the launch; 0 for no requests."""
        if num_requests == 0:
            return 0.0
        attention_ms = self.raw_host_attention_ms(num_requests, kv_tokens)
        return self.launch_ms + attention_ms * self.part_correction["host_attention"]

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
        layer_ms = max(period, host + leaving)
        if num_swapped_blocks:
            layer_ms += self.swap_ms(num_swapped_blocks)
        return (self.num_layers * layer_ms + self.overhead_ms) * self.strategy_correction[strategy]

    def predict_parts(self, loads: Sequence[SubBatchLoad]) -> dict[str, float]:
        """Milliseconds of an iteration's parts over all layers, to compare with what was measured (no launches)."""
        per_layer = dict.fromkeys(PARTS, 0.0)
        for load in loads:
            per_layer["linear"] += self.linear_ms(load.num_tokens)
            per_layer["prefill_attention"] += load.prefill_attention_ms
            per_layer["device_attention"] += self.device_decode_ms(load.num_device_decodes, load.device_kv_tokens)
            if load.num_host_decodes:
                host_ms = self.host_attention_ms(load.num_host_decodes, load.host_kv_tokens)
                per_layer["host_attention"] += host_ms - self.launch_ms
        return {part: self.num_layers * part_ms for part, part_ms in per_layer.items()}

    def _sides(self, load: SubBatchLoad) -> tuple[float, float, float]:
        """T_l, T_ga, T_ca of one sub-batch, per layer."""
        return (
            self.linear_ms(load.num_tokens),
            load.prefill_attention_ms + self.device_decode_ms(load.num_device_decodes, load.device_kv_tokens),
            self.host_attention_ms(load.num_host_decodes, load.host_kv_tokens),
        )

    def observe(self, strategy: Strategy, predicted_ms: float, measured_ms: float) -> None:
        """Learns from one iteration: this strategy's factor and error; the other factors drift towards this one.

        The drift lets a strategy that is never chosen be tried again, without treating an error common to all as one
        strategy's merit.
        """
        if predicted_ms <= 0 or measured_ms <= 0:
            return
        ratio = measured_ms / predicted_ms
        factors = self.strategy_correction
        factors[strategy] = _correct(factors[strategy], ratio)
        self.prediction_error[strategy] += _SMOOTHING * (min(abs(ratio - 1.0), 1.0) - self.prediction_error[strategy])
        for other in Strategy:
            if other is not strategy:
                factors[other] += _FORGETTING * (factors[strategy] - factors[other])

    def observe_part(self, part: str, predicted_ms: float, measured_ms: float) -> None:
        """Learns from one measured part of an iteration (a name of `PARTS`)."""
        if predicted_ms > 0 and measured_ms > 0:
            self.part_correction[part] = _correct(self.part_correction[part], measured_ms / predicted_ms)


def _correct(factor: float, ratio: float) -> float:
    bounded = min(max(ratio, 1.0 / _MAX_STEP), _MAX_STEP)
    return min(max(factor * math.pow(bounded, _SMOOTHING), 1.0 / _MAX_CORRECTION), _MAX_CORRECTION)


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

    def raw_prefill_attention_ms(self, num_tokens: int) -> float:
        return self.prefill_attention_ms_per_token2 * num_tokens * num_tokens

    def raw_device_decode_ms(self, num_requests: int, kv_tokens: int) -> float:
        return kv_tokens / self.device_tokens_per_ms

    def raw_host_attention_ms(self, num_requests: int, kv_tokens: int) -> float:
        return self.host_ms_per_request * num_requests + kv_tokens / self.host_tokens_per_ms

    def raw_swap_ms(self, num_blocks: int) -> float:
        return num_blocks / self.swap_blocks_per_ms
