"""Every error that a user can cause. Standard library only: the scheduler imports it without torch."""

from __future__ import annotations

from collections.abc import Iterable


class NeoError(Exception):
    """Base of all errors raised on purpose."""


class UnsupportedModelError(NeoError, ValueError):
    """The model cannot be served exactly, for a named reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConfigError(NeoError, ValueError):
    """An option has an unknown name or an impossible value."""

    @classmethod
    def unknown(cls, kind: str, name: object, valid: Iterable[str]) -> ConfigError:
        """An unknown `kind` ("option", "policy", ...); the message lists the valid ones."""
        return cls(f"unknown {kind} {name!r}; valid: {', '.join(sorted(valid))}")


class CapacityError(NeoError, ValueError):
    """Something can never fit: the message names what it needs, the limit, and the knob that raises the limit."""

    def __init__(
        self, message: str, *, need: int | None = None, limit: int | None = None, knob: str | None = None
    ) -> None:
        super().__init__(message)
        self.need = need
        self.limit = limit
        self.knob = knob
