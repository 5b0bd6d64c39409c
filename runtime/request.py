"""A request: its tokens, where its KV cache is, and how far it has come.

A request owns its tokens; the scheduler is the only writer of everything else. Legend: KV "computed" means that the
keys and values of a token are in the cache, so a decoding request always has exactly one token (the newest) whose KV is
not computed yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "cache_full", "error"]


class Tier(Enum):
    """Where a request's KV cache is; a request is wholly in one tier."""

    DEVICE = "device"
    HOST = "host"

    @property
    def other(self) -> Tier:
        return Tier.HOST if self is Tier.DEVICE else Tier.DEVICE


class RequestStatus(Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks in `Request.tier`
    FINISHED = "finished"  # holds no blocks; `finish_reason` is set


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. Compared and hashed by identity.

    Attributes:
        max_tokens: the most output tokens to generate; at least 1.
        num_computed_tokens: tokens of `all_token_ids` whose KV is in the cache.
        block_ids: block table in `tier`'s pool; empty unless RUNNING.
        payload: whatever the engine keeps with the request; the scheduler never looks.
        sequence_number: order of arrival; the highest is the newest.
        last_advanced: iteration in which it last advanced, or since which it waits by choice; -1 while it cannot run.
        swapped_at: iteration of its last swap.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    arrival_time: float = 0.0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    tier: Tier | None = None
    block_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_swaps: int = 0
    num_preemptions: int = 0
    payload: object = None
    sequence_number: int = -1
    last_advanced: int = -1
    swapped_at: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id!r}: the prompt is empty; at least one token is needed")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.request_id!r}: max_tokens={self.max_tokens}, must be at least 1")

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and outputs in one list (a copy)."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token still has to be computed.

        After a preemption the outputs so far are recomputed with the prompt, by the same prefill.
        """
        num_outputs = len(self.output_token_ids)
        return not num_outputs or self.num_computed_tokens < len(self.prompt_token_ids) + num_outputs - 1

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
