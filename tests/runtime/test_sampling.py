"""Sampling, incremental text, and outputs on their way to several callers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neo_compile.runtime.detokenizer import Detokenizer
from neo_compile.runtime.outbox import Outbox
from neo_compile.runtime.sampler import SampledToken, TokenSampler, sample_rows
from neo_compile.runtime.sampling_params import SamplingParams
from neo_compile.runtime.session import failed_output


class ByteTokenizer:
    """Token i is byte i, so that characters span tokens."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=True):
        return bytes(token_ids).decode(errors="replace")


def feed(detokenizer, text):
    return [detokenizer.append(byte) for byte in text.encode()]


@pytest.mark.parametrize("text", ["plain", "käse", "日本語 text", "🙂🙃"])
def test_text_grows_by_whole_characters(text):
    detokenizer = Detokenizer(ByteTokenizer(), ())
    for byte in text.encode():
        detokenizer.append(byte)
        assert "\ufffd" not in detokenizer.text
        assert text.startswith(detokenizer.text)
    assert detokenizer.text == text


def test_unfinished_character_at_the_end():
    detokenizer = Detokenizer(ByteTokenizer(), ())
    feed(detokenizer, "ab")
    detokenizer.append(0xC3)
    assert detokenizer.text == "ab"
    detokenizer.finish()
    assert detokenizer.text == "ab\ufffd"


@pytest.mark.parametrize(("stop", "kept"), [(["lo w"], "hel"), (["xx", "o"], "hell"), (["wor", "o w"], "hell")])
def test_stop_strings_cut_the_text(stop, kept):
    detokenizer = Detokenizer(ByteTokenizer(), stop)
    stopped = feed(detokenizer, "hello world")
    assert any(stopped)
    first = Detokenizer(ByteTokenizer(), stop)
    for byte in b"hello world":
        if first.append(byte):
            break
    assert first.text == kept


def test_greedy_rows_and_a_row_of_nan():
    logits = torch.randn(3, 11)
    logits[1, 4] = float("nan")
    samplers = [TokenSampler(SamplingParams(temperature=0.0))] * 3
    first, bad, last = sample_rows(logits, samplers, [list] * 3)
    assert first == SampledToken(int(logits[0].argmax()))
    assert isinstance(bad, ArithmeticError)
    assert last == SampledToken(int(logits[2].argmax()))


@pytest.mark.parametrize(
    ("options", "allowed"),
    [({"top_k": 2}, {0, 1}), ({"top_p": 0.6}, {0, 1}), ({"min_p": 0.9}, {0}), ({"temperature": 1e-4}, {0})],
)
def test_processors_restrict_the_choice(options, allowed):
    logits = torch.tensor([3.0, 2.5, 1.0, 0.0, -1.0])
    sampler = TokenSampler(SamplingParams(seed=3, **options))
    drawn = {sampler.sample(logits, [0]) for _ in range(200)}
    assert drawn == allowed


@pytest.mark.parametrize(
    "options", [{"top_k": np.int64(2)}, {"repetition_penalty": 2}, {"seed": np.int64(3), "n": np.int64(2)}], ids=str
)
def test_any_kind_of_number_will_do(options):
    assert TokenSampler(SamplingParams(**options)).sample(torch.zeros(5), [0]) in range(5)


def test_none_stops_nothing():
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop, params.stop_token_ids) == ((), ())


def test_sampling_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.2])
    sampler = TokenSampler(SamplingParams(seed=0))
    counts = torch.bincount(torch.tensor([sampler.sample(probabilities.log(), [0]) for _ in range(3000)]), minlength=3)
    torch.testing.assert_close(counts / 3000, probabilities, atol=0.04, rtol=0)


def test_outbox_keeps_the_newest_and_respects_claims():
    outbox = Outbox()
    outbox.claim("mine")
    for request_id, error in (("mine", "1"), ("yours", "2"), ("mine", "3")):
        outbox.put(failed_output(request_id, [1], error))
    assert outbox.has_unclaimed
    assert [output.error for output in outbox.take_unclaimed()] == ["2"]
    assert not outbox.has_unclaimed
    assert [output.error for output in outbox.take("mine")] == ["3"]
    assert outbox.take("mine") == []
    outbox.put(failed_output("mine", [1], "4"))
    outbox.release("mine")
    assert outbox.take_unclaimed() == []
