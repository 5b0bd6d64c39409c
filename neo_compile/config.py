"""Options of the compiler: `torch.compile(model, backend="neo", options={...})`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from neo_compile.checks import NOT_NEGATIVE_INTEGER, check_choice, refuse
from neo_compile.errors import ConfigError

StageKind = Literal["inductor", "eager", "background"]
PackedLinear = bool | Literal["auto"]

STAGE_KINDS: tuple[StageKind, ...] = ("inductor", "eager", "background")
GENERATE_POLICIES = ("neo", "device-only", "host-only")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([KMG]I?)?B?\s*", flags=re.IGNORECASE)
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of the backend.

    Attributes:
        stages: how linear stages run; "eager" needs no C++ compiler; "background" starts with eager ones and replaces
            each once Inductor has compiled it in another process.
        packed_linear: keep a second, prepacked copy of weights for the CPU's matrix kernels; "auto" leaves it off in
            `torch.compile` and turns it on where it pays in a capture for the runtime.
        dump_graphs: folder that every graph is written to, before and after the passes.
        device_cache, host_cache, policy: for `generate` of a compiled Hugging Face model; see `neo_compile.enable`.
    """

    stages: StageKind = "inductor"
    packed_linear: PackedLinear = "auto"
    dump_graphs: str | None = None
    device_cache: int | str | None = None
    host_cache: int | str | None = None
    policy: str = "neo"

    def __post_init__(self) -> None:
        check_choice("stages", self.stages, STAGE_KINDS)
        check_choice("packed_linear", self.packed_linear, (True, False, "auto"))
        if self.dump_graphs is not None and not isinstance(self.dump_graphs, str):
            refuse("dump_graphs", self.dump_graphs, "the path of a folder")
        for name in ("device_cache", "host_cache"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name), name)
        check_choice("policy", self.policy, GENERATE_POLICIES)

    def for_generate(self) -> dict[str, Any]:
        """The options that `neo_compile.enable` takes, by name."""
        return {name: getattr(self, name) for name in ("device_cache", "host_cache", "policy", "stages")}

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Options by name.

        Raises:
            ConfigError: an unknown name or value; the message lists the valid ones.
        """
        options = options or {}
        valid = [option.name for option in fields(cls)]
        for name in options:
            if name not in valid:
                raise ConfigError.unknown("option", name, valid)
        return cls(**options)


def check_mode(mode: str | None) -> None:
    """Raises ConfigError for a mode that torch.compile does not know."""
    if mode is not None:
        check_choice("mode", mode, MODES)


def parse_bytes(value: int | str, name: str = "size") -> int:
    """Bytes of `value`: an integer, or a string such as "512MiB", "2 GB", "1e6". Messages call it `name`.

    Raises:
        ConfigError: not a size, or negative.
    """
    if value in NOT_NEGATIVE_INTEGER:
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    size = float(match[1]) * _UNITS[(match[2] or "").upper()] if match else math.inf
    if not math.isfinite(size):
        refuse(name, value, "bytes: a whole number of at least 0, or a string such as '1073741824', '512MiB' or '2GB'")
    return int(size)
