"""Reads what callers pass as prompts, and refuses what cannot be served, before anything is queued."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from neo_compile.errors import CapacityError, ConfigError
from neo_compile.runtime.detokenizer import Tokenizer
from neo_compile.runtime.model_info import ModelInfo
from neo_compile.runtime.sampling_params import SamplingParams

Prompt = str | Sequence[int]


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, info: ModelInfo) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ConfigError: empty, no list of integers, a token id outside the vocabulary, a string without a tokenizer, or
            one that the tokenizer refuses.
        CapacityError: no room for a single output token in the model's context.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError("a string prompt needs a tokenizer: pass Engine(tokenizer=...) or token ids")
        try:
            prompt = tokenizer.encode(prompt)
        except Exception as error:  # the caller's tokenizer may raise anything
            raise ConfigError(f"the tokenizer cannot encode the prompt: {error!r}") from error
    try:
        token_ids = [operator.index(token_id) for token_id in _plain(prompt)]
    except TypeError as error:
        raise ConfigError(f"a prompt must be a string or a list of token ids (integers): {error}") from error
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


def _plain(values: Any) -> Any:
    """Arrays and tensors as lists of Python numbers; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single one (a string, or a list of ids) becomes a list of itself."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__iter__"):
        raise ConfigError(f"prompts must be a string, token ids, or a list of these, not {type(prompts).__name__}")
    single: list[int] = []
    several: list[Prompt] = []
    for item in _plain(prompts):
        if isinstance(item, Integral):
            single.append(int(item))
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
