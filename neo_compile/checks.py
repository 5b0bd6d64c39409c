"""Checks of options: what every configuration, and the command line, allow. Standard library only.

A refusal names the option, its value and what is allowed. `bool` is no number, and no number may be infinite or NaN;
numpy's scalars are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn

from neo_compile.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers that an option may have: `value in numbers`, and in words `str(numbers)`.

    Attributes:
        at_least, above, at_most: bounds; `above` is not allowed itself.
        is_whole: only integers, and no other type.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    is_whole: bool = False

    def __contains__(self, value: object) -> bool:
        number: Any = value
        if isinstance(value, bool) or not isinstance(value, Integral if self.is_whole else Real):
            return False
        return (
            (self.is_whole or _is_finite(number))
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
        )

    def __str__(self) -> str:
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("of at least", self.at_least), ("above", self.above), ("at most", self.at_most))
            if bound is not None
        ]
        return " ".join(["a whole number" if self.is_whole else "a finite number", " and ".join(bounds)]).rstrip()


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond all floats
        return False


ANY_INTEGER = Numbers(is_whole=True)
COUNT = Numbers(at_least=1, is_whole=True)
NOT_NEGATIVE_INTEGER = Numbers(at_least=0, is_whole=True)
NOT_NEGATIVE = Numbers(at_least=0)
POSITIVE = Numbers(above=0)


def refuse(name: str, value: object, rule: str) -> NoReturn:
    """Raises ConfigError: this option must be something else."""
    raise ConfigError(f"{name}={value!r}, must be {rule}")


def check_numbers(config: object, allowed: Numbers, *names: str, or_none: bool = False) -> None:
    """Raises ConfigError unless the fields `names` of `config` are `allowed`, or None where that is allowed too."""
    for name in names:
        value = getattr(config, name)
        if value not in allowed and not (or_none and value is None):
            refuse(field_name(config, name), value, f"{allowed}, or None" if or_none else str(allowed))


def check_flags(config: object, *names: str) -> None:
    """Raises ConfigError unless the fields `names` of `config` are True or False."""
    for name in names:
        check_choice(field_name(config, name), getattr(config, name), (True, False))


def check_choice(name: str, value: object, valid: Sequence[object]) -> None:
    """Raises ConfigError unless `value` is one of `valid`."""
    if not any(value is choice or (isinstance(value, type(choice)) and value == choice) for choice in valid):
        refuse(name, value, f"one of {', '.join(map(repr, valid))}")


def check_choices(name: str, values: object, valid: Sequence[object]) -> None:
    """Raises ConfigError unless `values` is a tuple, list or set of at least one of `valid`."""
    if not isinstance(values, tuple | list | set | frozenset) or not values:
        refuse(name, values, f"a tuple or list of at least one of {', '.join(map(repr, valid))}")
    for value in values:
        check_choice(name, value, valid)


def field_name(config: object, name: str) -> str:
    """How a message calls a field of `config`."""
    return f"{type(config).__name__}.{name}"
