"""At which points costs are measured: a few for an engine's first start, many for `neo profile`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The points to measure, and how often.

    Attributes:
        logit_rows: the first is 1, which the linear stage holds.
        prefill_starts: the first is 0.
    """

    linear_tokens: tuple[int, ...]
    logit_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    prefill_starts: tuple[int, ...]
    decode_requests: tuple[int, ...]
    decode_kv_tokens: tuple[int, ...]
    swap_blocks: tuple[int, ...]
    num_repeats: int


QUICK = Grid(
    linear_tokens=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512),
    logit_rows=(1, 16, 64),
    prefill_tokens=(16, 64, 128, 256, 512),
    prefill_starts=(0, 512),
    decode_requests=(1, 4, 16, 64),
    decode_kv_tokens=(64, 512, 4096, 16384),
    swap_blocks=(1, 16, 128),
    num_repeats=3,
)


def full_grid(max_num_batched_tokens: int, max_model_len: int) -> Grid:
    """A dense grid of small numbers, then powers of two to the limits of an iteration."""
    dense = (*range(1, 9), *range(10, 33, 2), *range(36, 65, 4), *range(72, 129, 8), 160, 192, 224, 256, 384)
    powers = [2**n for n in range(9, max_num_batched_tokens.bit_length())]
    longest = min(max_num_batched_tokens, max_model_len)
    starts = [start for start in (0, 128, 512, 1024, 2048) if start < max_model_len]
    return Grid(
        linear_tokens=tuple(
            sorted({min(n, max_num_batched_tokens) for n in (*dense, *powers, max_num_batched_tokens)})
        ),
        logit_rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        prefill_tokens=tuple(sorted({min(n, longest) for n in (1, 16, 32, 64, 128, 192, 256, 384, 512, 768, longest)})),
        prefill_starts=tuple(starts),
        decode_requests=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        decode_kv_tokens=(64, 256, 1024, 2048, 4096, 8192, 16384, 32768),
        swap_blocks=(1, 4, 16, 64, 256),
        num_repeats=7,
    )
