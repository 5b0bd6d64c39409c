"""torch.compile(model, backend="neo"): equal to eager for any module and cache, and honest when it stands aside."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

from neo_compile.backend import neo
from neo_compile.errors import ConfigError
from neo_compile.passes.runner import dump
from neo_compile.staged import StagedModel
from tests.helpers.models import eager_logits, tiny_model

TOKENS = [4, 8, 15, 16, 23, 42, 7, 7, 2]
EAGER = {"stages": "eager"}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    """A plain module: pre-norm attention by F.scaled_dot_product_attention, no Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).reshape(batch, length, 32))


def watched(model: Any) -> tuple[Any, list[Any]]:
    """`model` compiled by the backend, and what the backend returned for each graph."""
    returned: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        returned.append(neo(gm, example_inputs, options=EAGER))
        return returned[-1]

    return torch.compile(model, backend=backend), returned


@torch.no_grad()
def test_plain_module() -> None:
    model = nn.Sequential(Block(), Block())
    compiled, returned = watched(model)
    for length in (5, 9, 1):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
    assert all(isinstance(function, StagedModel) and len(function.sites) == 2 for function in returned)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("Llama", "sdpa"), ("Llama", "eager"), ("Gemma2", "eager"), ("GPT2", "sdpa"), ("Mistral", "eager")],
)
@torch.no_grad()
def test_hugging_face_with_and_without_cache(family: str, implementation: str) -> None:
    model = tiny_model(family, attn_implementation=implementation)
    expected = eager_logits(model, TOKENS)
    compiled, returned = watched(model)
    out = compiled(input_ids=torch.tensor([TOKENS]), use_cache=False)
    torch.testing.assert_close(out.logits[0], expected, atol=2e-4, rtol=2e-4)
    cache = DynamicCache(config=model.config)
    start = 0
    for end in (5, 6, 7, 9):
        out = compiled(input_ids=torch.tensor([TOKENS[start:end]]), past_key_values=cache, use_cache=True)
        torch.testing.assert_close(out.logits[0], expected[start:end], atol=2e-4, rtol=2e-4)
        start = end
    assert all(isinstance(function, StagedModel) and len(function.sites) == 2 for function in returned)


LENGTHS = (5, 9, 64)


@pytest.mark.parametrize("num_layers", [3, pytest.param(12, marks=pytest.mark.slow)])
@torch.no_grad()
def test_few_graphs_without_a_cache(num_layers: int) -> None:
    compiled, returned = watched(tiny_model("Llama", num_layers=num_layers))
    for length in LENGTHS:
        compiled(input_ids=torch.arange(length)[None], use_cache=False)
    assert len(returned) <= 2
    assert {function.num_artifacts for function in returned} == {3}


@pytest.mark.parametrize("num_layers", [3, pytest.param(12, marks=pytest.mark.slow)])
@torch.no_grad()
def test_few_graphs_with_a_cache(num_layers: int) -> None:
    """Dynamo makes a graph of the prompt's length, of one token, of one token and any cache; then of any prompt."""
    model = tiny_model("Llama", num_layers=num_layers)
    compiled, returned = watched(model)
    num_graphs = []
    for length in LENGTHS:
        cache = DynamicCache(config=model.config)
        compiled(input_ids=torch.arange(length)[None], past_key_values=cache, use_cache=True)
        for token in (1, 2, 3):
            compiled(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        num_graphs.append(len(returned))
    assert num_graphs[0] <= 3
    assert num_graphs[-1] <= 4


@torch.no_grad()
def test_a_mode_without_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="neo_compile.backend")
    compiled = torch.compile(Block(), backend=lambda gm, inputs: neo(gm, inputs, mode="reduce-overhead", options=EAGER))
    compiled(torch.randn(1, 4, 32))
    assert "mode='reduce-overhead' has no effect on linear stages: they run as stages='eager'" in caplog.text


def test_generate_through_module_compile() -> None:
    model = tiny_model("Llama")
    ids, mask = torch.tensor([TOKENS, [0, 0, 0, *TOKENS[:6]]]), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    model.compile(backend="neo", options=EAGER)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("options", [EAGER, pytest.param({}, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_training_keeps_its_gradients_with_one_warning(options: dict[str, Any]) -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.randn(2, 6, 32)
    model(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="neo", options=options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compiled(x).square().sum().backward()
        compiled(x)
    assert ["gradients are needed" in str(w.message) for w in warned if "neo" in str(w.message)] == [True]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_without_attention_it_stands_aside_with_one_warning() -> None:
    model = nn.Linear(3, 3)
    compiled = torch.compile(model, backend="neo", options=EAGER)
    x = torch.randn(2, 3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(x), model(x))
        compiled(x)
    assert ["no attention found" in str(w.message) for w in warned if "neo" in str(w.message)] == [True]


@torch.no_grad()
def test_refused_attention_is_named() -> None:
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="neo", options=EAGER)
    with pytest.warns(UserWarning, match="not \\[batch, heads"):
        compiled(torch.randn(2, 3, 4))


@torch.no_grad()
def test_autocast_computes_in_its_own_dtype() -> None:
    model, x = Block(), torch.randn(1, 6, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        actual = torch.compile(model, backend="neo", options=EAGER)(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "eager"}, "unknown option 'stage'; valid: device_cache, dump_graphs, host_cache, packed_linear"),
        ({"stages": "triton"}, "stages='triton', must be one of 'inductor', 'eager', 'background'"),
        ({"packed_linear": 1}, "packed_linear=1, must be one of True, False, 'auto'"),
        ({"dump_graphs": 3}, "dump_graphs=3, must be the path"),
        ({"device_cache": 1.5}, "device_cache=1.5, must be bytes"),
        ({"host_cache": "lots"}, "host_cache='lots', must be bytes"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        neo(torch.fx.symbolic_trace(nn.Identity()), [], options=options)


def test_bad_mode() -> None:
    with pytest.raises(ConfigError, match="mode='fast'"):
        neo(torch.fx.symbolic_trace(nn.Identity()), [], mode="fast")


@torch.no_grad()
def test_dump_graphs(tmp_path: Path) -> None:
    torch.compile(Block(), backend="neo", options={**EAGER, "dump_graphs": str(tmp_path)})(torch.randn(1, 4, 32))
    names = sorted(path.name.split("-", 1)[1] for path in tmp_path.iterdir())
    assert names == ["0-captured.py", "1-canonicalize.py", "2-rewrite_attention.py"]
    assert "neo.attention" in next(tmp_path.glob("*rewrite_attention.py")).read_text()


@torch.no_grad()
def test_dump_graphs_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_DUMP_GRAPHS", str(tmp_path))
    torch.compile(Block(), backend="neo", options=EAGER)(torch.randn(1, 4, 32))
    assert len(list(tmp_path.iterdir())) == 3


def test_dump_graphs_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written there"):
        dump(torch.fx.symbolic_trace(nn.ReLU()), str(tmp_path / "file" / "graphs"), "0")


@torch.no_grad()
def test_packed_linear_is_used_when_asked_for() -> None:
    model, x = Block(), torch.randn(1, 6, 32)
    compiled = torch.compile(model, backend="neo", options={**EAGER, "packed_linear": True})
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match="can pack no linear"):
        torch.compile(Block().double(), backend="neo", options={**EAGER, "packed_linear": True})(x.double())


FRESH = """
import sys, torch, torch.nn.functional as F
def f(x):
    y = torch.sin(x)
    return F.scaled_dot_product_attention(y, y, y, is_causal=True) + 1
x = torch.randn(1, 2, 5, 4)
compiled = torch.compile(f, backend="neo", options={"stages": sys.argv[1]})
torch.testing.assert_close(compiled(x), f(x))
assert "neo_compile.backend" in sys.modules
assert "neo_compile.runtime" not in sys.modules
"""


def test_fresh_process_needs_no_import_and_no_compiler() -> None:
    code = FRESH.replace("import sys,", "import os; os.environ['CXX'] = '/nonexistent'\nimport sys,")
    subprocess.run([sys.executable, "-c", code, "eager"], check=True, timeout=240)


def test_fresh_process_with_inductor() -> None:
    subprocess.run([sys.executable, "-c", FRESH, "inductor"], check=True, timeout=400)


@pytest.mark.parametrize("packed_linear", [False, True])
@torch.no_grad()
def test_inductor_stages_equal_eager(packed_linear: bool) -> None:
    model = nn.Sequential(Block(), Block(), Block())
    compiled = torch.compile(model, backend="neo", dynamic=True, options={"packed_linear": packed_linear})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for length in (7, 3, 12):
            x = torch.randn(2, length, 32)
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
        model[1].qkv.weight.mul_(2.0)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
