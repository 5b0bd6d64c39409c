"""Steps 4 to 6 of a decision: how to compose an iteration from the work at hand.

Every candidate is worth the milliseconds that the same work would take without offloading (a decode at the full device
cache's rate, a prefill by itself), so worth / time is the speed-up over device-only that the iteration achieves. This
is the paper's x / T with prices: with bare counts a prefill is one request among many cheap decodes, is put off until
the host cache is empty, and then there is nothing left to pipeline.

Times are linear in the number of host decodes once they are no longer hidden, and so is the worth, so the best number
is at an end of that range: all that hide, or all there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neo_compile.runtime.composition import NUM_COMPUTED, Composition, Prices, kv_tokens_of
from neo_compile.runtime.cost_model import CostModel, SubBatchLoad
from neo_compile.runtime.decision import Work
from neo_compile.runtime.hiding import HostDecodes
from neo_compile.runtime.plan import ScheduledPrefill, Strategy, SubBatch
from neo_compile.runtime.scheduler_config import SchedulerConfig

_MAX_LEARNT_MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compose the iteration.

    `host_decodes[:num_batch_1]` go to batch-1 and the next `num_batch_0` to batch-0 (or to the only sub-batch).
    """

    strategy: Strategy
    num_host_prefills: int
    num_batch_1: int
    num_batch_0: int
    predicted_ms: float
    score: float


class GreedyComposer:
    """A `Composer` that takes the candidate with the most worth / time."""

    def __init__(self, cost_model: CostModel, config: SchedulerConfig) -> None:
        self.cost_model = cost_model
        self.config = config

    def compose(self, work: Work, prices: Prices) -> Composition:
        """The best way to run `work`: the device-only plan unless another is better by a margin."""
        choice = _Choice(work, self.cost_model, prices, self.config)
        return choice.choose(choice.place_host_decodes(choice.trim_host_prefills()))


class _Choice:
    """Candidates for one `Work`, and the best of them."""

    def __init__(self, work: Work, cost_model: CostModel, prices: Prices, config: SchedulerConfig) -> None:
        self.work = work
        self.cost_model = cost_model
        self.prices = prices
        self.config = config
        self.strategies = config.allowed_strategies
        self._host = HostDecodes(map(NUM_COMPUTED, work.host_decodes), cost_model)
        self._base = self._base_loads()
        self._worth = self._base_worth()

    def place_host_decodes(self, prefill_counts: Sequence[int]) -> list[Candidate]:
        """Step 4: for each number of host-bound prefills, as many host decodes as hide, and all of them."""
        return [candidate for num_prefills in prefill_counts for candidate in self._place(num_prefills)]

    def _place(self, num_prefills: int) -> list[Candidate]:
        base = self._base[num_prefills]
        num_decodes = self._num_decodes_in_budget(num_prefills)
        candidates = []
        if Strategy.UNSPLIT in self.strategies:
            hidden = self._host.num_hidden_unsplit(base, num_decodes)
            for num in {max(hidden, self.work.num_overdue_decodes), num_decodes}:
                candidates.append(self._evaluate_unsplit(num_prefills, num))
        if Strategy.PIPELINED in self.strategies:
            splits = [self._host.split_evenly_loaded(base, num_decodes)]
            hidden_split = self._host.fill_slack(base, num_decodes)
            if sum(hidden_split) >= self.work.num_overdue_decodes:
                splits.append(hidden_split)
            for num_batch_1, num_batch_0 in set(splits):
                if num_batch_1 and base.num_tokens + num_batch_0:
                    candidates.append(self._evaluate(Strategy.PIPELINED, num_prefills, num_batch_1, num_batch_0))
        return candidates

    def trim_host_prefills(self) -> list[int]:
        """Step 5: how many host-bound prefills to look at: all, the fewest that hide every host decode, the least.

        Budgets are taken anew for each number, so tokens of dropped prefills go to host decodes.
        """
        most, least = len(self.work.host_prefills), self.work.num_overdue_prefills
        if most == least:
            return [most]
        numbers = {most, least}
        if Strategy.PIPELINED in self.strategies and self.work.host_decodes:
            low, high = least, most
            while low < high:
                middle = (low + high) // 2
                limit = self._num_decodes_in_budget(middle)
                if sum(self._host.fill_slack(self._base[middle], limit)) == limit:
                    high = middle
                else:
                    low = middle + 1
            numbers.add(low)
        return sorted(numbers, reverse=True)

    def choose(self, candidates: Sequence[Candidate]) -> Composition:
        """Step 6: the most worth / time; the device-only plan unless another is better by a margin."""
        best: Candidate | None = None
        if self._may_leave_host_alone():
            best = self._evaluate(Strategy.DEVICE_ONLY, 0, 0, 0)
        device_only_score = best.score if best else 0.0
        for candidate in candidates:
            bar = device_only_score * (1.0 + self._margin(candidate.strategy))
            if candidate.score > bar and (best is None or candidate.score > best.score):
                best = candidate
        if best is None:  # no allowed strategy can run what there is (a lone request cannot be split)
            num_prefills = len(self.work.host_prefills)
            best = self._evaluate_unsplit(num_prefills, self._num_decodes_in_budget(num_prefills))
        sub_batches = self._sub_batches(best)
        return Composition(best.strategy, sub_batches, best.predicted_ms if sub_batches else 0.0)

    def _evaluate_unsplit(self, num_prefills: int, num_decodes: int) -> Candidate:
        """One sub-batch; without anything on the host it is the device-only plan, and is called so."""
        strategy = Strategy.UNSPLIT if num_prefills or num_decodes else Strategy.DEVICE_ONLY
        return self._evaluate(strategy, num_prefills, 0, num_decodes)

    def _sub_batches(self, candidate: Candidate) -> tuple[SubBatch, ...]:
        work = self.work
        first = candidate.num_batch_1
        batch_0 = SubBatch(
            (*work.device_prefills, *work.host_prefills[: candidate.num_host_prefills]),
            tuple(work.device_decodes),
            tuple(work.host_decodes[first : first + candidate.num_batch_0]),
        )
        if candidate.strategy is not Strategy.PIPELINED:
            return (batch_0,) if batch_0.num_requests else ()
        return batch_0, SubBatch(host_decodes=tuple(work.host_decodes[:first]))

    def _may_leave_host_alone(self) -> bool:
        work = self.work
        has_device_work = bool(work.device_prefills or work.device_decodes)
        is_overdue = bool(work.num_overdue_prefills or work.num_overdue_decodes)
        return Strategy.DEVICE_ONLY in self.strategies and has_device_work and not is_overdue

    def _margin(self, strategy: Strategy) -> float:
        return max(self.config.min_gain_margin, min(self.cost_model.prediction_error[strategy], _MAX_LEARNT_MARGIN))

    def _evaluate(self, strategy: Strategy, num_prefills: int, num_batch_1: int, num_batch_0: int) -> Candidate:
        num = num_batch_1 + num_batch_0
        batch_0 = self._base[num_prefills]
        if num_batch_0:
            batch_0 = batch_0._replace(
                num_tokens=batch_0.num_tokens + num_batch_0,
                num_host_decodes=num_batch_0,
                num_logits=batch_0.num_logits + num_batch_0,
                host_kv_tokens=self._host.kv_tokens(num_batch_1, num),
            )
        loads = [batch_0]
        if strategy is Strategy.PIPELINED:
            kv_tokens = self._host.kv_tokens(0, num_batch_1)
            loads.append(
                SubBatchLoad(
                    num_batch_1, num_host_decodes=num_batch_1, host_kv_tokens=kv_tokens, num_logits=num_batch_1
                )
            )
        predicted_ms = self.cost_model.iteration_ms(strategy, loads, self.work.num_swapped_blocks)
        worth = self._worth[num_prefills] + num * self.prices.decode_ms
        return Candidate(
            strategy, num_prefills, num_batch_1, num_batch_0, predicted_ms, worth / max(predicted_ms, 1e-9)
        )

    def _base_loads(self) -> list[SubBatchLoad]:
        """Loads of batch-0 without host decodes, by the number of host-bound prefills."""
        work = self.work
        attention_ms = self.cost_model.prefill_attention_ms
        load = SubBatchLoad(
            num_tokens=sum(prefill.num_tokens for prefill in work.device_prefills) + len(work.device_decodes),
            prefill_attention_ms=attention_ms((p.start, p.num_tokens) for p in work.device_prefills),
            num_device_decodes=len(work.device_decodes),
            device_kv_tokens=kv_tokens_of(work.device_decodes),
            num_logits=sum(prefill.samples for prefill in work.device_prefills) + len(work.device_decodes),
        )
        loads = [load]
        for prefill in work.host_prefills:
            load = load._replace(
                num_tokens=load.num_tokens + prefill.num_tokens,
                prefill_attention_ms=load.prefill_attention_ms + attention_ms([(prefill.start, prefill.num_tokens)]),
                leaving_blocks=load.leaving_blocks - (-prefill.num_tokens // work.block_size),
                num_logits=load.num_logits + prefill.samples,
            )
            loads.append(load)
        return loads

    def _base_worth(self) -> list[float]:
        """Worth of what is in `_base`, in the same order."""
        work, prices = self.work, self.prices
        worth = len(work.device_decodes) * prices.decode_ms
        worth += sum(self._prefill_worth(prefill) for prefill in work.device_prefills)
        worths = [worth]
        for prefill in work.host_prefills:
            worth += self._prefill_worth(prefill) * prices.host_prefill_factor
            worths.append(worth)
        return worths

    def _prefill_worth(self, prefill: ScheduledPrefill) -> float:
        attention_ms = self.cost_model.prefill_attention_ms([(prefill.start, prefill.num_tokens)])
        return prefill.num_tokens * self.prices.prefill_ms_per_token + self.cost_model.num_layers * attention_ms

    def _num_decodes_in_budget(self, num_prefills: int) -> int:
        return min(len(self.work.host_decodes), self.work.max_tokens - self._base[num_prefills].num_tokens)
