"""What a caller may ask of one request's sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from neo_compile.errors import ConfigError


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
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_types()
        self._check("max_tokens", self.max_tokens >= 1, "at least 1")
        self._check("temperature", self.temperature == 0 or self.temperature >= 1e-6, "0 (greedy) or at least 1e-6")
        self._check("top_k", self.top_k >= -1, "-1 or 0 (all tokens) or positive")
        self._check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._check("repetition_penalty", self.repetition_penalty > 0, "positive")
        self._check("n", self.n >= 1, "at least 1")
        self._check("seed", self.seed is None or -(2**63) <= self.seed <= 2**63 - self.n, "within 64 bits")
        self._check("logprobs", self.logprobs is None or self.logprobs >= 0, "None or not negative")
        self._check("stop", all(self.stop), "free of empty strings")

    def _check_types(self) -> None:
        """A wrong type would only fail while other requests are served."""
        for name in ("max_tokens", "top_k", "n"):
            self._check(name, _is_int(getattr(self, name)), "an integer")
        for name in ("seed", "logprobs"):
            self._check(name, getattr(self, name) is None or _is_int(getattr(self, name)), "None or an integer")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            self._check(name, isinstance(getattr(self, name), Real), "a number")
        self._check("stop", all(isinstance(text, str) for text in self.stop), "a string or strings")
        self._check("stop_token_ids", all(map(_is_int, self.stop_token_ids)), "integers")

    def _check(self, name: str, is_valid: bool, rule: str) -> None:
        if not is_valid:
            raise ConfigError(f"SamplingParams.{name} is {getattr(self, name)!r}, but must be {rule}")

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the plain argmax of the logits."""
        return self.temperature == 0 and self.repetition_penalty == 1.0


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
