"""What an enabled model has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GenerateStats:
    """Counters of one enabled model.

    Attributes:
        num_forwards: calls of the model.
        num_served: of those, run on the captured model; the others fell back.
        num_prefills: served forwards with several tokens in a row, or padding.
        num_device_only, num_unsplit, num_pipelined: served forwards with one token a row, by how they ran (no row on
            the host; rows in both tiers as one batch; as two).
        num_host_row_decodes: rows decoded on the host, summed over forwards.
        num_swaps: rows moved between the tiers.
        num_adopted: dense caches that were copied into blocks.
        num_densified: caches that were copied back into a dense form.
        num_captures: how often the model was captured.
        fallbacks: forwards that ran as they do without neo, by reason.
        device_blocks, host_blocks, block_size: sizes of the tiers; 0 before the model was captured.
        device_blocks_taken, host_blocks_taken: blocks that live caches hold now.
    """

    num_forwards: int = 0
    num_served: int = 0
    num_prefills: int = 0
    num_device_only: int = 0
    num_unsplit: int = 0
    num_pipelined: int = 0
    num_host_row_decodes: int = 0
    num_swaps: int = 0
    num_adopted: int = 0
    num_densified: int = 0
    num_captures: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    device_blocks: int = 0
    host_blocks: int = 0
    block_size: int = 0
    device_blocks_taken: int = 0
    host_blocks_taken: int = 0

    @property
    def num_fallbacks(self) -> int:
        """Forwards that were not served."""
        return sum(self.fallbacks.values())
