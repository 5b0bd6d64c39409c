"""Windows are read off the masks' own predicates: 4096 is as certain as 6, and what is no window is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    create_chunked_causal_mask,
    or_masks,
    sliding_window_causal_mask_function,
)
from transformers.models.mistral import modeling_mistral

from neo_compile.capture import capture
from neo_compile.errors import UnsupportedModelError
from neo_compile.hf_masks import MaskRecorder, window_of
from tests.helpers.models import VOCAB_SIZE, eager_logits, tiny_model
from tests.test_capture import run_ragged

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [1, 2, 6, 64, 100, 4096, 32768])
def test_windows_of_any_size(window: int) -> None:
    assert window_of(sliding_window_causal_mask_function(window), window, CPU) == window


def test_causal_masks() -> None:
    assert window_of(causal_mask_function, None, CPU) is None
    # A model may name a size that its mask does not have.
    assert window_of(causal_mask_function, 4096, CPU) is None


NO_WINDOW = {
    "chunks": (chunked_causal_mask_function(128, torch.zeros(1, dtype=torch.int64)), 128),
    "one token more": (sliding_window_causal_mask_function(129), 128),
    "one token less": (sliding_window_causal_mask_function(127), 128),
    "an unnamed window": (sliding_window_causal_mask_function(4000), None),
    "both directions": (lambda b, h, q, kv: kv >= 0, None),
    "the next token": (lambda b, h, q, kv: kv <= q + 1, None),
    "a prefix": (or_masks(causal_mask_function, lambda b, h, q, kv: kv < 4), None),
    "a hole": (and_masks(causal_mask_function, lambda b, h, q, kv: kv != 50), None),
}


@pytest.mark.parametrize("name", NO_WINDOW)
def test_what_is_no_window_is_refused(name: str) -> None:
    mask_function, size = NO_WINDOW[name]
    with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
        window_of(mask_function, size, CPU)


def test_a_mask_that_looks_at_the_tokens_is_refused() -> None:
    groups = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(UnsupportedModelError, match="depends on more than positions"):
        window_of(lambda b, h, q, kv: groups[b, q] == groups[b, kv], None, CPU)


def test_recorded_masks_are_known_again() -> None:
    recorder = MaskRecorder()
    sizes: dict[str, Any] = {"batch_size": 1, "q_length": 4, "kv_length": 4, "device": CPU}
    full = recorder(mask_function=causal_mask_function, **sizes)
    sliding = recorder(mask_function=sliding_window_causal_mask_function(2), local_size=2, **sizes)
    assert full.shape == (1, 1, 4, 4)
    assert recorder.windows == [None, 2]
    assert recorder.recall(None) == (True, None)
    assert recorder.recall(full[:, :, :, :4]) == (True, None)
    assert recorder.recall(sliding) == (True, 2)
    assert recorder.recall(full & sliding) == (False, None)
    assert recorder.recall(sliding[:, :, :3]) == (False, None)


def test_a_window_beyond_the_probe_is_right() -> None:
    model = tiny_model("Mistral", sliding_window=70)
    staged = capture(model, stages="eager")
    assert {site.window for site in staged.sites} == {70}
    tokens = torch.randint(VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    (logits,) = run_ragged(staged, [tokens], [[90], [10]])
    torch.testing.assert_close(logits, eager_logits(model, tokens), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("build_mask", "reason"),
    [
        (lambda **_: None, "has a window of 90 tokens and builds no mask for it"),
        (lambda **keywords: torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(), "a mask that it builds itself"),
    ],
)
def test_a_window_without_its_mask_is_refused(monkeypatch: pytest.MonkeyPatch, build_mask: Any, reason: str) -> None:
    """Both models give every logit of the numeric probe right: their windows are longer than its prompts."""
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", build_mask)
    with pytest.raises(UnsupportedModelError, match=reason):
        capture(tiny_model("Mistral", sliding_window=90), stages="eager")


def test_chunks_under_the_name_of_a_window_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunked(config: Any, **keywords: Any) -> Any:
        config.attention_chunk_size = config.sliding_window
        return create_chunked_causal_mask(config, **keywords)

    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", chunked)
    with pytest.raises(UnsupportedModelError, match="MistralForCausalLM: its attention mask is neither causal"):
        capture(tiny_model("Mistral", sliding_window=90), stages="eager")
