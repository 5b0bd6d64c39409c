"""Options of the compiler: `torch.compile(model, backend="neo", options={...})`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from neo_compile.errors import ConfigError

StageKind = Literal["inductor", "eager", "background"]
PackedLinear = bool | Literal["auto"]

STAGE_KINDS: tuple[StageKind, ...] = ("inductor", "eager", "background")
GENERATE_POLICIES = ("neo", "device-only", "host-only")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
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
            raise ConfigError(f"dump_graphs={self.dump_graphs!r}, must be the path of a folder")
        for size in (self.device_cache, self.host_cache):
            if size is not None:
                parse_bytes(size)
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


def check_choice(name: str, value: object, valid: Sequence[object]) -> None:
    """Raises ConfigError unless `value` is one of `valid`."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in valid):
        raise ConfigError(f"{name}={value!r}, must be one of {', '.join(map(repr, valid))}")


def check_mode(mode: str | None) -> None:
    """Raises ConfigError for a mode that torch.compile does not know."""
    if mode is not None:
        check_choice("mode", mode, MODES)


def parse_bytes(value: int | str) -> int:
    """Bytes of `value`: an integer, or a string such as "512MiB", "2 GB", "1e6".

    Raises:
        ConfigError: not a size, or negative.
    """
    if isinstance(value, int):
        size: float = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([KMG]I?)?B?\s*", value, flags=re.IGNORECASE)
        if match is None:
            raise ConfigError(f"not a size in bytes: {value!r} (examples: 1073741824, '512MiB', '2GB')")
        size = float(match[1]) * _UNITS[(match[2] or "").upper()]
    if size < 0:
        raise ConfigError(f"a size in bytes must not be negative, got {value!r}")
    return int(size)
