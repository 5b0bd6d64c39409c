"""Reads what callers pass as prompts, and refuses what cannot be served, before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence

from neo_compile.errors import CapacityError, ConfigError
from neo_compile.runtime.detokenizer import Tokenizer
from neo_compile.runtime.model_info import ModelInfo
from neo_compile.runtime.sampling_params import SamplingParams

Prompt = str | Sequence[int]


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, info: ModelInfo) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ConfigError: empty, a token id outside the vocabulary, or a string without a tokenizer.
        CapacityError: no room for a single output token in the model's context.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError("a string prompt needs a tokenizer: pass Engine(tokenizer=...) or token ids")
        prompt = tokenizer.encode(prompt)
    token_ids = [int(token_id) for token_id in prompt]
    if not token_ids:
        raise ConfigError("the prompt is empty: at least one token is needed")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < info.vocab_size:
            raise ConfigError(f"token id {token_id} is outside the model's vocabulary of {info.vocab_size} tokens")
    if len(token_ids) >= info.max_model_len:
        raise CapacityError(
            f"the prompt has {len(token_ids)} tokens, but prompt and output must fit the model's context of "
            f"{info.max_model_len} tokens: shorten the prompt"
        )
    return token_ids


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single one (a string, or a list of ids) becomes a list of itself."""
    if isinstance(prompts, str):
        return [prompts]
    single: list[int] = []
    several: list[Prompt] = []
    for item in prompts:
        if isinstance(item, int):
            single.append(item)
        else:
            several.append(item)
    if single and several:
        raise ConfigError("prompts mix token ids with whole prompts: give one list of ids, or a list of prompts")
    return [single] if single else several


def as_params_list(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One `SamplingParams` for each prompt.

    Raises:
        ConfigError: a list of another length.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ConfigError(f"{len(params)} SamplingParams for {num_prompts} prompts: give one, or one each")
    return list(params)
