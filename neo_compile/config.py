"""Options of the compiler: `torch.compile(model, backend="neo", options={...})`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from neo_compile.errors import ConfigError

StageKind = Literal["inductor", "eager"]
PackedLinear = bool | Literal["auto"]

STAGE_KINDS: tuple[StageKind, ...] = ("inductor", "eager")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of the backend.

    Attributes:
        stages: how linear stages run; "eager" needs no C++ compiler.
        packed_linear: keep a second, prepacked copy of weights for the CPU's matrix kernels; "auto" leaves it off in
            `torch.compile` and turns it on where it pays in a capture for the runtime.
        dump_graphs: folder that every graph is written to, before and after the passes.
    """

    stages: StageKind = "inductor"
    packed_linear: PackedLinear = "auto"
    dump_graphs: str | None = None

    def __post_init__(self) -> None:
        check_choice("stages", self.stages, STAGE_KINDS)
        check_choice("packed_linear", self.packed_linear, (True, False, "auto"))
        if self.dump_graphs is not None and not isinstance(self.dump_graphs, str):
            raise ConfigError(f"dump_graphs={self.dump_graphs!r}, must be the path of a folder")

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
