"""Compute the final error of a training (its top-1 error after the last epoch) over all seeds."""

import statistics
from typing import NamedTuple

from reproduce.records.record import Result


class FinalError(NamedTuple):
    """The mean of top-1 errors in %, and their standard deviation if there are several errors."""

    mean: float
    deviation: float | None = None

    def __str__(self) -> str:
        text = f"{self.mean:.2f}"
        if self.deviation is not None:
            text += f" +- {self.deviation:.2f}"
        return text

    def allowed(self, other: "FinalError") -> float | None:
        """Return how far apart two mean errors may be and still count as the same error.

        This is the sum of both standard deviations, or None if one of them is not known.
        """
        ours = self.deviation
        theirs = other.deviation
        if ours is None or theirs is None:
            return None
        return ours + theirs

    def verdict(self, other: "FinalError") -> str:
        """Return "same" if the intervals `mean +- deviation` of both errors overlap.

        Return "differs" if they do not overlap, and an empty text if one of the standard deviations
        is not known.
        """
        allowed = self.allowed(other)
        if allowed is None:
            return ""
        apart = abs(self.mean - other.mean)
        return "same" if apart <= allowed else "differs"


def final_errors(result: Result) -> list[float]:
    """Return the top-1 errors after the last epoch: one for each seed that has finished it."""
    samples = result.samples
    epochs = samples.get("epoch", [])
    errors = samples.get("top1_error", [])
    final = []
    for epoch, error in zip(epochs, errors, strict=True):
        if epoch == result.config["epochs"]:
            final.append(error)
    return final


def final_error(result: Result) -> FinalError | None:
    """Return the top-1 error of a row (a training configuration) after the last epoch.

    For a measured row, return the mean and the standard deviation over all seeds. For a published
    row, return the published error, and its published spread if there is one. If the row has no
    error, return None.
    """
    if result.status == "published":
        error = result.values.get("top1_error")
        spread = result.values.get("top1_error_spread")
        return None if error is None else FinalError(error, spread)
    errors = final_errors(result)
    if not errors:
        return None
    deviation = statistics.stdev(errors) if len(errors) > 1 else None
    return FinalError(statistics.mean(errors), deviation)
