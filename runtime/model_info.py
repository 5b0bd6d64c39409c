"""What the engine must know of a Hugging Face model beside its attention sites."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, cast

import torch

from neo_compile.errors import ConfigError, UnsupportedModelError
from neo_compile.runtime.kv_cache import CACHE_DTYPES


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a model.

    Attributes:
        dtype: of its parameters.
        vocab_size: rows of the embedding; token ids must be below it.
        max_model_len: the longest context, prompt and output, in tokens.
        eos_token_ids: tokens that end an output.
        fingerprint: names the architecture and its sizes; cost tables are kept under it.
    """

    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    fingerprint: str

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelInfo:
        """Read `model`.

        Raises:
            UnsupportedModelError: not a Hugging Face causal language model.
            ConfigError: a dtype or a device that cannot be served.
        """
        config: Any = getattr(model, "config", None)
        if config is None or not hasattr(model, "get_input_embeddings"):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not a Hugging Face causal language model: "
                "the engine needs its config and embeddings (torch.compile(model, backend='neo') takes any module)"
            )
        parameters = list(model.parameters())
        devices = {parameter.device.type for parameter in parameters}
        if devices != {"cpu"}:
            raise ConfigError(f"the model is on {', '.join(sorted(devices))}: move it to the CPU with model.to('cpu')")
        embedding: torch.Tensor = cast(Any, model).get_input_embeddings().weight
        dtype = embedding.dtype
        if dtype not in CACHE_DTYPES:
            names = ", ".join(str(known) for known in CACHE_DTYPES)
            raise ConfigError(f"the model's dtype is {dtype}, but must be one of {names}: use model.to(dtype)")
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        return cls(
            dtype=dtype,
            vocab_size=embedding.shape[0],
            max_model_len=int(getattr(text_config, "max_position_embeddings", None) or 2**31 - 1),
            eos_token_ids=_eos_token_ids(model, text_config),
            fingerprint=_fingerprint(model),
        )


def _eos_token_ids(model: torch.nn.Module, text_config: Any) -> frozenset[int]:
    generation_config = getattr(model, "generation_config", None)
    ids = getattr(generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(text_config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _fingerprint(model: torch.nn.Module) -> str:
    shapes = [f"{name}:{tuple(p.shape)}:{p.dtype}" for name, p in model.named_parameters()]
    digest = hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]
    return f"{type(model).__name__}-{digest}"
