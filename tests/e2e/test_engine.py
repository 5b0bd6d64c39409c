"""The engine's public behaviour: streams, stops, sampling, aborts, bad input."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch

from neo_compile import CacheConfig, CapacityError, ConfigError, DeviceConfig, Engine, SamplingParams, SchedulerConfig
from neo_compile.errors import UnsupportedModelError
from tests.helpers.engines import (
    VOCAB_SIZE,
    assert_all_blocks_free,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
    tiny_llama,
)


class LetterTokenizer:
    """Token i is the letter chr(97 + i % 26): enough for texts and stop strings."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token_id % 26) for token_id in token_ids)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_layers=2)


@pytest.fixture
def engine(model):
    with make_engine(model, tokenizer=LetterTokenizer()) as engine:
        yield engine


def test_stream_is_cumulative_and_ends(model, engine):
    outputs = list(engine.stream([5, 6, 7], greedy(9)))
    lengths = [len(output.token_ids) for output in outputs]
    assert lengths == sorted(lengths)
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].token_ids == hf_greedy(model, [5, 6, 7], 9)
    assert outputs[-1].metrics.first_token_time <= outputs[-1].metrics.finish_time


def test_leaving_a_stream_aborts_its_request(engine):
    stream = engine.stream([1, 2, 3], greedy(200))
    next(stream)
    stream.close()
    assert not engine.has_unfinished
    assert_all_blocks_free(engine)


def test_dropping_a_stream_that_was_never_read_aborts_its_request(engine):
    stream = engine.stream([1, 2, 3], greedy(200))
    del stream
    assert not engine.has_unfinished
    assert_all_blocks_free(engine)


def test_text_and_stop_string(model, engine):
    text = LetterTokenizer().decode(hf_greedy(model, [0, 1, 2], 12))
    stop = text[4:6]
    output = engine.generate("abc", greedy(12, stop=[stop]))[0]
    assert output.text == text[: text.index(stop)]
    assert output.finish_reason == "stop"


def test_stop_token_and_eos(model, engine):
    expected = hf_greedy(model, [3, 1, 4], 12)
    output = engine.generate([3, 1, 4], greedy(12, stop_token_ids=[expected[5]]))[0]
    assert output.token_ids == expected[: expected.index(expected[5]) + 1]
    assert output.finish_reason == "stop"


def test_eos_of_the_model_ends_and_can_be_ignored(model):
    expected = hf_greedy(model, [9, 9, 8], 10)
    eos = expected[4]
    model.generation_config.eos_token_id = eos
    try:
        with make_engine(model) as engine:
            stopped, ignored = engine.generate([[9, 9, 8]] * 2, [greedy(10), greedy(10, ignore_eos=True)])
    finally:
        model.generation_config.eos_token_id = None
    assert stopped.token_ids == expected[: expected.index(eos) + 1]
    assert ignored.token_ids == expected


def test_seeded_sampling_does_not_depend_on_batch_mates(engine):
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, max_tokens=12, seed=7)
    alone = engine.generate([4, 5, 6], params)[0].token_ids
    prompts = random_prompts([10, 20, 30])
    crowded = engine.generate([*prompts, [4, 5, 6]], [greedy(15)] * 3 + [params])[3].token_ids
    assert alone == crowded
    assert len(set(alone)) > 1


def test_n_outputs_are_distinct_requests(engine):
    outputs = engine.generate([[4, 5, 6]], SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=8))
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert len({output.request_id for output in outputs}) == 1


def test_repetition_penalty_equals_hugging_face(model, engine):
    prompt = [7, 8, 9, 7, 8]
    ids = torch.tensor([prompt])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, repetition_penalty=1.3
    )
    output = engine.generate(prompt, greedy(10, repetition_penalty=1.3))[0]
    assert output.token_ids == wanted[0, 5:].tolist()


def test_logprobs(model, engine):
    prompt = [7, 8, 9]
    output = engine.generate(prompt, greedy(3, logprobs=2))[0]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], dim=-1)
    first = output.logprobs[0]
    assert len(first) == 2
    for token_id, logprob in first.items():
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-4)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
def test_abort_in_any_state_gives_all_blocks_back(model, num_steps):
    with make_engine(model, policy="neo", device_blocks=4) as engine:
        ids = [engine.add_request(prompt, greedy(30)) for prompt in random_prompts([30] * 8)]
        for _ in range(num_steps):
            engine.step()
        for request_id in ids[::2]:
            assert engine.abort(request_id)
            assert not engine.abort(request_id)
        reasons = {}
        while engine.has_unfinished:
            reasons |= {o.request_id: o.finish_reason for o in engine.step() if o.is_finished}
        assert_all_blocks_free(engine)
    assert reasons == {request_id: "abort" if i % 2 == 0 else "length" for i, request_id in enumerate(ids)}


def test_pool_for_two_serves_ten(model):
    with make_engine(model, policy="neo", device_blocks=4, host_blocks=2) as engine:
        outputs = engine.generate(random_prompts([20] * 10), greedy(8))
    assert [output.finish_reason for output in outputs] == ["length"] * 10


def test_a_request_that_outgrows_both_tiers_ends_alone(model):
    with make_engine(model, device_blocks=3, host_blocks=2) as engine:
        long, short = engine.generate([[1] * 40, [2] * 5], [greedy(100), greedy(5)])
    assert long.finish_reason == "cache_full"
    assert 0 < len(long.token_ids) < 100
    assert long.token_ids == hf_greedy(model, [1] * 40, len(long.token_ids))
    assert short.token_ids == hf_greedy(model, [2] * 5, 5)


def test_two_threads_share_an_engine(model, engine):
    prompts = random_prompts([12, 25, 40, 18])
    results: dict[int, list[int]] = {}

    def work(index: int) -> None:
        results[index] = list(engine.stream(prompts[index], greedy(10)))[-1].token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {index: hf_greedy(model, prompt, 10) for index, prompt in enumerate(prompts)}


def test_a_failing_request_fails_alone(model, engine, monkeypatch):
    from neo_compile.runtime.sampler import TokenSampler

    def broken(self, logits, token_ids):
        raise ValueError("this processor is broken")

    monkeypatch.setattr(TokenSampler, "sample", broken)
    good, bad = engine.generate([[1, 2], [3, 4]], [greedy(4), SamplingParams(max_tokens=4)])
    assert good.token_ids == hf_greedy(model, [1, 2], 4)
    assert bad.finish_reason == "error"
    assert "this processor is broken" in bad.error
    assert_all_blocks_free(engine)


def test_requests_with_nan_logits_end_alone():
    """A token whose embedding is NaN spoils the logits, and the KV blocks, of the requests that hold it: no others."""
    model = tiny_llama()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    prompts = random_prompts([20] * 12, low=8)
    expected = [hf_greedy(model, prompt, 8) for prompt in prompts]
    spoilt = {1, 4, 5, 10}
    for index in spoilt:
        prompts[index][11] = 7
    with make_engine(model, device_blocks=6, host_blocks=8) as engine:  # a third of the requests at a time
        outputs = engine.generate(prompts, greedy(8))
        assert_all_blocks_free(engine)
    for index, output in enumerate(outputs):
        if index in spoilt:
            assert (output.finish_reason, output.token_ids) == ("error", [])
            assert "NaN" in output.error
        elif 7 not in expected[index]:
            assert output.token_ids == expected[index]


def test_a_tokenizer_that_raises_ends_its_request_only(model):
    class Fragile(LetterTokenizer):
        def decode(self, token_ids, *, skip_special_tokens=True):
            if fatal in token_ids:
                raise KeyError("no such token")
            return super().decode(token_ids)

    first, second = (hf_greedy(model, prompt, 6) for prompt in ([1, 2], [3, 4]))
    fatal = next(token for token in first[2:] if token not in second)
    with make_engine(model, tokenizer=Fragile()) as engine:
        bad, good = engine.generate([[1, 2], [3, 4]], greedy(6))
        assert_all_blocks_free(engine)
    assert bad.finish_reason == "error"
    assert "no such token" in bad.error
    assert good.token_ids == second


def test_more_logprobs_than_tokens_exist(engine):
    output = engine.generate([1, 2], greedy(1, logprobs=10 * VOCAB_SIZE))[0]
    assert len(output.logprobs[0]) == VOCAB_SIZE


def test_an_iteration_that_fails_ends_what_runs_and_no_more(model, monkeypatch):
    """After an exception cache and books may disagree: what was under way ends, what waits is served."""
    with make_engine(model, max_num_seqs=2) as engine:
        ids = [engine.add_request([token, 5], greedy(6)) for token in range(1, 5)]
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine._core, "_append_tokens", lambda result: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        outputs = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
        assert_all_blocks_free(engine)
    assert [outputs[i].finish_reason for i in ids] == ["error", "error", "length", "length"]
    assert "ZeroDivisionError" in outputs[ids[0]].error
    assert outputs[ids[3]].token_ids == hf_greedy(model, [4, 5], 6)


# -- bad input: the value, the limit, the knob; and the engine goes on


def test_prompt_longer_than_both_tiers(model):
    with make_engine(model, device_blocks=2, host_blocks=3) as engine:
        with pytest.raises(CapacityError, match=r"60 prompt tokens.*host_blocks=3"):
            engine.add_request([1] * 60)
        outputs = engine.generate([[1] * 60, [1, 2, 3]], greedy(3))
        assert outputs[0].finish_reason == "error"
        assert "host_blocks=3" in outputs[0].error
        assert outputs[1].token_ids == hf_greedy(model, [1, 2, 3], 3)


def test_prompt_longer_than_the_context(engine):
    with pytest.raises(CapacityError, match="512"):
        engine.add_request([1] * 512)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, VOCAB_SIZE], f"{VOCAB_SIZE}"),
        ([-1], "-1"),
        ([1.5, 2.0], "integers"),
        (None, "integers"),
        ({"input_ids": [1]}, "integers"),
        (5, "integers"),
    ],
)
def test_unusable_prompts(engine, prompt, message):
    with pytest.raises(ConfigError, match=message):
        engine.add_request(prompt)
    assert engine.generate([1, 2], greedy(2))[0].finish_reason == "length"


@pytest.mark.parametrize("as_ids", [torch.tensor, np.array, tuple, lambda ids: [np.int64(i) for i in ids]])
def test_token_ids_of_other_types(model, engine, as_ids):
    expected = hf_greedy(model, [4, 5, 6], 3)
    assert [output.token_ids for output in engine.generate(as_ids([4, 5, 6]), greedy(3))] == [expected]
    assert engine.generate([as_ids([4, 5, 6])], greedy(3))[0].token_ids == expected


def test_prompts_that_cannot_be_encoded_are_refused_alone(engine, monkeypatch):
    monkeypatch.setattr(LetterTokenizer, "encode", lambda self, text: [text.index("a")])
    bad, good = engine.generate(["zzz", "za"], greedy(2))
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "substring" in bad.error
    with pytest.raises(ConfigError, match="dict"):
        engine.generate({"input_ids": [1, 2]})


def test_request_id_that_clashes_with_an_output_leaves_nothing_behind(engine):
    engine.add_request([1, 2], greedy(3), request_id="a#1")
    with pytest.raises(ConfigError, match="'a'"):
        engine.add_request([1, 2], greedy(3, n=2), request_id="a")
    assert set(run_to_end(engine)) == {"a#1"}


def test_request_id_in_use(engine):
    engine.add_request([1, 2], request_id="same")
    with pytest.raises(ConfigError, match="same"):
        engine.add_request([1, 2], request_id="same")
    run_to_end(engine)


def test_an_output_that_nobody_took_keeps_its_id(model, engine):
    """It is neither handed to a later request that would get its id, nor overwritten."""
    engine.add_request([1, 2], greedy(3), request_id="1")
    engine.generate([3, 4], greedy(6))  # takes id 0; "1" ends meanwhile
    with pytest.raises(ConfigError, match=r"'1' is in use .*step\(\)"):
        engine.add_request([5, 6], request_id="1")
    refused, served = engine.generate([[], [5, 6]], greedy(6))
    assert (refused.finish_reason, refused.token_ids) == ("error", [])
    assert served.token_ids == hf_greedy(model, [5, 6], 6)
    assert run_to_end(engine) == {"1": hf_greedy(model, [1, 2], 3)}
    assert engine.add_request([5, 6], greedy(1), request_id="1") == "1"


def test_an_id_that_generate_still_waits_for_is_in_use(model, engine, monkeypatch):
    """Between its last output, or its refusal, and the end of `generate`."""
    tried: list[str] = []
    advance = engine._core.advance

    def add_in_between():
        for request_id in ("0", "1"):
            with pytest.raises(ConfigError, match="in use"):
                engine.add_request([7, 8], greedy(2), request_id=request_id)
            tried.append(request_id)
        advance()

    monkeypatch.setattr(engine._core, "advance", add_in_between)
    short, refused, long = engine.generate([[1, 2], [], [3, 4]], [greedy(1), greedy(1), greedy(6)])
    assert tried == ["0", "1"] * 6
    assert refused.finish_reason == "error"
    assert short.token_ids == hf_greedy(model, [1, 2], 1)
    assert long.token_ids == hf_greedy(model, [3, 4], 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SchedulerConfig(policy="magic"), "device-only"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs"),
        (lambda: CacheConfig(device_blocks=0), "0 blocks"),
        (lambda: CacheConfig(device_tokens=15), "0 blocks"),
        (lambda: CacheConfig(device_blocks=1, device_tokens=16), "only one"),
        (lambda: CacheConfig(host_bytes="lots", device_blocks=1), "lots"),
        (lambda: CacheConfig(dtype=torch.int8), "int8"),
        (lambda: CacheConfig(block_size=0), "block_size"),
        (lambda: DeviceConfig(kind="tpu"), "emulated"),
        (lambda: DeviceConfig(device_threads=0), "device_threads"),
        (lambda: DeviceConfig(host_slowdown=0.5), "host_slowdown"),
        (lambda: DeviceConfig(host_slowdown=math.nan), "host_slowdown=nan"),
        (lambda: DeviceConfig(swap_gbps="abc"), "swap_gbps='abc'"),
        (lambda: DeviceConfig(swap_gbps=math.inf), "swap_gbps=inf"),
        (lambda: DeviceConfig(host_threads=1.0), "host_threads=1.0"),
        (lambda: DeviceConfig(device_threads=True), "device_threads=True"),
        (lambda: DeviceConfig(pin_threads="maybe"), "pin_threads='maybe'"),
        (lambda: DeviceConfig(seed="a"), "seed='a'"),
        (lambda: SamplingParams(temperature=-1), "temperature"),
        (lambda: SamplingParams(top_p=0), "top_p"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens"),
        (lambda: SamplingParams(max_tokens=2.5), "max_tokens"),
        (lambda: SamplingParams(temperature=1e-40), "temperature"),
        (lambda: SamplingParams(temperature="hot"), "temperature"),
        (lambda: SamplingParams(seed=2**70), "seed"),
        (lambda: SamplingParams(logprobs=True), "logprobs"),
        (lambda: SamplingParams(stop_token_ids=["a"]), "stop_token_ids"),
        (lambda: SamplingParams(stop_token_ids=5), "stop_token_ids=5"),
        (lambda: SamplingParams(stop=5), "stop=5"),
        (lambda: SamplingParams(stop=["a", ""]), "empty"),
        (lambda: SamplingParams(ignore_eos="no"), "ignore_eos='no'"),
        (lambda: SamplingParams(temperature=math.inf), "temperature=inf"),
        (lambda: SamplingParams(temperature=True), "temperature=True"),
        (lambda: SamplingParams(top_p=math.nan), "top_p=nan"),
        (lambda: SamplingParams(min_p="0"), "min_p='0'"),
        (lambda: SamplingParams(repetition_penalty=math.inf), "repetition_penalty=inf"),
    ],
)
def test_bad_options_name_the_value_and_the_valid_ones(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="polcy"):
        SchedulerConfig(polcy="neo")


def test_wrong_dtype(model):
    with pytest.raises(ConfigError, match="float64"):
        Engine(tiny_llama(num_layers=1).double())


def test_not_a_language_model():
    with pytest.raises(UnsupportedModelError, match="Linear"):
        Engine(torch.nn.Linear(4, 4))


def test_host_cache_larger_than_memory(model):
    with pytest.raises(ConfigError, match=r"would take 90\d{4}\.\d GiB .* only \d+\.\d GiB of memory is available"):
        make_engine(model, host_blocks=None, host_bytes="900000GiB")


def test_closed_engine(model):
    engine = make_engine(model)
    engine.add_request([1, 2, 3])
    engine.close()
    engine.close()
    assert not engine.has_unfinished
    with pytest.raises(ConfigError, match="closed"):
        engine.step()
