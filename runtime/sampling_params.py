"""What a caller may ask of one request's sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

from neo_compile.checks import (
    ANY_INTEGER,
    COUNT,
    NOT_NEGATIVE,
    NOT_NEGATIVE_INTEGER,
    POSITIVE,
    Numbers,
    check_flags,
    check_numbers,
    field_name,
    refuse,
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request; names and meanings follow vLLM's.

    Attributes:
        max_tokens: the most output tokens.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p.
        min_p: drop tokens below min_p times the likeliest one's probability.
        repetition_penalty: 1 is none; prompt and output tokens count.
        stop: strings that end the output, which leaves them out.
        stop_token_ids: tokens that end the output, beside the model's end-of-sequence tokens.
        ignore_eos: go on after end-of-sequence tokens.
        seed: of this request's generator; the same seed gives the same tokens whatever else is served.
        n: outputs per prompt, each a request of its own.
        logprobs: report the log-probabilities of the sampled token and of this many likeliest ones.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self._as_tuple("stop", str, "a string or strings")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", self._as_tuple("stop_token_ids", Integral, "whole numbers"))
        if not all(stop):
            refuse("SamplingParams.stop", stop, "free of empty strings")
        check_flags(self, "ignore_eos")
        check_numbers(self, COUNT, "max_tokens", "n")
        check_numbers(self, Numbers(at_least=-1, is_whole=True), "top_k")  # -1 and 0: all tokens
        check_numbers(self, NOT_NEGATIVE_INTEGER, "logprobs", or_none=True)
        check_numbers(self, ANY_INTEGER, "seed", or_none=True)
        check_numbers(self, NOT_NEGATIVE, "temperature")
        if 0 < self.temperature < 1e-6:
            refuse("SamplingParams.temperature", self.temperature, "0 (greedy) or at least 1e-6")
        check_numbers(self, Numbers(above=0, at_most=1), "top_p")
        check_numbers(self, Numbers(at_least=0, at_most=1), "min_p")
        check_numbers(self, POSITIVE, "repetition_penalty")
        if self.seed is not None and not -(2**63) <= int(self.seed) <= 2**63 - int(self.n):
            refuse("SamplingParams.seed", self.seed, "within 64 bits")

    def _as_tuple(self, name: str, kind: type, rule: str) -> tuple[object, ...]:
        """A field's values; none for None. A wrong type would only fail while other requests are served."""
        values = getattr(self, name)
        if values is None:
            return ()
        if not isinstance(values, Iterable):
            refuse(field_name(self, name), values, rule)
        values = tuple(values)
        if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
            refuse(field_name(self, name), values, rule)
        return values

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the plain argmax of the logits."""
        return self.temperature == 0 and self.repetition_penalty == 1.0
