"""Whatever mixes tokens in a linear stage is found and named; what works on each token is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.decorators import mark_unbacked
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from neo_compile.capture import capture
from neo_compile.errors import UnsupportedModelError
from neo_compile.passes.per_token import mixing_operator
from neo_compile.passes.split_stages import StageGraph
from tests.helpers.models import tiny_model

KERNEL = torch.randn(8, 8, 3)


def stage_of(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[StageGraph, dict[int, torch.Tensor]]:
    """`function` of tokens [1, T, 8] as a stage, and its parameters."""
    found: list[tuple[StageGraph, dict[int, torch.Tensor]]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., object]:
        nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
        # Everything but the tokens and their number is a parameter.
        values = {
            index: value
            for index, (node, value) in enumerate(zip(nodes, example_inputs, strict=True))
            if isinstance(node.meta["example_value"], torch.Tensor)
            and not free_unbacked_symbols(node.meta["example_value"])
        }
        found.append((StageGraph(gm, tuple(range(len(nodes))), (), 1), values))
        return gm.forward

    torch._dynamo.reset()
    x = torch.randn(1, 5, 8)
    mark_unbacked(x, 1)
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(x)
    (stage,) = found
    return stage


MIXING: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "cumsum": (lambda x: x.relu().cumsum(1) * 2, "cumsum"),
    "softmax": (lambda x: x + x.softmax(1), "softmax"),
    "mean": (lambda x: x - x.mean(1, keepdim=True), "mean"),
    "flip": (lambda x: x + x.flip(1), "flip"),
    "shift": (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1] + x, "getitem"),
    "matmul": (lambda x: (x @ x.transpose(1, 2)) @ x, "matmul"),
    "convolution": (lambda x: F.conv1d(x.transpose(1, 2), KERNEL, padding=1), "conv1d"),
    "scale": (lambda x: x / x.std(1, keepdim=True), "std"),
    "position": (lambda x: x * torch.arange(x.shape[1])[None, :, None], "arange"),
}


@pytest.mark.parametrize("case", MIXING)
def test_mixing_is_named(case: str) -> None:
    function, name = MIXING[case]
    try:
        stage, values = stage_of(function)
    except torch._dynamo.exc.UserError:
        pytest.skip(
            "this torch traces it for fixed sizes only: such a model is refused before its stages are looked at"
        )
    found = mixing_operator(stage, values)
    assert found is not None
    assert name in found


PER_TOKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norms": lambda x: F.layer_norm(x, (8,)) + x * torch.rsqrt(x.square().mean(-1, keepdim=True)),
    "softmax of features": lambda x: x.softmax(-1).cumsum(-1),
    "reshaped": lambda x: F.gelu(x.reshape(-1, 2, 4).transpose(1, 2).reshape(1, -1, 8)),
    "linear": nn.Linear(8, 8),
    "routed": lambda x: x * torch.zeros_like(x).scatter(-1, x.topk(2, -1).indices, 1.0),
}


@pytest.mark.parametrize("case", PER_TOKEN)
def test_per_token_is_accepted(case: str) -> None:
    assert mixing_operator(*stage_of(PER_TOKEN[case])) is None


class SoftmaxOfTokens(nn.Module):
    """An activation in name only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(1)


def test_a_model_that_mixes_tokens_is_refused() -> None:
    model = tiny_model("Llama")
    model.model.layers[1].mlp.act_fn = SoftmaxOfTokens()
    with pytest.raises(UnsupportedModelError, match="linear stage 2 mixes tokens outside attention: softmax in model"):
        capture(model, stages="eager")
