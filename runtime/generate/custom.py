"""`generate` on a twin of the model: the user's model stays as it is, only this call's forwards are served.

A twin is a shallow copy that shares modules, parameters and configuration, and has a forward of its own. It is made for
each call, so that what the user changes on the model in between is seen.
"""

from __future__ import annotations

import copy
from typing import Any

from neo_compile.runtime.generate.enabling import CUSTOM_GENERATE, EnabledModel, enabled_model, serving_options


def twin_of(model: Any, enabled: EnabledModel) -> Any:
    """A shallow copy of `model` whose forward is `enabled`."""
    twin = copy.copy(model)
    twin.__dict__["forward"] = enabled
    twin.__dict__["_compiled_call_impl"] = None
    return twin


def generate(
    model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
) -> Any:
    """For `model.generate(..., custom_generate=neo_compile.generate)`: the decoding method that would have run, on neo.

    The model is enabled with default options for its `generate` calls of this kind only (`stats(model)` tells).
    """
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    enabled = enabled_model(model)
    if enabled is None:
        enabled = model.__dict__[CUSTOM_GENERATE] = EnabledModel(model, serving_options())
    mode = generation_config.get_generation_mode(kwargs.get("assistant_model"))
    method = getattr(type(model), GENERATION_MODES_MAPPING[mode])
    return method(
        twin_of(model, enabled),
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        **kwargs,
    )
