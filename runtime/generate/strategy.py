"""How a decode iteration with rows on the host runs: as one batch or as two that are pipelined, by the cost model.

Every row advances in every iteration of `generate`, so unlike the scheduler there is nothing to choose but the split:
all host rows, in one sub-batch or divided so that both sides' host attention is exposed alike. Times come from the same
formulas as the scheduler's (`CostModel.iteration_ms`, `HostDecodes.split_evenly_loaded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neo_compile.runtime.cost_model import CostModel, SubBatchLoad
from neo_compile.runtime.executor import IterationTimes
from neo_compile.runtime.generate.rows import Int32s
from neo_compile.runtime.hiding import HostDecodes
from neo_compile.runtime.plan import Strategy


@dataclass(frozen=True, slots=True)
class Split:
    """The first `num_batch_1` host rows form batch-1; everything else is batch-0 (or the only batch).

    Attributes:
        predicted_ms: 0 where nothing was predicted.
    """

    strategy: Strategy
    num_batch_1: int = 0
    loads: tuple[SubBatchLoad, ...] = ()
    predicted_ms: float = 0.0


def choose_split(
    device_lens: Int32s, host_lens: Int32s, cost_model: CostModel | None, strategies: Sequence[Strategy]
) -> Split:
    """The split with the shortest predicted time.

    Args:
        device_lens, host_lens: context lengths of the rows of each tier, the new token included.
        strategies: what the policy allows; DEVICE_ONLY is what rows without host rows run as.
    """
    if not len(host_lens) or cost_model is None:
        return Split(Strategy.UNSPLIT if len(host_lens) else Strategy.DEVICE_ONLY)
    base = SubBatchLoad(
        num_tokens=len(device_lens),
        num_device_decodes=len(device_lens),
        device_kv_tokens=int(device_lens.sum()),
        num_logits=len(device_lens),
    )
    host = HostDecodes((host_lens - 1).tolist(), cost_model)
    splits = [(Strategy.UNSPLIT, 0)] if Strategy.UNSPLIT in strategies else []
    if Strategy.PIPELINED in strategies:
        num_batch_1, num_batch_0 = host.split_evenly_loaded(base, len(host_lens))
        if len(device_lens) + num_batch_0:
            splits.append((Strategy.PIPELINED, num_batch_1))
    # A lone row cannot be pipelined, whatever the policy.
    candidates = [_evaluate(*split, base, host, len(host_lens)) for split in splits or [(Strategy.UNSPLIT, 0)]]
    return min(candidates, key=lambda split: split.predicted_ms)


def observe(split: Split, times: IterationTimes, cost_model: CostModel | None) -> None:
    """Correct the cost model by what an iteration took."""
    if cost_model is not None and split.loads:
        predicted = cost_model.predict_parts(split.loads)
        for part, part_ms in times.parts().items():
            cost_model.observe_part(part, predicted[part], part_ms)
        explained_ms = cost_model.iteration_ms(split.strategy, split.loads)
        # Sampling is predicted, but Hugging Face's business: it is not in the times.
        measured_ms = times.total_ms + predicted["sampling"]
        cost_model.observe(split.strategy, split.predicted_ms, measured_ms, explained_ms)


def _evaluate(strategy: Strategy, num_batch_1: int, base: SubBatchLoad, host: HostDecodes, num: int) -> Split:
    num_batch_0 = num - num_batch_1
    loads = [
        base._replace(
            num_tokens=base.num_tokens + num_batch_0,
            num_logits=base.num_logits + num_batch_0,
            num_host_decodes=num_batch_0,
            host_kv_tokens=host.kv_tokens(num_batch_1, num),
        )
    ]
    if num_batch_1:
        kv_tokens = host.kv_tokens(0, num_batch_1)
        load = SubBatchLoad(num_batch_1, num_host_decodes=num_batch_1, host_kv_tokens=kv_tokens, num_logits=num_batch_1)
        loads.append(load)
    return Split(strategy, num_batch_1, tuple(loads), host.cost_model.iteration_ms(strategy, loads))
