"""Captures kept between processes: used only where they are the model's own, and never trusted without the probe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neo_compile import capture as capture_module
from neo_compile.capture import capture
from neo_compile.fingerprint import fingerprint
from neo_compile.passes import compile_stages as compile_module
from neo_compile.passes import inductor
from neo_compile.staged import Artifact
from tests.helpers.models import eager_logits, tiny_model


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In Inductor's place: artefacts that run eagerly and whose source is a name, found again by it."""
    known: dict[str, Artifact] = {}

    def compile_eagerly(gm: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Artifact:
        name = f"stage {len(known)}"
        known[name] = Artifact(compile_module._eager(gm), "inductor", name)
        return known[name]

    monkeypatch.setattr(inductor, "compile_with_inductor", compile_eagerly)
    monkeypatch.setattr(inductor, "load_artifact", known.__getitem__)
    monkeypatch.setenv("NEO_CACHE", str(tmp_path))


def logits_of(staged: Any, tokens: list[int]) -> torch.Tensor:
    rows = torch.arange(len(tokens))
    return staged(torch.tensor([tokens]), rows[None], rows)[0][0]


def forbid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(capture_module, name, fail)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss", "GPT2"])
def test_an_equal_model_is_not_traced_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = capture(tiny_model(family))
    forbid(monkeypatch, "trace_model")
    other = tiny_model(family, seed=1)  # other weights in the same places
    second = capture(other)
    assert second.sites == first.sites
    assert second.stage_keys == first.stage_keys
    tokens = [5, 9, 2, 44, 60, 7, 7, 1, 30]
    torch.testing.assert_close(logits_of(second, tokens), eager_logits(other, tokens), atol=2e-4, rtol=2e-4)


@pytest.mark.usefixtures("compiler")
def test_a_wrong_capture_is_dropped_by_the_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(capture_module, "fingerprint", lambda *_, **__: "same")
    capture(tiny_model("Llama"))
    other = tiny_model("Llama", rope_parameters={"rope_type": "default", "rope_theta": 10.0}, rms_norm_eps=0.5)
    staged = capture(other)
    assert "a saved capture is wrong" in caplog.text
    torch.testing.assert_close(logits_of(staged, [3, 4, 5]), eager_logits(other, [3, 4, 5]), atol=2e-4, rtol=2e-4)
    assert [path.name for path in (tmp_path / "captures").iterdir()] == ["same.pickle"]


@pytest.mark.usefixtures("compiler")
def test_a_damaged_file_is_as_good_as_none(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    capture(tiny_model("Llama"))
    (path,) = (tmp_path / "captures").iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    capture(tiny_model("Llama"))
    assert "cannot be used" in caplog.text
    assert len(path.read_bytes()) > 20


@pytest.mark.usefixtures("compiler")
def test_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEO_SAVE_CAPTURES", "0")
    capture(tiny_model("Llama"))
    assert not (tmp_path / "captures").exists()


def test_fingerprints_of_equal_models_are_equal() -> None:
    one, other = tiny_model("Llama"), tiny_model("Llama", seed=1)
    assert fingerprint(one, num_threads=2) == fingerprint(other, num_threads=2) is not None


CHANGES: dict[str, Callable[[Any], Any]] = {
    "config": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "attribute": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.3),
    "dtype": lambda model: model.model.norm.to(torch.float64),
    "untied": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.detach().clone())),
    "module": lambda model: setattr(model.model, "norm", torch.nn.Identity()),
    "training of a part": lambda model: model.model.layers[0].train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprints_tell_models_apart(change: str) -> None:
    model = tiny_model("Llama")
    before = fingerprint(model)
    CHANGES[change](model)
    assert fingerprint(model) != before
    assert fingerprint(model, num_threads=1) != fingerprint(model, num_threads=2)


def test_a_replaced_forward_of_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Llama")
    before = fingerprint(model)
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x)
    assert fingerprint(model) != before


def test_what_belongs_to_one_object_has_no_fingerprint() -> None:
    hooked, patched = tiny_model("Llama"), tiny_model("Llama")
    hooked.model.norm.register_forward_hook(lambda *_: None)
    patched.model.norm.forward = torch.sin
    assert fingerprint(hooked) is fingerprint(patched) is None


PROCESS = """
import sys, torch
from neo_compile import capture as module
from tests.helpers.models import eager_logits, tiny_model
if sys.argv[1] == "second":
    module.trace_model = None
model = tiny_model("Llama", num_layers=3)
staged = module.capture(model)
rows = torch.arange(4)
logits, expected = staged(rows[None], rows[None], rows)[0][0], eager_logits(model, [0, 1, 2, 3])
torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
"""


@pytest.mark.slow
def test_the_next_process_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for name in ("first", "second"):
        subprocess.run([sys.executable, "-c", PROCESS, name], check=True, timeout=400, cwd=Path(__file__).parents[1])
