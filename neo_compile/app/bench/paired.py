"""Ratios of paired runs, with bounds: A and B measured in turns, compared run by run.

What a noisy machine does to one run it mostly does to the next one too, so the ratio within a pair is steadier than
either figure. Ratios multiply, so statistics are those of their logarithms: the estimate is the geometric mean, the
bounds are Student's t interval of the mean logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

# 97.5th percentiles of Student's t by degrees of freedom; beyond, the Cornish-Fisher expansion is exact to 0.1 %.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z_975 = 1.959964


@dataclass(frozen=True)
class Ratio:
    """A ratio over paired runs.

    Attributes:
        value: the geometric mean.
        low, high: its 95 % confidence bounds (2.5 % on either side); None of a single run.
    """

    value: float
    low: float | None
    high: float | None
    num_runs: int

    def __str__(self) -> str:
        return f"{self.value:.2f}" if self.low is None else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Run i of one over run i of the other. All must be positive."""
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    centre = mean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(centre), None, None, 1)
    margin = _t_975(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(centre), math.exp(centre - margin), math.exp(centre + margin), len(logs))


def _t_975(freedom: int) -> float:
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = _Z_975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
