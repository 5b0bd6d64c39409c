"""What a user can set about scheduling, and the policies that can be named."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from neo_compile.errors import ConfigError
from neo_compile.runtime.plan import Strategy
from neo_compile.runtime.request import Tier

FULL_CACHE_ANSWERS = ("swap", "recompute", "reserve")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a scheduler may do; every policy goes through the same six steps.

    Attributes:
        prefill_tiers: where a new request's KV may go, best first.
        strategies: which kinds of iteration may be chosen.
        computes_on_host: host requests decode; otherwise the host tier only keeps them until they come back.
        splits_evenly: every iteration is two sub-batches of the same mixture (symmetric pipelining).
    """

    name: str
    prefill_tiers: tuple[Tier, ...]
    strategies: tuple[Strategy, ...]
    computes_on_host: bool = True
    splits_evenly: bool = False


_ALL = (Strategy.DEVICE_ONLY, Strategy.UNSPLIT, Strategy.PIPELINED)
POLICIES = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy(name="neo", prefill_tiers=(Tier.DEVICE, Tier.HOST), strategies=_ALL),
            Policy(
                name="device-only",
                prefill_tiers=(Tier.DEVICE,),
                strategies=(Strategy.DEVICE_ONLY,),
                computes_on_host=False,
            ),
            Policy(name="host-only", prefill_tiers=(Tier.HOST,), strategies=(Strategy.UNSPLIT, Strategy.PIPELINED)),
            Policy(
                name="symmetric",
                prefill_tiers=(Tier.DEVICE, Tier.HOST),
                strategies=(Strategy.UNSPLIT, Strategy.PIPELINED),
                splits_evenly=True,
            ),
        )
    }
)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Scheduling options.

    Attributes:
        policy: "neo", "device-only", "host-only" (all KV and decode attention on the host) or "symmetric".
        max_num_seqs: the most requests that hold KV at a time, both tiers together.
        max_num_batched_tokens: the most tokens of one iteration, both sub-batches together.
        chunked_prefill: split a prompt to fill the rest of the token budget. When off, a prompt is split only if it
            is longer than the whole budget.
        full_cache: device-only's answer to a full device cache: "swap" to the host and wait there, "recompute"
            (preempt the newest), or "reserve" (admit a request only if prompt + max_tokens fit).
        strategies: restricts the policy's strategies, e.g. ("device-only", "pipelined") for the paper's choice.
        prefill_pace: while requests decode, an iteration's prefills take at most this many times the linear stage of
            one token, or as long as they need to hide all host attention.
        prefill_price: how much more a host-bound prefill is worth when the host cache is empty (0: never more); up to
            eight times that while host attention hides under the linear stages of the decodes alone.
        max_idle_iterations: an admitted request is never left out of more iterations in a row than this.
        swap_cooldown: iterations a swapped-out request stays out at least; doubles with every swap of the request.
        swap_in_threshold: swap in only while at most this share of the device blocks is taken.
        min_gain_margin: a plan that uses the host must promise at least this much more than the device-only plan.
    """

    policy: str = "neo"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    full_cache: str = "swap"
    strategies: tuple[str, ...] | None = None
    prefill_pace: float = 8.0
    prefill_price: float = 2.0
    max_idle_iterations: int = 512
    swap_cooldown: int = 16
    swap_in_threshold: float = 0.95
    min_gain_margin: float = 0.0

    def __post_init__(self) -> None:
        _check_choice("policy", self.policy, tuple(POLICIES))
        _check_choice("full_cache", self.full_cache, FULL_CACHE_ANSWERS)
        self._check_strategies()
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_idle_iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}, must be at least 1")
        for name in ("prefill_pace", "prefill_price", "swap_cooldown", "min_gain_margin"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}, must not be negative")
        if not 0.0 < self.swap_in_threshold <= 1.0:
            raise ConfigError(f"swap_in_threshold={self.swap_in_threshold}, must be in (0, 1]")

    def _check_strategies(self) -> None:
        policy = POLICIES[self.policy]
        if self.strategies is None:
            return
        if not self.strategies:
            raise ConfigError("strategies=(), must name at least one strategy")
        for name in self.strategies:
            _check_choice("strategies", name, tuple(strategy.value for strategy in policy.strategies))
        if policy.computes_on_host and set(self.strategies) == {Strategy.DEVICE_ONLY.value}:
            raise ConfigError(
                f"strategies={self.strategies!r} with policy {self.policy!r}: host requests could never decode; "
                "use policy 'device-only', or name one more strategy"
            )

    @property
    def max_running(self) -> int:
        """Requests that may hold KV at a time: an iteration can then always hold one token of each."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def allowed_strategies(self) -> tuple[Strategy, ...]:
        allowed = POLICIES[self.policy].strategies
        if self.strategies is None:
            return allowed
        return tuple(strategy for strategy in allowed if strategy.value in self.strategies)


def _check_choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(repr, valid))}")
