"""What transformers itself offers for many requests with little memory, with the KV budget of our device cache.

    generate-batch   transformers' continuous batching (the manager behind `generate_batch`): paged cache, evicted
                     requests are computed again; its own offloading needs pinned memory, which only accelerators have
    waves            plain batched `generate()`, as many requests at a time as fit when padded to the longest

Both have all cores that neo's device and host have together, and every request gets its own number of output tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from neo_compile.errors import ConfigError, NeoError

Prompts = Sequence[Sequence[int]]
Rival = Callable[[Any, Prompts, Sequence[int], int], list[list[int]]]

_PAGE_TOKENS = 16
_MAX_BATCH_TOKENS = 2048
_NO_TOKEN = -1


def run_generate_batch(model: Any, prompts: Prompts, output_lens: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Greedy outputs, in the prompts' order.

    Raises:
        NeoError: psutil is missing, a request failed, or the manager stopped.
    """
    if importlib.util.find_spec("psutil") is None:
        raise NeoError("transformers' continuous batching on a CPU needs psutil: pip install 'neo-compile[bench]'")
    from transformers import ContinuousBatchingConfig, GenerationConfig

    batching = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS, num_blocks=budget_tokens // _PAGE_TOKENS, max_batch_tokens=_MAX_BATCH_TOKENS
    )
    longest = max(output_lens)
    sampling = GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0, max_new_tokens=longest)
    results: dict[str, Any] = {}
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:
        request_ids = [
            manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=_NO_TOKEN)
            for prompt, length in zip(prompts, output_lens, strict=True)
        ]
        while len(results) < len(request_ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None and not manager.is_running():
                raise NeoError(f"transformers' continuous batching stopped after {len(results)} requests")
    errors = [result.error for result in results.values() if result.error is not None]
    if errors:
        raise NeoError(f"{len(errors)} requests failed in transformers' continuous batching: {errors[0]}")
    return [list(results[request_id].generated_tokens) for request_id in request_ids]


def run_waves(model: Any, prompts: Prompts, output_lens: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Greedy outputs, in the prompts' order; longer outputs than asked for are cut, as a wave ends with its longest."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for wave in _waves(prompts, output_lens, budget_tokens):
        longest = max(len(prompts[index]) for index in wave)
        padded = [[0] * (longest - len(prompts[index])) + list(prompts[index]) for index in wave]
        mask = [[0] * (longest - len(prompts[index])) + [1] * len(prompts[index]) for index in wave]
        with torch.no_grad():
            result = model.generate(
                torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=max(output_lens[index] for index in wave),
                eos_token_id=None,
                pad_token_id=0,
            )
        for row, index in enumerate(wave):
            outputs[index] = result[row, longest : longest + output_lens[index]].tolist()
    return outputs


def _waves(prompts: Prompts, output_lens: Sequence[int], budget_tokens: int) -> Iterator[list[int]]:
    """Indices of each wave. Requests of similar output length go together, so that little is padded.

    Raises:
        ConfigError: a request that does not fit the budget alone.
    """

    def num_tokens(wave: Sequence[int]) -> int:
        longest = max(len(prompts[index]) for index in wave) + max(output_lens[index] for index in wave)
        return longest * len(wave)

    wave: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda index: (output_lens[index], len(prompts[index]))):
        if num_tokens([index]) > budget_tokens:
            raise ConfigError(f"a request of {num_tokens([index])} tokens does not fit the budget of {budget_tokens}")
        if wave and num_tokens([*wave, index]) > budget_tokens:
            yield wave
            wave = []
        wave.append(index)
    if wave:
        yield wave


RIVALS: dict[str, Rival] = {"generate-batch": run_generate_batch, "waves": run_waves}


@contextmanager
def all_cores(num_threads: int) -> Iterator[None]:
    """torch with this many threads, as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
