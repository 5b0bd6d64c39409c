"""A device on which everything happens as late, and in as strange an order, as its tickets allow. For tests.

    submit A, submit B, submit C      wait(B)               a real device: A, B, C run some time after their submission
         |  poison A's, B's, C's outputs  |
         |                (C) B           | B's results appear; A and C may still be outstanding

Work that nobody waits for is not done until something forces it, its outputs are NaN meanwhile, and independent
submissions run in a random order. So what reads a result, or overwrites an operand, without having waited for the right
ticket computes NaN. It is all done by the calling thread at moments drawn from a seeded generator: a failure repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from random import Random
from typing import Any

import numpy as np
import torch

from neo_compile._host_checks import IntArray
from neo_compile.host_attention import AttentionPlan, BlockPairs, LayerCache, TokenRows
from neo_compile.runtime.device.base import Device, Ticket, Workers

_RUN_AT_ONCE_SHARE = 0.2  # submissions that run at once: early is as legal as late
_RUN_OTHERS_SHARE = 0.3  # chance that other work gets its turn at any call


class AdversarialDevice:
    """`inner` with its work delayed and reordered, and freed blocks poisoned.

    Args:
        inner: does the work.
        seed: of the generator that decides what runs when.
    """

    kind = "adversarial"
    default_staging_blocks = 4
    poisons_freed_blocks = True

    def __init__(self, inner: Device, seed: int) -> None:
        random = Random(seed)
        self._inner = inner
        self.torch_device = inner.torch_device
        self.device_threads, self.host_threads = inner.device_threads, inner.host_threads
        self.swap_gbps, self.host_slowdown = inner.swap_gbps, inner.host_slowdown
        self.attention_pool: Workers = DelayingWorkers(inner.attention_pool, random)
        self.host_pool: Workers = DelayingWorkers(inner.host_pool, random)

    def launching(self) -> AbstractContextManager[None]:
        """As `inner`."""
        return self._inner.launching()

    def close(self) -> None:
        """Drop outstanding work and close `inner`."""
        self._inner.close()


class DelayedTicket:
    """Work of `DelayingWorkers`: runs at the latest when it is waited for."""

    def __init__(self, workers: DelayingWorkers, submit: Callable[[], Ticket]) -> None:
        self._workers, self._submit = workers, submit
        self._done: Ticket | None = None

    def run(self) -> None:
        """Do the work now, by the inner workers."""
        assert self._done is None, "work run twice"
        self._done = self._submit()
        self._done.wait()

    @property
    def is_outstanding(self) -> bool:
        """Whether it has not run yet."""
        return self._done is None

    @property
    def start_ns(self) -> int:
        """When it began. RuntimeError while it is outstanding."""
        return self._finished().start_ns

    @property
    def end_ns(self) -> int:
        """When it ended. RuntimeError while it is outstanding."""
        return self._finished().end_ns

    def wait(self) -> None:
        """Have it done, after a random part of what else is outstanding."""
        self._workers.force(self)

    def _finished(self) -> Ticket:
        if self._done is None:
            raise RuntimeError("the times of work are known once it has been waited for")
        return self._done


class DelayingWorkers:
    """Workers whose submissions run at random later moments, in random order, or when they are waited for."""

    def __init__(self, inner: Workers, random: Random) -> None:
        self._inner, self._random = inner, random
        self._outstanding: list[DelayedTicket] = []

    @property
    def parallelism(self) -> int:
        """As the inner workers."""
        return self._inner.parallelism

    @property
    def num_outstanding(self) -> int:
        """Submissions that have not run yet."""
        return len(self._outstanding)

    def submit_layer(
        self, plan: AttentionPlan, layer: LayerCache, q: torch.Tensor, out: torch.Tensor, **options: Any
    ) -> Ticket:
        """Decode attention, some time; `out` is NaN until then."""
        out.fill_(float("nan"))
        return self._submit(lambda: self._inner.submit_layer(plan, layer, q, out, **options))

    def submit_rows(
        self, plan: AttentionPlan, layer: LayerCache, rows: TokenRows, first_row: int, **options: Any
    ) -> Ticket:
        """As `submit_layer`."""
        rows.out[first_row : first_row + plan.num_tokens].fill_(float("nan"))
        return self._submit(lambda: self._inner.submit_rows(plan, layer, rows, first_row, **options))

    def submit_copy(
        self, src: torch.Tensor, dst: torch.Tensor, pairs: IntArray | BlockPairs, max_gbps: float | None = None
    ) -> Ticket:
        """Block copies, some time; the target blocks are NaN until then."""
        if len(pairs):
            array = pairs.array if isinstance(pairs, BlockPairs) else np.asarray(pairs)
            dst[array[:, 1].tolist()] = float("nan")
        return self._submit(lambda: self._inner.submit_copy(src, dst, pairs, max_gbps))

    def submit_first_touch(self, buffer: torch.Tensor) -> Ticket:
        """Placement, some time."""
        return self._submit(lambda: self._inner.submit_first_touch(buffer))

    def close(self) -> None:
        """Drop what is outstanding: nobody has waited for it."""
        self._outstanding.clear()
        self._inner.close()

    def force(self, ticket: DelayedTicket) -> None:
        """Run `ticket`, unless it has run."""
        self._run_some()
        if ticket.is_outstanding:
            self._outstanding.remove(ticket)
            ticket.run()

    def _submit(self, submit: Callable[[], Ticket]) -> Ticket:
        self._run_some()
        ticket = DelayedTicket(self, submit)
        if self._random.random() < _RUN_AT_ONCE_SHARE:
            ticket.run()
        else:
            self._outstanding.append(ticket)
        return ticket

    def _run_some(self) -> None:
        """Now and then some outstanding work gets its turn, in any order."""
        while self._outstanding and self._random.random() < _RUN_OTHERS_SHARE:
            self._outstanding.pop(self._random.randrange(len(self._outstanding))).run()
