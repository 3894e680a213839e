"""Compute the metrics of a row (a configuration), such as its throughput, from its measurements.

All tables show the same numbers, because only this module and `reproduce.numbers.accuracy` compute
metrics.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reproduce.machine.load import LIMITS
from reproduce.numbers.accuracy import final_errors
from reproduce.numbers.sources import Entry
from reproduce.records.places import Json
from reproduce.records.record import Result

# Either samples, or a number that is taken as exact, such as a published number.
Measurement = float | Sequence[float]
Numbers = Mapping[str, float]  # maps names of rows to numbers
DEFAULTS = ("throughput", "time", "memory", "reserved", "top1_error", "utilization", "parameters")
HIGHER = ("throughput", "speedup", "utilization", "top1_accuracy")
LOWER = ("time", "step_time", "memory", "reserved", "loss", "top1_error", "model_bytes", "bubble")
BYTES = {"bytes": 1, "MiB": 2**20, "MB": 10**6, "GiB": 2**30, "GB": 10**9}

MARK = "*"
DISTURBED = (
    f"{MARK}: disturbed, and so no evidence: in a round of it, other programs had more than "
    f"{LIMITS['others']:.0%} of the cores, or other virtual machines more than "
    f"{LIMITS['stolen']:.0%}; run it again when the machine is quiet"
)

Round = tuple[str, float]  # the name of a run, and the number of one of its rounds


@dataclass(frozen=True)
class Reading:
    """A row's value of a metric: an exact number, or samples of a measurement.

    Attributes:
        measurement: The exact number or the samples.
        unit: The unit of the value.
        rounds: The round in which each sample was measured. (In a round, each row runs one step.)
        mean: Whether the property `middle` is the mean of the samples instead of their median.
        disturbed: Whether other programs or virtual machines kept the machine too busy.
        typical: A number that `middle` returns instead of the mean or the median, if another
            estimate suits the samples better. Otherwise None.
    """

    measurement: Measurement
    unit: str = ""
    rounds: Sequence[Round] = ()
    mean: bool = False
    disturbed: bool = False
    typical: float | None = None

    @property
    def mark(self) -> str:
        """Return an asterisk if other programs disturbed the measurement, else an empty text."""
        return MARK if self.disturbed else ""

    @property
    def listed(self) -> Sequence[float]:
        """Return the samples. An exact number counts as one sample."""
        if isinstance(self.measurement, (int, float)):
            return [self.measurement]
        return self.measurement

    @property
    def middle(self) -> float:
        """Return one number for tables: `typical` if it is set, or else the mean or the median."""
        if self.typical is not None:
            return self.typical
        average = statistics.mean if self.mean else statistics.median
        return float(average(self.listed))

    @property
    def samples(self) -> int | None:
        """Return the number of samples, or None for an exact number."""
        if isinstance(self.measurement, (int, float)):
            return None
        return len(self.measurement)

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """Return the first and the third quartile, or None if there are fewer than two samples."""
        if len(self.listed) < 2:
            return None
        low, _, high = statistics.quantiles(self.listed, n=4, method="inclusive")
        return low, high


def throughput(result: Result, run: str = "") -> Reading | None:
    """Return a row's throughput in samples per second, or None if the row has none.

    A measured row has a number for each step. A published or predicted row has one exact number.
    `run` is the name of the run. It distinguishes the rounds of this run from those of other runs.
    """
    timed = _speeds(result, "step_time", run)
    return timed or _exact(result.values.get("throughput"), "samples/s")


def _speeds(result: Result, times: str, run: str) -> Reading | None:
    """Return the samples/s of each step from a row's step times called `times`, if it has any."""
    steps = result.samples.get(times)
    if not steps:
        return None
    batch_size = result.config["batch_size"]
    speeds = [batch_size / seconds for seconds in steps]
    rounds = _rounds(result, run)
    return Reading(speeds, "samples/s", rounds, disturbed=result.disturbed)


def throughputs(results: Iterable[Result]) -> dict[str, float]:
    """Return a dictionary from the name of each row with a throughput to its samples per second."""
    found = {}
    for result in results:
        speed = throughput(result)
        if speed is not None:
            found[result.row] = speed.middle
    return found


def epoch_throughput(result: Result) -> float | None:
    """Return the throughput of the median epoch of a training; None if no epoch was timed."""
    times = result.samples.get("epoch_time")
    if not times:
        return None
    return float(result.values["samples_per_epoch"] / statistics.median(times))


def speed_up(result: Result | None, base: Result | None) -> Reading | None:
    """Return the throughput of a row, divided by the throughput of a baseline row.

    A ratio is computed for each round, in which each row runs one step, because steps of a round
    run at nearly the same time. If the two rows have no round in common, the speed-up is the ratio
    of their medians, an exact number. The result is None if a row is None or has no throughput.
    """
    ours = None if result is None else throughput(result)
    theirs = None if base is None else throughput(base)
    if ours is None or theirs is None:
        return None
    ratios = over(ours, theirs)
    if ratios.rounds and result is not base:
        return ratios
    ratio = ours.middle / theirs.middle
    return Reading(ratio, disturbed=ratios.disturbed)


def speed_ups(results: Iterable[Result], first: Result) -> dict[str, float]:
    """Return a dictionary from the names of timed rows to their speed-ups over the row `first`.

    The keys are the names of the rows, without an ending that begins with a slash, such as `/mb`.
    """
    readings = {}
    for result in results:
        name = result.row.partition("/")[0]
        readings[name] = speed_up(result, first)
    return {name: reading.middle for name, reading in readings.items() if reading is not None}


def errors(ours: Numbers, theirs: Numbers) -> dict[str, float]:
    """Return the relative error of each number in `ours`: 0.1 if it is 10 % above `theirs`."""
    return {name: value / theirs[name] - 1 for name, value in ours.items()}


def over(reading: Reading, base: Reading) -> Reading:
    """Divide the value of one row by the value of another row.

    If the rows have rounds in common, samples of the same round are divided by each other.
    Otherwise the samples are paired in order: the first ones, the second ones, and so on.
    If one value is an exact number, a ratio is computed with each sample of the other value.
    """
    disturbed = reading.disturbed or base.disturbed
    # The lists can have different lengths, because an exact number has no rounds.
    in_rounds = dict(zip(reading.rounds, reading.listed, strict=False))
    base_in_rounds = dict(zip(base.rounds, base.listed, strict=False))
    shared = sorted(in_rounds.keys() & base_in_rounds.keys())
    if shared:
        ratios = [in_rounds[each] / base_in_rounds[each] for each in shared]
        return Reading(ratios, "", shared, disturbed=disturbed)
    if reading.samples is None and base.samples is None:
        return Reading(reading.middle / base.middle, disturbed=disturbed)
    count = max(len(reading.listed), len(base.listed))
    ours = reading.listed if reading.samples else [reading.middle] * count
    theirs = base.listed if base.samples else [base.middle] * count
    ratios = []
    for one, other in zip(ours, theirs, strict=False):
        ratios.append(one / other)
    return Reading(ratios, disturbed=disturbed)


def over_measured(emulated: Result, measured: Result | None) -> Reading | None:
    """Return a row's emulated throughput divided by its measured throughput.

    The emulated throughput comes from the record's list `here_time`. It has the emulated times of
    steps on devices like those that were measured: CPU devices, for example, copy nothing. The
    result is None if one of the two throughputs is missing.
    """
    ours = _speeds(emulated, "here_time", "")
    theirs = None if measured is None else throughput(measured)
    if ours is None or theirs is None:
        return None
    return over(ours, theirs)


def median_ratio(samples: Sequence[float], base: Sequence[float]) -> float:
    """Return the median ratio of paired samples, computed as exp(median(log(ratios)))."""
    logs = []
    for one, other in zip(samples, base, strict=True):
        logs.append(math.log(one / other))
    return math.exp(statistics.median(logs))


def utilization(result: Result) -> float | None:
    """Return the mean utilization of the devices, from 0 to 1; None if it is not known."""
    values = result.values.get("utilization")
    return statistics.mean(values) if values else None


def outcome(result: Result) -> str:
    """Return a few words that say why a row has no number, such as "failed"."""
    if result.status == "needs devices" and result.reason:
        return result.reason
    return result.status


def better(metric: str) -> Literal["higher", "lower", None]:
    """Return whether higher or lower values of a metric are better; None if this is not known."""
    if metric in HIGHER:
        return "higher"
    if metric in LOWER:
        return "lower"
    return None


def read(entry: Entry, metric: str) -> Reading | None:
    """Return a row's value of a metric; None if the row has no such value.

    - `throughput`, and `speedup`, which is computed from it: samples per second of whole steps
    - `time`: seconds per step, or per call of a benchmark
    - `memory`: bytes allocated to tensors at the peak, summed over devices
    - `reserved`: bytes that the caching allocator reserved, summed over devices; the papers publish
      this number
    - `top1_error`: the error after the last epoch, in %, one number for each seed
    - any other name: the samples or the value with this name; if the value is a list with a number
      for each device, the mean of the list
    """
    result = entry.result
    if metric in ("throughput", "speedup"):
        return throughput(result, _run_of(entry))
    if metric == "memory":
        name = "allocated" if entry.record.kind == "predicted" else "peak_allocated"
        return _memory(result.values.get(name), None)
    if metric == "reserved":
        published = _published_memory(result, entry.record.unit)
        return _memory(result.values.get("peak_reserved"), published)
    if metric == "top1_error" and "epoch" in result.samples:
        finals = final_errors(result)
        return Reading(finals, "%", mean=True) if finals else None
    return _sampled(entry, metric) or _valued(entry, metric)


def available(entries: Sequence[Entry]) -> list[str]:
    """Return the names of the metrics for which at least one of the rows has a value."""
    names = dict.fromkeys([*DEFAULTS, "speedup"])
    for entry in entries:
        names.update(dict.fromkeys(entry.result.samples))
        names.update(dict.fromkeys(entry.result.values))

    def is_known(name: str) -> bool:
        return any(read(entry, name) for entry in entries)

    return [name for name in names if is_known(name)]


def _run_of(entry: Entry) -> str:
    """Return a unique name for the run from which a row comes: the record's name and the start."""
    record = entry.record
    if record.run is None:
        return record.name
    return f"{record.name} {record.run.started}"


def _memory(peaks: Json, published: float | None) -> Reading | None:
    """Return the sum of the devices' memory peaks or, if there are none, the published number."""
    has_peaks = isinstance(peaks, list) and peaks
    return _exact(sum(peaks) if has_peaks else published, "bytes")


def _sampled(entry: Entry, metric: str) -> Reading | None:
    """Return the samples of a metric from a row's results, or None if there are no such samples."""
    result = entry.result
    names = ("step_time", "time") if metric == "time" else (metric,)
    for name in names:
        samples = result.samples.get(name)
        if not samples:
            continue
        if metric == "time":
            unit = "s"
            timed = True
        else:
            unit = entry.record.unit.get(name, "")
            timed = name.endswith("_time")
        rounds = _rounds(result, _run_of(entry))
        return Reading(samples, unit, rounds, disturbed=timed and result.disturbed)
    return None


def _valued(entry: Entry, metric: str) -> Reading | None:
    """Return a row's value of a metric, or None. If the value is a list, return its mean."""
    values = entry.result.values
    unit = entry.record.unit.get(metric, "")
    if metric == "time":
        return _exact(values.get("step_time", values.get("time")), "s")
    value = values.get(metric)
    if metric == "utilization":
        if unit == "%" and value is not None:
            value /= 100
        unit = "share"
    if isinstance(value, list) and value and all(_is_number(each) for each in value):
        value = statistics.mean(value)
    return _exact(value, unit)


def _rounds(result: Result, run: str) -> Sequence[Round]:
    return [(run, number) for number in result.samples.get("round", ())]


def _exact(value: Json, unit: str) -> Reading | None:
    return Reading(float(value), unit) if _is_number(value) else None


def _is_number(value: Json) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)


def _published_memory(result: Result, unit: Mapping[str, str]) -> float | None:
    """Return the published memory in bytes: one number, or the sum of model and activations."""
    for names in (("memory",), ("model_memory", "peak_activation_memory")):
        sizes = []
        for name in names:
            size: Json = result.values.get(name)
            factor = BYTES.get(unit.get(name, ""))
            if _is_number(size) and factor:
                sizes.append(size * factor)
        if len(sizes) == len(names):
            return float(sum(sizes))
    return None
