"""What people do to a model before they compile it, or around: adapters, int8 linears, tied weights, modes, configs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CompileConfig

from neo_compile.capture import capture
from tests.helpers.models import eager_logits, tiny_model
from tests.test_backend_families import TOKENS, assert_all_sites, watched
from tests.test_capture import run_ragged

EAGER = {"stages": "eager"}
CLOSE = {"atol": 2e-4, "rtol": 2e-4}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def model() -> Any:
    return tiny_model("Llama")


def ids() -> torch.Tensor:
    return torch.tensor([TOKENS])


def assert_compiled_equals_eager(model: Any, sites_of: Any = None) -> None:
    """Logits of plain torch.compile, every layer a site."""
    expected = eager_logits(model, TOKENS)
    compiled, returned = watched(model)
    with torch.no_grad():
        actual = compiled(input_ids=ids(), use_cache=False).logits[0]
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert_all_sites(returned, sites_of or model)


def assert_captured_equals_eager(model: Any) -> None:
    """Logits of the runtime's capture on a prefill and two decodes."""
    expected = eager_logits(model, TOKENS)
    (actual,) = run_ragged(capture(model, stages="eager"), [TOKENS], [[7], [1], [1]])
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_lora(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install peft)")
    plain = eager_logits(model, TOKENS)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    assert (eager_logits(adapted, TOKENS) - plain).abs().max() > 0.1
    assert_compiled_equals_eager(adapted, sites_of=model)
    assert_captured_equals_eager(adapted.get_base_model())


class Int8Linear(nn.Module):
    """Weights in int8 with a scale per row, as in bitsandbytes and friends."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Int8Tensor(torch.Tensor):
    """A weight that dequantises itself when it is used, as in torchao."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Int8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Int8Tensor:
        return cls(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values, args[0].scale)
        plain = torch.utils._pytree.tree_map_only(cls, lambda x: x.values.to(x.scale.dtype) * x.scale, args)
        return function(*plain, **(kwargs or {}))


@torch.no_grad()
def quantise(model: Any, kind: str) -> Any:
    """The model with its MLPs' weights in int8."""
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            quantised = Int8Linear(getattr(layer.mlp, name))
            if kind == "module":
                setattr(layer.mlp, name, quantised)
            else:
                weight = Int8Tensor(quantised.weight, quantised.scale)
                getattr(layer.mlp, name).weight = nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.parametrize("kind", ["module", "tensor"])
def test_quantised_linears_are_left_as_they_are(model: Any, kind: str) -> None:
    plain = eager_logits(model, TOKENS)
    quantise(model, kind)
    assert (eager_logits(model, TOKENS) - plain).abs().max() > 1e-3
    assert_compiled_equals_eager(model)
    assert_captured_equals_eager(model)


@pytest.mark.slow
@torch.no_grad()
def test_quantised_linears_with_inductor(model: Any) -> None:
    expected = eager_logits(quantise(model, "module"), TOKENS)
    actual = torch.compile(model, backend="neo")(input_ids=ids(), use_cache=False).logits[0]
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torchao(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    plain = eager_logits(model, TOKENS)
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    assert (eager_logits(model, TOKENS) - plain).abs().max() > 1e-3
    assert_compiled_equals_eager(model)
    assert_captured_equals_eager(model)


def test_tied_weights_stay_tied(model: Any) -> None:
    assert model.lm_head.weight is model.model.embed_tokens.weight
    compiled, returned = watched(model)
    with torch.no_grad():
        compiled(input_ids=ids(), use_cache=False)
        model.lm_head.weight.mul_(1.5)
        actual = compiled(input_ids=ids(), use_cache=False).logits[0]
    torch.testing.assert_close(actual, eager_logits(model, TOKENS), **CLOSE)
    assert len(returned) == 1
    staged = capture(model, stages="eager")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.7)
    (captured,) = run_ragged(staged, [TOKENS], [[9]])
    torch.testing.assert_close(captured, eager_logits(model, TOKENS), **CLOSE)


@torch.no_grad()
def test_autocast(model: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(input_ids=ids(), use_cache=False).logits
        compiled, returned = watched(model)
        actual = compiled(input_ids=ids(), use_cache=False).logits
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=0.1, rtol=0.05)
    assert_all_sites(returned, model)


def test_inference_mode(model: Any) -> None:
    compiled, returned = watched(model)
    with torch.inference_mode():
        for length in (9, 5, 1):
            actual = compiled(input_ids=ids()[:, :length], use_cache=False).logits
            torch.testing.assert_close(actual, model(input_ids=ids()[:, :length], use_cache=False).logits, **CLOSE)
    assert_all_sites(returned, model)


@torch.no_grad()
def test_module_compile_and_optimized_module(model: Any) -> None:
    expected = model(input_ids=ids(), use_cache=False).logits
    optimized = torch.compile(model, backend="neo", options=EAGER)
    torch.testing.assert_close(optimized(input_ids=ids(), use_cache=False).logits, expected, **CLOSE)
    assert optimized.config is model.config
    model.compile(backend="neo", options=EAGER)
    torch.testing.assert_close(model(input_ids=ids(), use_cache=False).logits, expected, **CLOSE)


def test_compile_config(model: Any) -> None:
    """transformers compiles for itself with a static cache; its config's mode comes with the backend."""
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options["cache_implementation"] = "static"
    expected = model.generate(ids(), disable_compile=True, **options)
    config = CompileConfig(backend="neo", mode=None, options=EAGER, fullgraph=False)
    config._compile_all_devices = True
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="neo leaves")
        actual = model.generate(ids(), compile_config=config, **options)
    assert torch.equal(actual, expected)
