"""Ways of calling `model.generate`, as people do, and of using what it returns. One function per way.

A use takes a model and returns what must be the same with and without neo: token tensors, texts of a streamer,
numbers. It is run on a model in eager and on its enabled twin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from tests.helpers.generation import left_padded
from tests.helpers.models import VOCAB_SIZE

NUM_TOKENS = 10


def prompts(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Random prompts, padded on the left, of token ids that every tiny model knows."""
    inputs = left_padded(lengths, seed)
    return inputs | {"input_ids": (inputs["input_ids"] % (VOCAB_SIZE - 3) + 3) * inputs["attention_mask"]}


BATCH = prompts([9, 4, 17, 16], seed=5)
PROMPT = prompts([18], seed=6)


@dataclass(frozen=True)
class Use:
    """A way of calling `generate`.

    Attributes:
        run: (model, draft model) -> what to compare.
        fallbacks: parts of the reasons of the forwards that neo leaves to the model; none where all are served.
        has_cache: whether a KV cache is kept between forwards, so that rows can lie on the host.
    """

    run: Callable[[Any, Any], Any]
    fallbacks: tuple[str, ...] = ()
    has_cache: bool = True


def options_use(inputs: dict[str, torch.Tensor] = BATCH, fallbacks: tuple[str, ...] = (), **options: Any) -> Use:
    """A call with these options, seeded."""
    return Use(lambda model, _: generate(model, inputs, **options), fallbacks, options.get("use_cache", True))


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """The tokens of one seeded call; greedy unless the options say otherwise."""
    torch.manual_seed(11)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0} | options
    output = model.generate(**inputs, **options)
    return output if isinstance(output, torch.Tensor) else output.sequences


class _Collector(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


class _AfterTokens(StoppingCriteria):
    """Ends row i after 3 + i new tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        num_new = input_ids.shape[1] - BATCH["input_ids"].shape[1]
        return num_new >= 3 + torch.arange(len(input_ids))


class _OnlyEven(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 1::2] = -torch.inf
        return scores


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token i is one letter."""
    vocabulary = {_letter(token): token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_letter(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _letter(token: int) -> str:
    return chr(ord("!") + token)


def streamer(model: Any, _: Any) -> Any:
    collector = _Collector()
    tokens = generate(model, PROMPT, streamer=collector)
    return tokens, collector.values


def stop_string(model: Any, _: Any) -> Any:
    """Ends at the string of the tokens that greedy decoding gives after the third."""
    tokens = generate(model, PROMPT)[0, PROMPT["input_ids"].shape[1] :].tolist()
    text = "".join(_letter(token) for token in tokens[3:5])
    stopped = generate(model, PROMPT, stop_strings=[text], tokenizer=letter_tokenizer())
    assert stopped.shape[1] < PROMPT["input_ids"].shape[1] + NUM_TOKENS
    return stopped


def dict_output(model: Any, _: Any) -> Any:
    output = model.generate(
        **BATCH,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    return output.sequences, [round_logits(logits) for logits in (*output.scores, *output.logits)]


def round_logits(logits: torch.Tensor) -> list[list[float]]:
    """Logits that may differ in the last digits, as numbers to compare."""
    return [[round(value, 2) + 0.0 for value in row] for row in logits.clamp(-1e4, 1e4).topk(3).values.tolist()]


def continue_from_cache(model: Any, _: Any) -> Any:
    """A second turn on the first one's cache."""
    first = model.generate(
        **BATCH, max_new_tokens=5, do_sample=False, pad_token_id=0, return_dict_in_generate=True, eos_token_id=None
    )
    turn = torch.cat([first.sequences, BATCH["input_ids"][:, -2:]], dim=1)
    mask = torch.cat([BATCH["attention_mask"], torch.ones(len(turn), 7, dtype=torch.int64)], dim=1)
    inputs = {"input_ids": turn, "attention_mask": mask}
    return first.sequences, generate(model, inputs, past_key_values=first.past_key_values)


def batches_of_other_sizes(model: Any, _: Any) -> Any:
    lengths = ([5], [7, 3, 12, 5, 9], [30, 2])
    return [generate(model, prompts(list(rows), seed=index)) for index, rows in enumerate(lengths)]


def two_threads(model: Any, _: Any) -> Any:
    found: dict[int, torch.Tensor] = {}
    batches = [prompts([9 + i, 4], seed=i) for i in range(2)]

    def run(index: int) -> None:
        options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
        found[index] = model.generate(**batches[index], **options)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(2)]


def two_models(model: Any, draft: Any) -> Any:
    """Calls of two models in turn; the other one is not enabled."""
    return [generate(m, BATCH, max_new_tokens=4) for m in (model, draft, model, draft)]


def no_mask(model: Any, _: Any) -> Any:
    return generate(model, {"input_ids": PROMPT["input_ids"]})


USES: dict[str, Use] = {
    "greedy": options_use(),
    "no mask": Use(no_mask),
    "sampling": options_use(do_sample=True, temperature=1.4),
    "top-k": options_use(do_sample=True, top_k=7),
    "top-p": options_use(do_sample=True, top_k=0, top_p=0.8),
    "min-p": options_use(do_sample=True, top_k=0, min_p=0.05),
    "typical": options_use(do_sample=True, typical_p=0.6),
    "eta and epsilon": options_use(do_sample=True, eta_cutoff=3e-3, epsilon_cutoff=3e-3),
    "beams": options_use(num_beams=3),
    "beam sampling": options_use(num_beams=3, do_sample=True),
    "beams, all returned": options_use(num_beams=3, num_return_sequences=3, length_penalty=0.4),
    "early stopping beams": options_use(num_beams=2, early_stopping=True, eos_token_id=list(range(40))),
    "return sequences": options_use(do_sample=True, num_return_sequences=2),
    "end of sequence": options_use(eos_token_id=list(range(3, 97, 2))),
    "min new tokens": options_use(eos_token_id=list(range(3, 60)), min_new_tokens=5),
    "repetition penalty": options_use(repetition_penalty=1.4),
    "no repeated n-grams": options_use(no_repeat_ngram_size=2),
    "bad words, suppressed tokens": options_use(bad_words_ids=[[5, 6], [9]], suppress_tokens=[3, 4]),
    "sequence bias": options_use(sequence_bias=[[[7], 3.0], [[8, 9], -2.0]]),
    "forced end": options_use(forced_eos_token_id=2),
    "processors": Use(lambda m, _: generate(m, BATCH, logits_processor=LogitsProcessorList([_OnlyEven()]))),
    "stopping criteria": Use(lambda m, _: generate(m, BATCH, stopping_criteria=StoppingCriteriaList([_AfterTokens()]))),
    "stop string": Use(stop_string),
    "streamer": Use(streamer),
    "dict output": Use(dict_output),
    "assisted": Use(lambda model, draft: generate(model, PROMPT, assistant_model=draft)),
    "assisted sampling": Use(lambda model, draft: generate(model, PROMPT, assistant_model=draft, do_sample=True)),
    "prompt lookup": options_use(PROMPT, prompt_lookup_num_tokens=3),
    "chunked prefill": options_use(prefill_chunk_size=5),
    "guidance": options_use(guidance_scale=1.6),
    "guidance with a negative prompt": options_use(
        PROMPT, guidance_scale=1.6, negative_prompt_ids=prompts([6], seed=8)["input_ids"]
    ),
    "no cache": options_use(use_cache=False),
    "max time": options_use(max_time=60.0),
    "renormalised": options_use(do_sample=True, renormalize_logits=True, top_k=9),
    "continue from cache": Use(continue_from_cache),
    "batches of other sizes": Use(batches_of_other_sizes),
    "two models": Use(two_models),
    "two threads": Use(two_threads),
    "output attentions": Use(
        lambda m, _: generate(m, BATCH, output_attentions=True, return_dict_in_generate=True), ("output_attentions",)
    ),
    "output hidden states": Use(
        lambda m, _: generate(m, BATCH, output_hidden_states=True, return_dict_in_generate=True),
        ("output_hidden_states",),
    ),
    "static cache": options_use(fallbacks=("a StaticCache",), cache_implementation="static", disable_compile=True),
}
