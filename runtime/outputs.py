"""What the engine hands back."""

from __future__ import annotations

from dataclasses import dataclass

from neo_compile.runtime.request import FinishReason


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, seconds on the clock of `time.perf_counter`, and how often it moved."""

    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    num_swaps: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of one request so far (cumulative).

    Attributes:
        request_id: the id given to, or by, `add_request`.
        index: which of the prompt's `n` outputs this is.
        text: the output's text; empty without a tokenizer.
        logprobs: per output token, {token id: log-probability}, when asked for.
        finish_reason: `None` while it goes on; "stop" (end-of-sequence token or stop string), "length", "abort",
            "cache_full" (it outgrew both tiers) or "error" (see `error`).
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, float]] | None
    finish_reason: FinishReason | None
    error: str | None
    metrics: RequestMetrics

    @property
    def is_finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None
