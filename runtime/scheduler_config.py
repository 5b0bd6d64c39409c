"""What a user can set about scheduling, and the policies that can be named."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from neo_compile.checks import (
    COUNT,
    NOT_NEGATIVE,
    NOT_NEGATIVE_INTEGER,
    Numbers,
    check_choice,
    check_choices,
    check_flags,
    check_numbers,
)
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
        check_choice("SchedulerConfig.policy", self.policy, tuple(POLICIES))
        check_choice("SchedulerConfig.full_cache", self.full_cache, FULL_CACHE_ANSWERS)
        check_flags(self, "chunked_prefill")
        check_numbers(self, COUNT, "max_num_seqs", "max_num_batched_tokens", "max_idle_iterations")
        check_numbers(self, NOT_NEGATIVE_INTEGER, "swap_cooldown")
        check_numbers(self, NOT_NEGATIVE, "prefill_pace", "prefill_price", "min_gain_margin")
        check_numbers(self, Numbers(above=0, at_most=1), "swap_in_threshold")
        self._check_strategies()

    def _check_strategies(self) -> None:
        policy = POLICIES[self.policy]
        if self.strategies is None:
            return
        valid = [strategy.value for strategy in policy.strategies]
        check_choices("SchedulerConfig.strategies", self.strategies, valid)
        if policy.computes_on_host and set(self.strategies) == {Strategy.DEVICE_ONLY.value}:
            raise ConfigError(
                f"SchedulerConfig.strategies={self.strategies!r} with policy {self.policy!r}: host requests "
                "could never decode; use policy 'device-only', or name one more strategy"
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
