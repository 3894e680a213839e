"""Work out the error that a training ends with, over its seeds, and whether two of them are the same.

Two errors are the same where mean +- standard deviation of the one overlaps that of the other, that is where the means
differ by no more than the sum of the deviations.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from reproduce.records.record import Result


class FinalError(NamedTuple):
    """Hold top-1 errors in %: mean, and standard deviation where there is more than one."""

    mean: float
    deviation: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" +- {self.deviation:.2f}")

    def allowed(self, other: FinalError) -> float | None:
        """Return how far the two may be from each other to be the same; None where a deviation is not known."""
        return None if self.deviation is None or other.deviation is None else self.deviation + other.deviation

    def verdict(self, other: FinalError) -> str:
        """Say whether the two are the same within their deviations; nothing where these are not known."""
        allowed = self.allowed(other)
        return "" if allowed is None else "same" if abs(self.mean - other.mean) <= allowed else "differs"


def final_errors(result: Result) -> list[float]:
    """Return the error after the last epoch, for every seed that was trained to the end."""
    pairs = zip(result.samples.get("epoch", []), result.samples.get("top1_error", []), strict=True)
    return [error for epoch, error in pairs if epoch == result.config["epochs"]]


def final_error(result: Result) -> FinalError | None:
    """Return mean and sample standard deviation over the seeds, or what was published; None where there is neither."""
    if result.status == "published":
        error = result.values.get("top1_error")
        return None if error is None else FinalError(error, result.values.get("top1_error_spread"))
    errors = final_errors(result)
    if not errors:
        return None
    return FinalError(statistics.mean(errors), statistics.stdev(errors) if len(errors) > 1 else None)
