"""What the memory gives at best: a sequential read by the same number of threads, in the same run.

Decode attention reads every key and value once, so this rate is its ceiling, and the share of it that a kernel reaches
says how much is left to gain. The buffer is far larger than the last-level cache and lies on huge pages where the
system grants them (with 4 KiB pages a read is up to a quarter slower); passes follow each other without a pause, as
a machine that idled for some seconds starts slowly. A core that reads in one place only does not get all there is, and
one that reads in many places loses some again: the best number of streams a thread counts.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from neo_compile.host_attention import WorkerPool

HUGE_PAGE_BYTES = 2 * 2**20
DEFAULT_CACHE_BYTES = 64 * 2**20
STREAM_COUNTS = (1, 2, 4, 8)


def last_level_cache_bytes() -> int:
    """Size of the largest cache of CPU 0, 64 MiB where the system does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes, default=DEFAULT_CACHE_BYTES)


def huge_page_buffer(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], aligned to 2 MiB, on huge pages where the system grants them; its content is zero."""
    import torch

    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES)  # the tensor keeps it alive
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -buffer.data_ptr() % HUGE_PAGE_BYTES
    return buffer[offset : offset + num_bytes]


class BandwidthMeter:
    """Reads a buffer with each number of streams; the best pass counts.

    Args:
        pool: the threads that read; it must have as many as the kernels that are measured.
        num_bytes: of the buffer, far above the last-level cache.

    Attributes:
        gbps: the best rate of all passes so far, in GB/s.
        streams: the number of streams a thread that gave it; 0 before the first `measure`.
    """

    def __init__(self, pool: WorkerPool, num_bytes: int) -> None:
        self._pool = pool
        self._buffer = huge_page_buffer(num_bytes).fill_(1)
        self.gbps = 0.0
        self.streams = 0

    def read(self) -> dict[int, float]:
        """Read the buffer once with each number of streams: GB/s by that number."""
        rates = {}
        for streams in STREAM_COUNTS:
            ticket = self._pool.submit_read(self._buffer, streams)
            ticket.wait()
            rates[streams] = gbps = self._buffer.numel() / (ticket.end_ns - ticket.start_ns)
            if gbps > self.gbps:
                self.gbps, self.streams = gbps, streams
        return rates

    def measure(self, passes: int) -> float:
        """The best GB/s of `passes` reads with each number of streams."""
        return max(max(self.read().values()) for _ in range(passes))
