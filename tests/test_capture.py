"""Captures for the runtime: logits of ragged batches equal the model's own, or the model is refused by name."""

from __future__ import annotations

import pytest
import torch
import transformers

from neo_compile.capture import capture
from neo_compile.errors import ConfigError, UnsupportedModelError
from neo_compile.probe import ContiguousAttention, ContiguousKV
from neo_compile.runtime.captured import captured_model
from neo_compile.staged import StagedModel
from tests.helpers.models import (
    FAMILIES,
    MORE_FAMILIES,
    REFUSED,
    VOCAB_SIZE,
    eager_logits,
    family_model,
    slow,
    tiny_model,
)


def run_ragged(staged: StagedModel, prompts: list[list[int]], chunks: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each prompt; iteration i runs chunks[i][r] tokens of request r side by side."""
    caches = [ContiguousKV() for _ in prompts]
    done = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for sizes in chunks:
        rows = [(r, done[r], done[r] + size) for r, size in enumerate(sizes) if size]
        tokens = [token for r, start, end in rows for token in prompts[r][start:end]]
        positions = [position for _, start, end in rows for position in range(start, end)]
        handler = ContiguousAttention([(caches[r], end - start) for r, start, end in rows])
        (out,) = staged.run(
            handler,
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            logit_rows=torch.arange(len(tokens)),
        )
        for (r, _, end), part in zip(rows, out[0].split([b - a for _, a, b in rows]), strict=True):
            logits[r].append(part)
            done[r] = end
    assert done == [len(prompt) for prompt in prompts]
    return [torch.cat(parts) for parts in logits]


PROMPTS = [[5, 9, 2, 44, 60, 7, 7, 1, 30], [80, 3], [11, 12, 13, 14, 15]]
CHUNKS = [[4, 1, 0], [1, 1, 3], [3, 0, 1], [1, 0, 1]]


@pytest.mark.parametrize("family", [*FAMILIES, *slow(MORE_FAMILIES)])
def test_ragged_batches_equal_eager(family: str) -> None:
    model = family_model(family)
    staged = captured_model(model, "eager", 1)
    for logits, prompt in zip(run_ragged(staged, PROMPTS, CHUNKS), PROMPTS, strict=True):
        torch.testing.assert_close(logits, eager_logits(model, prompt), atol=2e-4, rtol=2e-4)


def test_capture_leaves_no_trace() -> None:
    model = tiny_model("Llama", attn_implementation="eager")
    before = eager_logits(model, PROMPTS[0])
    model.train()
    capture(model, stages="eager")
    assert model.training
    assert model.config._attn_implementation == "eager"
    assert "neo" not in transformers.AttentionInterface._global_mapping
    assert "neo" not in transformers.AttentionMaskInterface._global_mapping
    assert torch.equal(eager_logits(model.eval(), PROMPTS[0]), before)


def test_parameters_are_read_by_reference() -> None:
    model = tiny_model("Llama")
    staged = capture(model, stages="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    (logits,) = run_ragged(staged, PROMPTS[:1], [[9]])
    torch.testing.assert_close(logits, eager_logits(model, PROMPTS[0]), atol=2e-4, rtol=2e-4)


def test_only_the_asked_rows_have_logits() -> None:
    model = tiny_model("Llama")
    staged = capture(model, stages="eager")
    inputs = {"input_ids": torch.tensor([PROMPTS[0]]), "position_ids": torch.arange(9)[None]}
    (logits,) = staged(*inputs.values(), torch.tensor([8, 2]))
    assert logits.shape == (1, 2, VOCAB_SIZE)
    torch.testing.assert_close(logits[0], eager_logits(model, PROMPTS[0])[[8, 2]], atol=2e-4, rtol=2e-4)


def test_number_of_distinct_stages_does_not_grow_with_layers() -> None:
    counts = {layers: capture(tiny_model("Llama", num_layers=layers), stages="eager") for layers in (3, 7)}
    assert {layers: staged.num_artifacts for layers, staged in counts.items()} == {3: 3, 7: 3}
    assert counts[7].num_stages == 8
    assert counts[7].stage_keys == (0, 1, 1, 1, 1, 1, 1, 2)


def test_dtype_converts_a_copy() -> None:
    model = tiny_model("Llama")
    staged = capture(model, stages="eager", dtype=torch.bfloat16)
    assert staged.sites[0].dtype == torch.bfloat16
    assert model.dtype == torch.float32


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_by_name(name: str) -> None:
    refused = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=refused.reason):
        capture(tiny_model(refused.family, **refused.overrides), stages="eager")


def test_not_a_hugging_face_model() -> None:
    with pytest.raises(UnsupportedModelError, match="PreTrainedModel"):
        capture(torch.nn.Linear(2, 2), stages="eager")


@pytest.mark.parametrize(("option", "value"), [("stages", "triton"), ("packed_linear", 3)])
def test_bad_options_list_the_valid_ones(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option}={value!r}, must be one of"):
        capture(tiny_model("Llama"), **{option: value})  # type: ignore[arg-type]


def test_inductor_one_capture_serves_every_size() -> None:
    model = tiny_model("Llama", num_layers=3)
    staged = capture(model, num_threads=1)
    assert (staged.num_stages, staged.num_artifacts) == (4, 3)
    for logits, prompt in zip(run_ragged(staged, PROMPTS, CHUNKS), PROMPTS, strict=True):
        torch.testing.assert_close(logits, eager_logits(model, prompt), atol=2e-4, rtol=2e-4)
    generator = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (1, 2, 5, 12, 64):
            tokens = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
            (logits,) = run_ragged(staged, [tokens], [[length]])
            torch.testing.assert_close(logits, eager_logits(model, tokens), atol=2e-4, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_capture_over_all_sizes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_SAVE_CAPTURES", "0")
    model = tiny_model("Llama", dtype=dtype, max_position_embeddings=4096)
    staged = capture(model, num_threads=1)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2

    def error(logits: torch.Tensor, tokens: list[int]) -> float:
        expected = eager_logits(model, tokens)
        return float((logits - expected).norm() / expected.norm())

    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (1, 63, 64, 65, 4096):
            tokens = [token % VOCAB_SIZE for token in range(length)]
            (logits,) = run_ragged(staged, [tokens], [[length]])
            assert error(logits, tokens) < tolerance
        for batch in (1, 2, 64):
            for logits in run_ragged(staged, [[3, 4, 5]] * batch, [[2] * batch, [1] * batch]):
                assert error(logits, [3, 4, 5]) < tolerance


def test_a_compiled_model_is_captured_without_compiling_its_own_calls() -> None:
    model = tiny_model("Llama")
    compiled: list[object] = []

    def watch(gm: torch.fx.GraphModule, example_inputs: list[object]) -> object:
        compiled.append(gm)
        return gm

    model.compile(backend=watch)
    capture(model, stages="eager")
    assert not compiled
    eager_logits(model, [4, 8, 15])
    assert compiled, "the model's own compilation is back"
