"""Compute every metric of a row from its samples. No other module does, so all tables show the same numbers."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from reproduce.machine.load import LIMITS
from reproduce.numbers.sources import Entry
from reproduce.records.places import Json
from reproduce.records.record import Result

Measurement = (
    float | Sequence[float]
)  # a number taken as exact, such as a published one, or samples
DEFAULTS = ("throughput", "time", "memory", "reserved", "top1_error", "utilization", "parameters")
HIGHER = ("throughput", "speedup", "utilization", "top1_accuracy")
LOWER = ("time", "step_time", "memory", "reserved", "loss", "top1_error", "model_bytes", "bubble")
BYTES = {"bytes": 1, "MiB": 2**20, "MB": 10**6, "GiB": 2**30, "GB": 10**9}

MARK = "*"
DISTURBED = (
    f"{MARK}: disturbed, and so no evidence: in a round of it, other programs had more than {LIMITS['others']:.0%} of "
    f"the cores, or other virtual machines more than {LIMITS['stolen']:.0%}; run it again when the machine is quiet"
)

Round = tuple[str, float]  # a run, and the number of a round of it


@dataclass(frozen=True)
class Reading:
    """Hold a row's value of a metric: an exact number, or samples and the rounds in which they were taken.

    The middle of samples is their median, or with `mean` their mean, or `typical` if that was chosen for a side of
    pairs. `disturbed`: others had too much of the machine.
    """

    measurement: Measurement
    unit: str = ""
    rounds: Sequence[Round] = ()
    mean: bool = False
    disturbed: bool = False
    typical: float | None = None

    @property
    def listed(self) -> Sequence[float]:
        """Give the samples; an exact number counts as one."""
        return (
            [self.measurement] if isinstance(self.measurement, (int, float)) else self.measurement
        )

    @property
    def middle(self) -> float:
        """Give the number itself, or the median or mean of the samples."""
        if self.typical is not None:
            return self.typical
        return float(statistics.mean(self.listed) if self.mean else statistics.median(self.listed))

    @property
    def samples(self) -> int | None:
        """Count the samples; None for an exact number."""
        return None if isinstance(self.measurement, (int, float)) else len(self.measurement)

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """Give the first and the third quartile; None if there are fewer than two samples."""
        if len(self.listed) < 2:
            return None
        low, _, high = statistics.quantiles(self.listed, n=4, method="inclusive")
        return low, high


class FinalError(NamedTuple):
    """Hold top-1 errors in %: mean, and standard deviation where there is more than one."""

    mean: float
    deviation: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" +- {self.deviation:.2f}")

    def allowed(self, other: "FinalError") -> float | None:
        """Return the largest difference of means that still counts as the same; None if a deviation is not known."""
        return (
            None
            if self.deviation is None or other.deviation is None
            else self.deviation + other.deviation
        )

    def verdict(self, other: "FinalError") -> str:
        """Say "same" if mean +- deviation of the two overlap, else "differs"; "" if a deviation is not known."""
        allowed = self.allowed(other)
        return (
            ""
            if allowed is None
            else "same"
            if abs(self.mean - other.mean) <= allowed
            else "differs"
        )


def final_errors(result: Result) -> list[float]:
    """Return the error after the last epoch, for every seed that was trained to the end."""
    pairs = zip(result.samples.get("epoch", []), result.samples.get("top1_error", []), strict=True)
    return [error for epoch, error in pairs if epoch == result.config["epochs"]]


def final_error(result: Result) -> FinalError | None:
    """Return mean and standard deviation over the seeds, or the published error; None if there is neither."""
    if result.status == "published":
        error = result.values.get("top1_error")
        return None if error is None else FinalError(error, result.values.get("top1_error_spread"))
    errors = final_errors(result)
    if not errors:
        return None
    return FinalError(
        statistics.mean(errors), statistics.stdev(errors) if len(errors) > 1 else None
    )


def throughput(result: Result, run: str = "") -> Reading | None:
    """Return samples per second of every step, or one exact number if only that is recorded; None without either."""
    steps = result.samples.get("step_time")
    if steps:
        speeds = [result.config["batch_size"] / each for each in steps]
        return Reading(speeds, "samples/s", _rounds(result, run), disturbed=result.disturbed)
    return _exact(result.values.get("throughput"), "samples/s")


def epoch_throughput(result: Result) -> float | None:
    """Return samples per second of the median epoch of a training; None where there is none."""
    times = result.samples.get("epoch_time")
    return float(result.values["samples_per_epoch"] / statistics.median(times)) if times else None


def speed_up(result: Result | None, base: Result | None) -> Reading | None:
    """Return a row's throughput divided by that of another row of its record; None if one has no throughput.

    Steps of one round ran next to each other, so a ratio is computed in each round. If the two rows share no round, it
    is the ratio of their medians, an exact number.
    """
    ours, theirs = (None if each is None else throughput(each) for each in (result, base))
    if ours is None or theirs is None:
        return None
    ratios = over(ours, theirs)
    paired = ratios.rounds and result is not base
    return ratios if paired else Reading(ours.middle / theirs.middle, disturbed=ratios.disturbed)


def speed_ups(results: Iterable[Result], first: Result) -> dict[str, float]:
    """Return the speed-up of each timed row over `first`, by the row's name without a slash and what follows."""
    found = {result.row.partition("/")[0]: speed_up(result, first) for result in results}
    return {row: reading.middle for row, reading in found.items() if reading is not None}


def errors(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Return the relative error of each number of `ours` against the one of the same name in `theirs`."""
    return {name: value / theirs[name] - 1 for name, value in ours.items()}


def over(reading: Reading, base: Reading) -> Reading:
    """Divide a reading by another: round by round if they share rounds, else sample by sample in order.

    An exact number is combined with every sample of the other.
    """
    mine, other = dict(zip(reading.rounds, reading.listed)), dict(zip(base.rounds, base.listed))  # noqa: B905
    shared = sorted(mine.keys() & other.keys())
    disturbed = reading.disturbed or base.disturbed
    if shared:
        return Reading([mine[at] / other[at] for at in shared], "", shared, disturbed=disturbed)
    if reading.samples is None and base.samples is None:
        return Reading(reading.middle / base.middle, disturbed=disturbed)
    count = max(len(reading.listed), len(base.listed))
    ours, theirs = (
        each.listed if each.samples else [each.middle] * count for each in (reading, base)
    )
    return Reading([one / two for one, two in zip(ours, theirs)], disturbed=disturbed)  # noqa: B905


def over_measured(emulated: Result, measured: Result | None) -> Reading | None:
    """Return a row's emulated throughput divided by its measured one; None if one of them is missing.

    It takes the emulation of this machine's own devices (`here_time`), without a described link.
    """
    steps = emulated.samples.get("here_time")
    theirs = None if measured is None else throughput(measured)
    if not steps or theirs is None:
        return None
    speeds = [emulated.config["batch_size"] / step for step in steps]
    ours = Reading(speeds, rounds=_rounds(emulated, ""), disturbed=emulated.disturbed)
    return over(ours, theirs)


def median_ratio(samples: Sequence[float], base: Sequence[float]) -> float:
    """Return the median ratio of paired samples, computed from logarithms."""
    return math.exp(
        statistics.median(math.log(one / two) for one, two in zip(samples, base, strict=True))
    )


def utilization(result: Result) -> float | None:
    """Return the mean utilization of the devices, as a share; None where it is not known."""
    values = result.values.get("utilization")
    return statistics.mean(values) if values else None


def outcome(result: Result) -> str:
    """Say in one to three words why a row has no number."""
    return result.reason if result.status == "needs devices" and result.reason else result.status


def better(metric: str) -> Literal["higher", "lower", None]:
    """Say whether higher or lower is better; None if that is not known."""
    return "higher" if metric in HIGHER else "lower" if metric in LOWER else None


def read(entry: Entry, metric: str) -> Reading | None:
    """Return a row's value of a metric; None if it has none.

    - `throughput` (and `speedup`, which is made of it): samples per second of whole steps
    - `time`: seconds per step, or per call of a benchmark
    - `memory`: bytes allocated to tensors at the peak, summed over devices
    - `reserved`: bytes that the caching allocator held, summed over devices: what the papers publish
    - `top1_error`: after the last epoch, in %, one for each seed
    - anything else: the value or the samples of that name; of a list with a value for each device, the mean
    """
    result, unit = entry.result, entry.record.unit
    run = (
        f"{entry.record.name} {entry.record.run.started}"
        if entry.record.run is not None
        else entry.record.name
    )
    if metric in ("throughput", "speedup"):
        return throughput(result, run)
    if metric in ("memory", "reserved"):
        peaks = result.values.get("peak_allocated" if metric == "memory" else "peak_reserved")
        published = None if metric == "memory" else _published_memory(result, unit)
        return _exact(sum(peaks) if peaks else published, "bytes")
    if metric == "top1_error" and "epoch" in result.samples:
        errors = final_errors(result)
        return Reading(errors, "%", mean=True) if errors else None
    for name in ("step_time", "time") if metric == "time" else (metric,):
        if result.samples.get(name):
            own, timed = (
                ("s", True) if metric == "time" else (unit.get(name, ""), name.endswith("_time"))
            )
            return Reading(
                result.samples[name],
                own,
                _rounds(result, run),
                disturbed=timed and result.disturbed,
            )
    if metric == "time":
        return _exact(result.values.get("step_time", result.values.get("time")), "s")
    value = result.values.get(metric)
    if metric == "utilization" and unit.get(metric) == "%" and value is not None:
        value /= 100
    if isinstance(value, list) and value and all(_is_number(each) for each in value):
        value = statistics.mean(value)
    return _exact(value, "share" if metric == "utilization" else unit.get(metric, ""))


def available(entries: Sequence[Entry]) -> list[str]:
    """Return the metrics that any of the rows has."""
    names = dict.fromkeys([*DEFAULTS, "speedup"])
    for entry in entries:
        names.update(dict.fromkeys([*entry.result.samples, *entry.result.values]))
    return [name for name in names if any(read(entry, name) for entry in entries)]


def _rounds(result: Result, run: str) -> Sequence[Round]:
    return [(run, number) for number in result.samples.get("round", ())]


def _exact(value: Json, unit: str) -> Reading | None:
    return Reading(float(value), unit) if _is_number(value) else None


def _is_number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _published_memory(result: Result, unit: Mapping[str, str]) -> float | None:
    """Return the published memory in bytes: as one number, or as the sum of model and activations."""
    for names in (("memory",), ("model_memory", "peak_activation_memory")):
        sizes = [(result.values.get(name), BYTES.get(unit.get(name, ""))) for name in names]
        if all(_is_number(size) and factor for size, factor in sizes):
            return float(sum(size * factor for size, factor in sizes))  # type: ignore[operator, misc]
    return None
