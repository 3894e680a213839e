"""Write the results of a command in one of four formats.

The formats text and Markdown are for people. CSV and JSON are for programs: they have one entry for
each number. All commands use the same fields for an entry, which `docs/results.md` explains.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from reproduce.machine.load import LIMITS
from reproduce.numbers.metrics import Reading, available, outcome, read, speed_up
from reproduce.numbers.sources import Entry
from reproduce.records.places import Json
from reproduce.records.record import Result

if TYPE_CHECKING:
    from reproduce.predict.largest import Largest
    from torchgpipe.plan import Plan
    from torchgpipe.plan.search.alternatives import Alternative
    from torchgpipe.plan.search.trial import Candidate

SCHEMA = 1
FORMATS = ("text", "markdown", "csv", "json")
FIELDS = (
    "experiment",
    "row",
    "side",
    "name",
    "kind",
    "scale",
    "device",
    "engine",
    "metric",
    "unit",
    "relative",
    "value",
    "lower",
    "upper",
    "samples",
    "disturbed",
    "reason",
    "ratio",
    "low",
    "high",
    "p",
    "verdict",
    "needed",
)
SPREAD = "spread"  # the value that has quartiles and counts of summarized samples
RUN_ON = ("cpu", "cuda")
Number = dict[str, Json]  # by `FIELDS`
Numbers = Iterator[Number]


def written(style: str, numbers: Iterable[Number], text: str, markdown: str, **more: Json) -> str:
    """Return the results of a command in the format `style`.

    Args:
        style: The format: "text", "markdown", "csv" or "json".
        numbers: The numbers that CSV and JSON contain, each as a dictionary of fields.
        text: The results as text.
        markdown: The results as Markdown.
        more: Further fields of the JSON object.
    """
    if style == "text":
        return text
    if style == "markdown":
        return markdown
    lines = []
    for number in numbers:
        line = {name: number.get(name) for name in FIELDS}
        lines.append(line)
    if style == "json":
        content = {"schema": SCHEMA, **more, "numbers": lines}
        return json.dumps(content, indent=1, allow_nan=False) + "\n"
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def of_reading(reading: Reading | None, result: Result | None) -> Number:
    """Return a dictionary of the fields with which CSV and JSON describe a value of a row.

    Args:
        reading: The value, or None if there is none.
        result: The result of the row to which the value belongs. If None, the value counts as
            measured, and it is not known whether other programs disturbed the measurement.
    """
    found: Number = {"kind": "measured"}
    disturbance_is_known = False
    if result is not None:
        found["kind"] = "emulated" if result.emulated else result.status
        found["scale"] = result.scale
        found["device"] = result.device
        if result.device in RUN_ON:  # a published or predicted row was run by no engine
            found["engine"] = result.engine
        disturbance_is_known = not LIMITS.keys().isdisjoint(result.samples)
    if reading is not None:
        lower, upper = reading.quartiles or (None, None)
        found["unit"] = reading.unit
        found["value"] = reading.middle
        found["samples"] = reading.samples
        found["disturbed"] = reading.disturbed if disturbance_is_known else None
        found["lower"] = lower
        found["upper"] = upper
    return found


def of_entry(entry: Entry) -> Numbers:
    """Yield a dictionary of fields, for CSV and JSON, for each value of a row (a configuration).

    A value is a number, or text such as the outcome of a check. If the row has no values, yield one
    dictionary, which says why there is none.
    """
    result = entry.result
    about: Number = {"experiment": result.experiment, "row": result.row}
    if entry.hardware:
        about["name"] = entry.hardware
    readings = {}
    for metric in available([entry]):
        if metric != "speedup":
            readings[metric] = read(entry, metric)
    base = _base(entry)
    if base is not None:
        readings["speedup"] = speed_up(result, base)
    for metric, reading in readings.items():
        number = {**about, "metric": metric, **of_reading(reading, result)}
        if metric in result.values.get(SPREAD, {}):
            number["lower"], number["upper"], number["samples"] = result.values[SPREAD][metric]
        yield number
    words = {name: value for name, value in result.values.items() if isinstance(value, str)}
    for metric, value in words.items():
        fields = {**of_reading(None, result), "unit": None, "value": value}
        yield {**about, "metric": metric, **fields, "reason": result.reason}
    if not readings and not words:
        reason = result.reason or outcome(result)
        yield {**about, **of_reading(None, result), "reason": reason}


def _base(entry: Entry) -> Result | None:
    """Return the result of the baseline row, to which the speed-up of a row is relative.

    Return None if the row has no baseline, or if the record does not contain the baseline.
    """
    if entry.result.over is None:
        return None
    key = replace(entry.result, row=entry.result.over).key
    for other in entry.record.results:
        if other.key == key:
            return other
    return None


def of_plan(plan: "Plan", title: str) -> Numbers:
    """Yield what a plan predicts for each number of devices, as dictionaries of fields.

    The predictions are for the best pipeline and, for comparison, for data parallel training and
    for FSDP. `title` becomes the field `experiment`.
    """
    batch_size = plan.candidates[0].setup.batch_size
    for n, found in plan.by_devices.items():
        best = found.best
        about = {"experiment": title, "row": f"pipeline n={n}", "kind": "predicted"}
        yield from _of_prediction(about, best, batch_size)
        if best is not None:
            yield from _of_setup(about, best)
        for other in plan.beside[n]:
            about = {"experiment": title, "row": f"{other.way} n={n}", "kind": "predicted"}
            yield from _of_prediction(about, other, batch_size)


def of_largest(found: "Sequence[Largest]", title: str) -> Numbers:
    """Yield the sizes, the parameters and the memory of the largest models that fit in memory.

    One model is for naive model parallelism, and one is for a pipeline. A size is, for example, the
    depth of the model. Each number is a dictionary of fields, in which `title` becomes the field
    `experiment`.
    """
    for each in found:
        about = {"experiment": title, "row": each.how, "kind": "predicted"}
        if each.sizes is None:
            yield {**about, "reason": "no size fits"}
            continue
        yield {**about, "metric": "size", "value": list(each.sizes)}
        parameters = {**about, "metric": "parameters", "unit": "count", "value": each.parameters}
        if each.beyond is None:
            parameters["reason"] = "at least: no larger size was tried"
        yield parameters
        yield {**about, "metric": "memory", "unit": "bytes", "value": each.needed}


def _of_prediction(
    about: Number, found: "Candidate | Alternative | None", batch_size: int
) -> Numbers:
    if found is None:
        yield {**about, "reason": "no room"}
        return
    speed = batch_size / found.seconds
    yield {**about, "metric": "time", "unit": "s", "value": found.seconds}
    yield {**about, "metric": "throughput", "unit": "samples/s", "value": speed}
    yield {**about, "metric": "memory", "unit": "bytes", "value": found.peak}


def _of_setup(about: Number, best: "Candidate") -> Numbers:
    setup = best.setup
    yield {**about, "metric": "balance", "value": list(setup.balance)}
    yield {**about, "metric": "chunks", "value": len(setup.sizes)}
    yield {**about, "metric": "checkpoint", "value": setup.checkpoint}
    yield {**about, "metric": "schedule", "value": setup.full_schedule.name}
    yield {**about, "metric": "bubble", "unit": "share", "value": best.bubble}
