"""What the engine keeps with a request: sampling state, text, times. Hangs on `Request.payload`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from neo_compile.runtime.detokenizer import Detokenizer, Tokenizer
from neo_compile.runtime.outputs import RequestMetrics, RequestOutput
from neo_compile.runtime.request import FinishReason, Request
from neo_compile.runtime.sampler import SampledToken, TokenSampler
from neo_compile.runtime.sampling_params import SamplingParams


class Session:
    """One output of one prompt (`n` outputs are `n` sessions, each with a request of its own).

    Args:
        output_id: the id that the caller knows; `request.request_id` is the scheduler's.
        stop_token_ids: tokens that end the output, end-of-sequence tokens included.
    """

    def __init__(
        self,
        request: Request,
        output_id: str,
        index: int,
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request = request
        self.output_id = output_id
        self.index = index
        self.params = params
        self.sampler = TokenSampler(params, seed_offset=index)
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.error: str | None = None
        self.was_on_host = False
        self._stop_token_ids = stop_token_ids
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params.stop or ())
        self._logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []

    def append(self, token: SampledToken) -> FinishReason | None:
        """Take one sampled token; the reason why the output ends with it, if it does."""
        request = self.request
        request.output_token_ids.append(token.token_id)
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        if self._logprobs is not None:
            self._logprobs.append(token.logprobs or {})
        if token.token_id in self._stop_token_ids:
            return "stop"
        try:
            if self._detokenizer is not None and self._detokenizer.append(token.token_id):
                return "stop"
        except Exception as error:  # the caller's tokenizer may raise anything; others' requests go on
            self.error = f"the tokenizer failed: {error!r}"
            return "error"
        return "length" if len(request.output_token_ids) >= request.max_tokens else None

    def finish(self) -> None:
        """Note the end's time and complete the text."""
        self.finish_time = time.perf_counter()
        if self._detokenizer is not None and self.request.finish_reason not in ("stop", "error"):
            try:
                self._detokenizer.finish()
            except Exception as error:
                self.error = f"the tokenizer failed: {error!r}"

    def output(self) -> RequestOutput:
        """The output so far."""
        request = self.request
        return RequestOutput(
            request_id=self.output_id,
            index=self.index,
            prompt_token_ids=list(request.prompt_token_ids),
            token_ids=list(request.output_token_ids),
            text="" if self._detokenizer is None else self._detokenizer.text,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=request.finish_reason,
            error=self.error,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_token_time=self.first_token_time,
                finish_time=self.finish_time,
                num_swaps=request.num_swaps,
                num_preemptions=request.num_preemptions,
            ),
        )


def failed_output(request_id: str, prompt_token_ids: Sequence[int], error: str) -> RequestOutput:
    """The output of a prompt that was refused: no tokens, `finish_reason` "error"."""
    now = time.perf_counter()
    metrics = RequestMetrics(now, None, now, 0, 0)
    return RequestOutput(request_id, 0, list(prompt_token_ids), [], "", None, "error", error, metrics)
