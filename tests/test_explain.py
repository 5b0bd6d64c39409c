"""explain: what would be cut, shared and refused, in a report that reads as text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neo_compile.explanation import explain
from tests.helpers.models import tiny_model


def test_the_packages_name_stays_a_function() -> None:
    import neo_compile

    assert neo_compile.explain is explain
    assert neo_compile.explain is explain  # importing the function must not put a module of its name in its place
    from neo_compile import explain as imported

    assert imported is explain


def test_capture_report() -> None:
    model = tiny_model("Gemma2", num_layers=4).train()
    report = explain(model)
    assert model.training
    assert report.kind == "runtime capture"
    (region,) = report.regions
    assert [site.window for site in region.sites] == [6, None, 6, None]
    assert region.modules == tuple(f"model.layers.{layer}.self_attn" for layer in range(4))
    assert region.stage_keys == (0, 1, 1, 1, 2)
    text = str(report)
    for part in (
        "Gemma2ForCausalLM: runtime capture, 1 graph, 4 sites",
        "5 linear stages, 3 to compile",
        "sites 0, 2: 4 query / 2 KV heads, head_dim 16, scale 0.25, window 6, softcap 5, float32  "
        "(model.layers.*.self_attn)",
        "sites 1, 3: 4 query / 2 KV heads, head_dim 16, scale 0.25, no window, softcap 5, float32",
        "matrix products with prepacked weights",
    ):
        assert part in text


def test_refused_model() -> None:
    report = explain(tiny_model("Bloom", n_layer=2, n_head=4))
    assert report.reason is not None
    assert report.num_sites == 0
    assert "refused: BloomForCausalLM adds ALiBi biases" in str(report)


def test_call_report() -> None:
    report = explain(tiny_model("Llama"), input_ids=torch.arange(9)[None])
    assert report.kind == "torch.compile"
    assert report.num_sites == 2
    assert report.regions[0].reason is None
    assert (
        "sites 0, 1: 4 query / 2 KV heads, head_dim 16, scale 0.25, no window, float32  (model.layers.*.self_attn)"
        in (str(report))
    )


def test_graph_left_whole() -> None:
    report = explain(torch.nn.Linear(3, 3), torch.ones(1, 3))
    assert "left whole: no attention found in the graph" in str(report)


def test_refused_attention() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x) + F.scaled_dot_product_attention(x[0], x[0], x[0])

    report = explain(Attention(), torch.randn(1, 2, 3, 4))
    (region,) = report.regions
    assert len(region.sites) == 1
    assert len(region.refusals) == 1
    assert "not a site: " in str(report)


def test_equal_sites_are_one_line() -> None:
    report = explain(tiny_model("Llama", num_layers=5))
    lines = [line for line in str(report).splitlines() if "site" in line][1:]
    assert len(lines) == 1
    assert lines[0].strip().startswith("sites 0-4: 4 query / 2 KV heads")


def test_experts_are_named() -> None:
    text = str(explain(tiny_model("GptOss")))
    assert "weights: three dimensions (experts): chosen by token, not one matrix" in text


@pytest.mark.parametrize(
    ("how", "call"),
    [
        ("model.compile", False),
        ("model.compile", True),
        ("part.compile", False),
        ("compiled part", False),
        ("compiled model", True),
    ],
)
def test_nothing_of_its_own_is_compiled(how: str, call: bool) -> None:
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        compiled.append(gm)
        return gm.forward

    model = tiny_model("Llama")
    if how == "model.compile":
        model.compile(backend=backend)
    elif how == "part.compile":
        model.model.layers[0].compile(backend=backend)
    elif how == "compiled part":
        model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    report = explain(model, input_ids=torch.arange(5)[None]) if call else explain(model)
    assert report.reason is None
    assert report.num_sites == 2
    assert not compiled
    model(input_ids=torch.arange(5)[None], use_cache=False)
    assert compiled
