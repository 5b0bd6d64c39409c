"""Background compilation: the switch happens, results stay, and whatever fails leaves eager stages and one warning."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from neo_compile.backend import neo
from neo_compile.errors import ConfigError
from neo_compile.passes import inductor
from neo_compile.passes.compile_stages import compile_in_background, compile_stages, share_stages
from neo_compile.passes.split_stages import SplitGraph, build_program, find_sites, split_stages
from neo_compile.staged import Artifact, StagedModel
from tests.passes.graphs import trace

X = torch.randn(1, 5, 2, 4)


def layers(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.ops.neo.attention((x * 2).relu(), x, x, None, None, -1, 0.5, True, None, None) + x
    return x


def eager_model() -> tuple[StagedModel, SplitGraph]:
    gm, _ = trace(layers, X)
    for index, node in enumerate(find_sites(gm.graph)):
        node.update_arg(5, index)
    split = split_stages(gm)
    keys = share_stages(split)
    artifacts = compile_stages(split, keys, stages="background")
    return StagedModel(build_program(split, artifacts, {}), stage_keys=keys), split


@contextmanager
def warned() -> Generator[list[str], None, None]:
    """Messages of ours that the block warns of, in any thread."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught if "neo" in str(warning.message)]


def replace_compiler(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Artifact]) -> None:
    """The forked child has it too."""
    monkeypatch.setattr(inductor, "compile_with_inductor", function)


def named(name: str) -> Artifact:
    return Artifact(lambda values: [], "inductor", name)


def test_compiled_stages_take_over() -> None:
    staged, split = eager_model()
    (before,) = staged(X)
    assert staged.stage_kind == "eager"
    done: list[bool] = []
    compilation = compile_in_background(split, staged, num_threads=1, on_done=lambda: done.append(True))
    (during,) = staged(X)
    assert compilation.wait(240)
    (after,) = staged(X)
    assert staged.stage_kind == "inductor"
    assert done == [True]
    assert torch.equal(before, during)
    torch.testing.assert_close(after, before)
    assert torch.equal(staged(torch.zeros_like(X))[0], torch.zeros_like(X))


def test_an_error_leaves_eager_stages_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gm: fx.GraphModule, *_: Any, **__: Any) -> Artifact:
        raise RuntimeError("no compiler\nsecond line")

    replace_compiler(monkeypatch, fail)
    staged, split = eager_model()
    (before,) = staged(X)
    with warned() as messages:
        assert compile_in_background(split, staged, on_done=lambda: pytest.fail("nothing is done")).wait(60)
    assert messages == ["neo keeps linear stages of kind #0, #1, #2 eager: RuntimeError: no compiler"]
    assert staged.stage_kind == "eager"
    assert torch.equal(staged(X)[0], before)


def test_a_killed_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_compiler(monkeypatch, lambda *_, **__: os._exit(3))
    staged, split = eager_model()
    with warned() as messages:
        assert compile_in_background(split, staged).wait(60)
    assert [message.split(": ", 1)[1] for message in messages] == ["the compiling process ended with exit code 3"]


def test_wrong_code_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    staged, split = eager_model()
    (before,) = staged(X)
    replace_compiler(monkeypatch, lambda *_, **__: (time.sleep(0.5), named("wrong"))[1])
    monkeypatch.setattr(inductor, "load_artifact", lambda _: Artifact(lambda values: [values[0] * 0] * 2, "inductor"))
    with warned() as messages:
        compilation = compile_in_background(split, staged)
        staged(X)  # a first call is what compiled code is compared with
        assert compilation.wait(60)
    assert len(messages) == 1
    assert "compiled results differ from eager ones by 1.0e+00" in messages[0]
    assert torch.equal(staged(X)[0], before)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_code_is_made_for_the_number_of_threads(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_compiler(monkeypatch, lambda *_, num_threads: named(str(num_threads)))
    loaded: list[str] = []
    monkeypatch.setattr(inductor, "load_artifact", lambda source: loaded.append(source) or named(source))
    staged, split = eager_model()
    assert compile_in_background(split, staged, num_threads=num_threads).wait(60)
    assert loaded == [str(num_threads)] * 3
    assert staged.stage_kind == "inductor"


@torch.no_grad()
def test_code_that_assumes_sizes_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def assume(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Artifact:
        sizes = [size for value in example_inputs if isinstance(value, torch.Tensor) for size in value.shape]
        assert any(size == 2 for size in sizes)  # a guard on a symbolic size
        return named("")

    replace_compiler(monkeypatch, assume)
    returned: list[StagedModel] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True) + 1

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        returned.append(neo(gm, example_inputs, options={"stages": "background"}))
        return returned[-1]

    torch._dynamo.reset()
    with warned() as messages:
        compiled = torch.compile(function, backend=backend, dynamic=True)
        torch.testing.assert_close(compiled(X), function(X))
        assert returned[0].compilation
        assert returned[0].compilation.wait(60)
    assert [message.split(": ", 1)[1] for message in messages] == ["its code would hold for some sizes only"]
    longer = torch.cat([X, X], 2)
    torch.testing.assert_close(compiled(longer), function(longer))


def test_cancelled_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_compiler(monkeypatch, lambda *_, **__: time.sleep(600))  # type: ignore[arg-type, return-value]
    staged, split = eager_model()
    with warned() as messages:
        compilation = compile_in_background(split, staged)
        assert not compilation.wait(0.1)
        compilation.cancel()
        assert compilation.wait(60)
    assert messages == []


def test_other_devices_are_refused() -> None:
    staged, split = eager_model()
    for node in split.stages[0].graph_module.graph.nodes:
        if node.op == "placeholder":
            node.meta["example_value"] = torch.empty(1, device="meta")
    with pytest.raises(ConfigError, match="for CPUs only, this stage runs on meta"):
        compile_in_background(split, staged)


PROCESS = """
import time
from neo_compile.passes import inductor
from tests.passes.test_background import compile_in_background, eager_model
inductor.compile_with_inductor = lambda *_, **__: time.sleep(600)
staged, split = eager_model()
compilation = compile_in_background(split, staged)
print(compilation.process_id, flush=True)
"""


def test_the_process_ends_at_once_and_takes_the_compiler_with_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROCESS],
        check=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(ran.stdout), 0)
