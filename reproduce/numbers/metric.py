"""Read one metric from rows, whatever kind of record they come from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from reproduce.numbers.significance import Measurement
from reproduce.numbers.sources import Entry
from reproduce.records.decode import Json

__all__ = ["DEFAULTS", "Reading", "available", "better", "over", "read"]

DEFAULTS = ("throughput", "time", "memory", "reserved", "top1_error", "utilization", "parameters")
HIGHER = ("throughput", "speedup", "utilization", "top1_accuracy")
LOWER = ("time", "step_time", "memory", "reserved", "loss", "top1_error", "model_bytes", "bubble")
BYTES = {"bytes": 1, "MiB": 2**20, "MB": 10**6, "GiB": 2**30, "GB": 10**9}


Round = tuple[str, str, float]  # record, when its run started, number of the round


@dataclass(frozen=True)
class Reading:
    """Hold what a row says of a metric: an exact number or samples, and the rounds of a run that these are of."""

    measurement: Measurement
    unit: str
    rounds: Sequence[Round] = field(default_factory=tuple)

    @property
    def middle(self) -> float:
        """Give the number itself, or the median of the samples."""
        exact = isinstance(self.measurement, (int, float))
        return float(self.measurement) if exact else statistics.median(self.measurement)  # type: ignore[arg-type]

    @property
    def samples(self) -> int | None:
        """Count the samples; None for an exact number."""
        return None if isinstance(self.measurement, (int, float)) else len(self.measurement)


def better(metric: str) -> Literal["higher", "lower", None]:
    """Say which way is better; None where neither is, or nobody knows."""
    return "higher" if metric in HIGHER else "lower" if metric in LOWER else None


def read(entry: Entry, metric: str) -> Reading | None:
    """Return what a row says of a metric; None where it says nothing.

    - `throughput` (and `speedup`, which is made of it): samples per second of whole steps
    - `time`: seconds per step, or per call of a benchmark
    - `memory`: bytes allocated to tensors at the peak, summed over devices
    - `reserved`: bytes that the caching allocator held, summed over devices: what the papers publish
    - anything else: the value or the series of that name; of a value for each device, the mean
    """
    result, unit = entry.result, entry.record.unit
    steps = result.samples.get("step_time", [])
    if metric in ("throughput", "speedup"):
        if steps:
            times = [result.config["batch_size"] / seconds for seconds in steps]
            return Reading(times, "samples/s", _rounds(entry))
        return _exact(result.values.get("throughput"), "samples/s")
    if metric == "time":
        taken = steps or result.samples.get("time", [])
        if taken:
            return Reading(taken, "s", _rounds(entry))
        return _exact(result.values.get("step_time"), "s")
    if metric == "memory":
        return _exact(_sum(result.values.get("peak_allocated")), "bytes")
    if metric == "reserved":
        return _exact(_sum(result.values.get("peak_reserved")) or _published_memory(entry), "bytes")
    if metric in result.samples:
        return Reading(result.samples[metric], unit.get(metric, ""), _rounds(entry))
    found = result.values.get(metric)
    if metric == "utilization" and unit.get(metric) == "%" and found is not None:
        found /= 100
    if isinstance(found, list) and found and all(_is_number(each) for each in found):
        found = statistics.mean(found)
    return _exact(found, "share" if metric == "utilization" else unit.get(metric, ""))


def over(reading: Reading, base: Reading) -> Reading:
    """Return a reading divided by another of its side, round by round where they share rounds."""
    ours, theirs = reading.measurement, base.measurement
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return Reading(ours / theirs, "")
    mine = dict(zip(reading.rounds, _listed(ours), strict=False))
    other = dict(zip(base.rounds, _listed(theirs), strict=False))
    shared = sorted(mine.keys() & other.keys())
    if shared:
        return Reading([mine[at] / other[at] for at in shared], "", shared)
    count = max(len(_listed(ours)), len(_listed(theirs)))
    pairs = zip(_repeated(ours, count), _repeated(theirs, count), strict=False)
    return Reading([one / two for one, two in pairs], "")


def available(entries: Sequence[Entry]) -> list[str]:
    """Return the metrics of which any of the rows says something."""
    names = {name: None for name in (*DEFAULTS, "speedup")}
    for entry in entries:
        names.update(dict.fromkeys((*entry.result.samples, *entry.result.values)))
    return [name for name in names if any(read(entry, name) for entry in entries)]


def _rounds(entry: Entry) -> Sequence[Round]:
    """Name the rounds so that those of different runs are different."""
    record = entry.record
    started = record.run.started if record.run is not None else ""
    return [(record.name, started, number) for number in entry.result.samples.get("round", ())]


def _exact(value: Json, unit: str) -> Reading | None:
    return Reading(float(value), unit) if _is_number(value) else None


def _is_number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _sum(value: Json) -> float | None:
    """Return the sum over devices."""
    return sum(value) if isinstance(value, list) and value else value if _is_number(value) else None


def _published_memory(entry: Entry) -> float | None:
    """Return the published memory in bytes: as printed, or of model and activations together."""
    for names in (("memory",), ("model_memory", "peak_activation_memory")):
        found = [entry.result.values.get(name) for name in names]
        factors = [BYTES.get(entry.record.unit.get(name, "")) for name in names]
        if all(map(_is_number, found)) and all(factors):
            return sum(float(value) * factor for value, factor in zip(found, factors, strict=True) if value and factor)
    return None


def _listed(measurement: Measurement) -> Sequence[float]:
    return [measurement] if isinstance(measurement, (int, float)) else measurement


def _repeated(measurement: Measurement, count: int) -> Sequence[float]:
    """Let an exact number stand beside each sample; samples stand for themselves."""
    return [measurement] * count if isinstance(measurement, (int, float)) else measurement
