"""Make the tables on the pages about prediction, from records in results/predicted and from research/p40/fit.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reproduce.error import Error
from reproduce.predict.older import OLDER
from reproduce.records.published import published
from reproduce.records.record import load
from reproduce.tables.layout import Table
from reproduce.tables.predicted import speed_up_errors, throughput_errors


def prediction_block(root: Path, name: str) -> str:
    """Return the table `name` of the checkout at `root` as Markdown, without its heading.

    Raises:
        Error: there is no such table.
    """
    if name not in BLOCKS:
        raise Error(f"a block is from predicted/{name}; after the slash name one of {', '.join(BLOCKS)}")
    _, _, below = BLOCKS[name](root).markdown().partition("\n\n")  # the page has headings of its own
    return f"\n{below.strip()}\n\n"


def models(root: Path) -> Table:
    """Return the model and those that it is compared with: errors in rows of older versions, and in today's."""
    headings = ["model", "constants\nfitted"]
    for rows_of in ("older rows", "today's rows"):
        headings += [f"{rows_of}:\nsamples/s", "speed-ups", "within 10%"]
    rows = []
    for name, model in _fit(root)["models"].items():
        cells = []
        for table in ("history", "today"):
            throughput, speed_up = model[table].get("throughput"), model[table]["speed-up"]
            cells += [
                "" if throughput is None else f"{throughput['median']:.1%} ({throughput['largest']:.0%})",
                f"{speed_up['median']:.1%} ({speed_up['largest']:.0%})",
                f"{speed_up['within 10%']} of {speed_up['rows']}",
            ]
        rows.append([name, str(model["fitted"]), *cells])
    now = _fit(root)["models"]["this model"]["today"]["speed-up"]
    notes = [
        "errors: the median, and in brackets the largest; within 10%: speed-ups over each table's first row",
        f"the targets for today's speed-ups: a median of 3% (reached: {now['median']:.2%}), and nine of ten within 10% "
        f"(reached: {now['within 10%'] / now['rows']:.0%})",
    ]
    return Table("Errors of predictions in published rows", headings, rows, notes)


def _history(root: Path) -> Table:
    rows = []
    for name in OLDER:
        record = load(root / "results" / "predicted" / f"{name}-p40x8.json")
        table = (record.results[0].published or "").partition("/")[0]
        papers = {result.row: result.values["throughput"] for result in published(table).results}
        off, speed_ups = throughput_errors(record), speed_up_errors(record)
        for result in record.results:
            error = f"{speed_ups[result.row]:+.1%}" if result.row in speed_ups else ""
            numbers = f"{papers[result.row]:.1f}", f"{result.values['throughput']:.1f}", f"{off[result.row]:+.1%}"
            rows.append([f"{name} {result.row}", *numbers, error])
    headings = ["row", "samples/s published", "predicted", "error", "error of the speed-up"]
    return Table("Rows of older versions", headings, rows)


def _timings(root: Path) -> Table:
    rows = []
    for timing in _fit(root)["timings"]:
        off = " ".join(f"{error:+.0%}" for error in timing["errors"])
        rows.append([timing["source"], timing["model"], " ".join(f"{ms:g}" for ms in timing["ms"]), off])
    return Table("Timings", ["source", "model", "ms, published", "error"], rows, left=2)


def _held_out(root: Path) -> Table:
    rows = []
    for name, found in _fit(root)["held out"].items():
        throughput = found["history"]["throughput"]
        numbers = f"{found['compute']:.2f}", f"{found['memory']:.2f}", f"{found['timings']:.1%}"
        rows.append([name, *numbers, f"{throughput['median']:.1%} ({throughput['largest']:.0%})"])
    headings = ["left out", "compute", "memory", "root mean square of its own errors", "older rows: samples/s"]
    return Table("Held out", headings, rows)


def _fit(root: Path) -> Any:
    return json.loads((root / "research" / "p40" / "fit.json").read_text(encoding="utf-8"))


BLOCKS: dict[str, Callable[[Path], Table]] = {
    "models": models,
    "history": _history,
    "fit": _timings,
    "held out": _held_out,
}
