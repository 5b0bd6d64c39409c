"""StagedModel: interleaved coroutines equal a sequential run bitwise, gradients stay off, the hook sees every stage."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from neo_compile.attention import AttentionSite, forward_batch
from neo_compile.capture import capture
from neo_compile.probe import ContiguousAttention, ContiguousKV
from neo_compile.staged import StagedModel
from tests.helpers.models import eager_logits, tiny_model

TOKENS = [[4, 8, 15, 16, 23, 42], [7, 7, 2]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("Llama")


@pytest.fixture(scope="module")
def staged(model: Any) -> StagedModel:
    return capture(model, stages="eager", packed_linear=False)


def inputs(tokens: list[int]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor([tokens]),
        "position_ids": torch.arange(len(tokens))[None],
        "logit_rows": torch.arange(len(tokens)),
    }


def handler(tokens: list[int]) -> ContiguousAttention:
    return ContiguousAttention([(ContiguousKV(), len(tokens))])


def drive(coroutines: list[Generator[None, None, tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Resumes the coroutines in turn until all have returned."""
    results: dict[int, tuple[Any, ...]] = {}
    while len(results) < len(coroutines):
        for index, coroutine in enumerate(coroutines):
            if index not in results:
                try:
                    next(coroutine)
                except StopIteration as stop:
                    results[index] = stop.value
    return [results[index] for index in range(len(coroutines))]


def test_interleaved_equals_sequential_bitwise(staged: StagedModel) -> None:
    sequential = [staged.run(handler(tokens), **inputs(tokens)) for tokens in TOKENS]
    interleaved = drive([staged.coroutine(handler(tokens), **inputs(tokens)) for tokens in TOKENS])
    for one, other in zip(sequential, interleaved, strict=True):
        assert torch.equal(one[0], other[0])


def test_coroutines_may_share_a_look_at_the_parameters(staged: StagedModel) -> None:
    loaded = staged.load()
    before = list(loaded)
    shared = drive([staged.coroutine(handler(tokens), loaded=loaded, **inputs(tokens)) for tokens in TOKENS])
    for tokens, one in zip(TOKENS, shared, strict=True):
        assert torch.equal(one[0], staged.run(handler(tokens), **inputs(tokens))[0])
    assert all(one is other for one, other in zip(loaded, before, strict=True))


def test_yields_once_per_site(staged: StagedModel) -> None:
    assert len(list(staged.coroutine(handler(TOKENS[0]), **inputs(TOKENS[0])))) == len(staged.sites) == 2


def test_plain_call_equals_run_and_eager(staged: StagedModel, model: Any) -> None:
    (plain,) = staged(*inputs(TOKENS[0]).values())
    (run,) = staged.run(handler(TOKENS[0]), **inputs(TOKENS[0]))
    with forward_batch(handler(TOKENS[0])):
        (ambient,) = staged(*inputs(TOKENS[0]).values())
    for logits in (plain, run, ambient):
        torch.testing.assert_close(logits[0], eager_logits(model, TOKENS[0]), atol=1e-4, rtol=1e-4)


def test_past_does_not_depend_on_the_future(staged: StagedModel) -> None:
    (before,) = staged(*inputs([1, 2, 3, 4]).values())
    (after,) = staged(*inputs([1, 2, 3, 90]).values())
    torch.testing.assert_close(before[0, :3], after[0, :3])
    assert not torch.allclose(before[0, 3], after[0, 3])


def test_gradients_stay_off_inside_only(staged: StagedModel) -> None:
    class Watch(ContiguousAttention):
        def begin(
            self, site: AttentionSite, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor | None
        ) -> torch.Tensor:
            assert not q.requires_grad
            return super().begin(site, q, k, v, s)

    coroutine = staged.coroutine(Watch([(ContiguousKV(), 3)]), **inputs(TOKENS[1]))
    with torch.enable_grad():
        for _ in coroutine:
            assert torch.is_grad_enabled()
        assert not staged(*inputs(TOKENS[1]).values())[0].requires_grad


def test_hook_sees_every_stage_in_order(staged: StagedModel) -> None:
    seen: list[tuple[int, int, int]] = []
    staged.run(handler(TOKENS[0]), on_stage=lambda *event: seen.append(event), **inputs(TOKENS[0]))
    assert [index for index, _, _ in seen] == [0, 1, 2]
    times = [time for _, start, end in seen for time in (start, end)]
    assert times == sorted(times)


def test_wrong_inputs_are_named(staged: StagedModel) -> None:
    with pytest.raises(TypeError, match="input_ids, position_ids, logit_rows"):
        staged.run(handler(TOKENS[0]), input_ids=torch.tensor([[1]]))


def test_an_abandoned_coroutine_leaves_nothing_behind(staged: StagedModel) -> None:
    coroutine = staged.coroutine(handler(TOKENS[0]), **inputs(TOKENS[0]))
    next(coroutine)
    coroutine.close()
    (logits,) = staged.run(handler(TOKENS[0]), **inputs(TOKENS[0]))
    assert torch.isfinite(logits).all()
