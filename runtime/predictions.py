"""What the cost model promised and what was measured, iteration by iteration, and how large the errors were."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_KEPT = 16_384  # the newest iterations that an engine remembers


class Prediction(NamedTuple):
    """One iteration, milliseconds from its first copy to its tokens."""

    strategy: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """The prediction's absolute error, as a share of what was measured."""
        return abs(self.predicted_ms - self.measured_ms) / self.measured_ms


class ErrorSummary(NamedTuple):
    """Absolute errors of some iterations, as shares of the measured times.

    Attributes:
        bias: (sum of predictions) / (sum of measurements) - 1.
    """

    num_iterations: int
    p50: float
    p90: float
    p99: float
    bias: float

    @classmethod
    def of(cls, predictions: Sequence[Prediction]) -> ErrorSummary:
        """Of at least one prediction."""
        errors = sorted(prediction.error for prediction in predictions)
        p50, p90, p99 = (errors[min(int(share * len(errors)), len(errors) - 1)] for share in (0.5, 0.9, 0.99))
        predicted_ms = sum(prediction.predicted_ms for prediction in predictions)
        return cls(len(errors), p50, p90, p99, predicted_ms / sum(each.measured_ms for each in predictions) - 1.0)


def error_summaries(predictions: Iterable[Prediction]) -> dict[str, ErrorSummary]:
    """By strategy, and "all"; empty if there are no predictions."""
    by_strategy: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        for name in (prediction.strategy, "all"):
            by_strategy.setdefault(name, []).append(prediction)
    return {name: ErrorSummary.of(each) for name, each in sorted(by_strategy.items(), key=lambda item: item[0])}
