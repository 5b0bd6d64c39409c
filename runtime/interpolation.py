"""Piecewise-linear tables in plain Python: one bisection and a few multiplications a look-up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from neo_compile.errors import ConfigError


def _check_axis(name: str, points: Sequence[float]) -> list[float]:
    if not points or any(b <= a for a, b in pairwise(points)) or points[0] < 0:
        raise ConfigError(f"table {name!r}: points {list(points)!r}, must be non-negative and increasing")
    return [float(point) for point in points]


def _locate(points: list[float], x: float) -> tuple[int, int, float]:
    """The two points beside x and x's share of the way between them (above 1 beyond the last point)."""
    if len(points) == 1:
        return 0, 0, 0.0
    right = min(max(bisect_right(points, x), 1), len(points) - 1)
    low, high = points[right - 1], points[right]
    return right - 1, right, max(0.0, (x - low) / (high - low))


class Table1D:
    """y over x: linear between points, flat below the first, the last slope beyond the last; 0 at x <= 0."""

    def __init__(self, name: str, points: Sequence[float], values: Sequence[float]) -> None:
        self.points = _check_axis(name, points)
        self.values = [float(value) for value in values]
        if len(self.values) != len(self.points):
            raise ConfigError(f"table {name!r}: {len(self.values)} values for {len(self.points)} points")

    def __call__(self, x: float) -> float:
        if x <= 0:
            return 0.0
        left, right, share = _locate(self.points, x)
        low = self.values[left]
        return max(0.0, low + (self.values[right] - low) * share)


class Table2D:
    """z over (x, y): bilinear, with the same edges as `Table1D` on both axes; 0 at x <= 0."""

    def __init__(self, name: str, xs: Sequence[float], ys: Sequence[float], rows: Sequence[Sequence[float]]) -> None:
        self.xs = _check_axis(f"{name} (first axis)", xs)
        self.ys = _check_axis(f"{name} (second axis)", ys)
        self.rows = [[float(value) for value in row] for row in rows]
        if len(self.rows) != len(self.xs) or any(len(row) != len(self.ys) for row in self.rows):
            raise ConfigError(f"table {name!r}: must be {len(self.xs)} rows of {len(self.ys)} values")

    def __call__(self, x: float, y: float) -> float:
        if x <= 0:
            return 0.0
        top, bottom, share_x = _locate(self.xs, x)
        left, right, share_y = _locate(self.ys, y)
        first, second = self.rows[top], self.rows[bottom]
        low = first[left] + (first[right] - first[left]) * share_y
        high = second[left] + (second[right] - second[left]) * share_y
        return max(0.0, low + (high - low) * share_x)
