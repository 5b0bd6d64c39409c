"""From logits to tokens. The maths of every option is transformers' logits processors, not ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from neo_compile.runtime.sampling_params import SamplingParams

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. `logprobs` maps token ids to log-probabilities of the model (before processors)."""

    token_id: int
    logprobs: dict[int, float] | None = None


class TokenSampler:
    """Sampling state of one request: its processors and its generator."""

    def __init__(self, params: SamplingParams, seed_offset: int = 0) -> None:
        self.params = params
        self._processors = _build_processors(params)
        self._generator: torch.Generator | None = None
        if params.seed is not None:
            self._generator = torch.Generator().manual_seed(int(params.seed) + seed_offset)

    def sample(self, logits_V: torch.Tensor, token_ids: Sequence[int]) -> int:
        """The next token, given logits [vocab] and the prompt and output tokens so far."""
        scores = logits_V.float().unsqueeze(0)
        scores = self._processors(torch.tensor([token_ids], dtype=torch.int64), scores)
        if self.params.temperature == 0:
            return int(scores.argmax())
        probabilities = torch.softmax(scores[0], dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def _build_processors(params: SamplingParams) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.temperature not in (0, 1.0):
        processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.temperature != 0:
        if params.top_k > 0:
            processors.append(TopKLogitsWarper(int(params.top_k)))
        if params.top_p < 1:
            processors.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            processors.append(MinPLogitsWarper(params.min_p))
    return processors


def sample_rows(
    logits_RV: torch.Tensor, samplers: Sequence[TokenSampler], token_ids: Sequence[Callable[[], Sequence[int]]]
) -> list[SampledToken | Exception]:
    """One token for each row of `logits_RV`.

    A row that cannot be sampled (NaN logits, a processor that raises) gives its exception, and the others their tokens:
    a failing request fails alone.

    Args:
        token_ids: one function per row that returns the request's tokens so far (only called where they are needed).
    """
    best_values, best_ids = logits_RV.max(dim=-1)  # NaN in a row makes its maximum NaN
    has_nan = torch.isnan(best_values).tolist()
    greedy_ids = best_ids.tolist()
    results: list[SampledToken | Exception] = []
    for row, sampler in enumerate(samplers):
        if has_nan[row]:
            results.append(ArithmeticError("the model's logits contain NaN"))
            continue
        try:
            is_greedy = sampler.params.is_greedy
            token_id = greedy_ids[row] if is_greedy else sampler.sample(logits_RV[row], token_ids[row]())
            logprobs = _logprobs(logits_RV[row], token_id, sampler.params.logprobs)
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            results.append(error)
        else:
            results.append(SampledToken(token_id, logprobs))
    return results


def _logprobs(logits_V: torch.Tensor, token_id: int, num_logprobs: int | None) -> dict[int, float] | None:
    if num_logprobs is None:
        return None
    logprobs = torch.log_softmax(logits_V.float(), dim=-1)
    top = torch.topk(logprobs, min(num_logprobs, len(logprobs))) if num_logprobs else None
    result = {} if top is None else dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    result[token_id] = float(logprobs[token_id])
    return result
