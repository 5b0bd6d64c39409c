"""Symmetric pipelining: every iteration is two sub-batches of the same mixture, as systems without offloading do it."""

from __future__ import annotations

from neo_compile.runtime.composition import Composition, Prices, load_of
from neo_compile.runtime.cost_model import CostModel
from neo_compile.runtime.decision import Work
from neo_compile.runtime.plan import Strategy, SubBatch


class SymmetricComposer:
    """A `Composer` that runs everything there is, every other request in each half."""

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model

    def compose(self, work: Work, prices: Prices) -> Composition:
        """All of `work` in two sub-batches; one if there is a single request."""
        prefills = (*work.device_prefills, *work.host_prefills)
        halves = [
            SubBatch(
                tuple(prefills[half::2]), tuple(work.device_decodes[1 - half :: 2]), tuple(work.host_decodes[half::2])
            )
            for half in (0, 1)
        ]
        sub_batches = tuple(half for half in halves if half.num_requests)
        if len(sub_batches) == 2:
            strategy = Strategy.PIPELINED
        else:
            strategy = Strategy.UNSPLIT if work.host_prefills or work.host_decodes else Strategy.DEVICE_ONLY
        loads = [load_of(sub_batch, self.cost_model, work.block_size) for sub_batch in sub_batches]
        predicted_ms = self.cost_model.iteration_ms(strategy, loads, work.num_swapped_blocks) if loads else 0.0
        return Composition(strategy, sub_batches, predicted_ms)
