"""Write what a command found: as text or Markdown for people; as CSV or JSON, a line for each number, for programs.

All commands have one schema, which `docs/results.md` explains.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from reproduce.machine.load import LIMITS
from reproduce.numbers.metrics import Reading, available, outcome, read, speed_up
from reproduce.numbers.sources import Entry
from reproduce.records.places import Json
from reproduce.records.record import Result
from reproduce.tables.layout import Table

if TYPE_CHECKING:
    from torchgpipe.plan import Plan

SCHEMA = 1
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
Number = dict[str, Json]  # by `FIELDS`


def written(style: str, numbers: Iterable[Number], text: str, markdown: str, **more: Json) -> str:
    """Return the numbers as 'csv' or 'json', `more` beside them in JSON; or one of the texts."""
    lines = [{name: each.get(name) for name in FIELDS} for each in numbers]
    if style == "json":
        return (
            json.dumps({"schema": SCHEMA, **more, "numbers": lines}, indent=1, allow_nan=False)
            + "\n"
        )
    if style != "csv":
        return markdown if style == "markdown" else text
    writer = csv.DictWriter(file := io.StringIO(), fieldnames=FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def of_reading(reading: Reading | None, result: Result | None) -> Number:
    """Return the fields of a value and of its row; where they are not known, it was measured here."""
    found: Number = {"kind": "measured"}
    if result is not None:
        found = {"kind": "emulated" if result.emulated else result.status}
        found |= {name: getattr(result, name) for name in ("scale", "device", "engine")}
    if reading is not None:
        found |= {"unit": reading.unit, "value": reading.middle, "samples": reading.samples}
        known = result is not None and not LIMITS.keys().isdisjoint(result.samples)
        lower, upper = reading.quartiles or (None, None)
        found |= {"disturbed": reading.disturbed if known else None, "lower": lower, "upper": upper}
    return found


def of_entry(entry: Entry) -> Iterator[Number]:
    """Yield a line for each number of a row, or one if it has none."""
    result, about = entry.result, {"experiment": entry.result.experiment, "row": entry.result.row}
    about |= {"name": entry.hardware} if entry.hardware else {}
    bases = [
        x for x in entry.record.results if x.key == (*result.key[:3], result.over, *result.key[4:])
    ]
    found = {name: read(entry, name) for name in available([entry]) if name != "speedup"}
    found |= {"speedup": speed_up(result, bases[0])} if bases else {}
    for metric, reading in found.items():
        yield {**about, "metric": metric, **of_reading(reading, result)}
    if not found:
        yield {**about, **of_reading(None, result), "reason": result.reason or outcome(result)}


def of_cells(table: Table, **about: Json) -> Iterator[Number]:
    """Yield a line for each cell of a table of settings. Whole numbers are numbers. Without `about` rows are names."""
    for first, *cells in table.rows:
        for heading, cell in zip(table.headings[1:], cells, strict=True):
            value = int(cell) if cell.isdecimal() else " ".join(cell.split())
            yield {
                **(about or {"experiment": first}),
                "row": first,
                "metric": heading,
                "value": value,
            }


def of_plan(plan: "Plan", title: str) -> Iterator[Number]:
    """Yield what is predicted of the best pipeline on each number of devices, and of data parallel training."""
    batch_size = plan.candidates[0].setup.batch_size
    for (n, found), other in zip(plan.by_devices.items(), plan.beside, strict=True):
        for name, each in (("pipeline", found.best), ("data parallel", other)):
            about = {"experiment": title, "row": f"{name} n={n}", "kind": "predicted"}
            if each is None:
                yield {**about, "reason": "no room"}
                continue
            values = {
                "s": ("time", each.seconds),
                "samples/s": ("throughput", batch_size / each.seconds),
            }
            for unit, (metric, value) in {**values, "bytes": ("memory", each.peak)}.items():
                yield {**about, "metric": metric, "unit": unit, "value": value}
            if each is found.best:
                setup = each.setup
                chosen = {
                    "balance": [*setup.balance],
                    "chunks": len(setup.sizes),
                    "checkpoint": setup.checkpoint,
                }
                chosen["schedule"] = setup.lists.name
                yield from (
                    {**about, "metric": metric, "value": value} for metric, value in chosen.items()
                )
                yield {**about, "metric": "bubble", "unit": "share", "value": each.bubble}
