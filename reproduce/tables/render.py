"""Make from records all that is written down of them: a page for each record, and blocks in README.md and docs/.

A block stands between two comments, which name what it shows, and is replaced as a whole:

    <!-- from records: amoebanet-speed -->
    ...
    <!-- end -->

It shows the experiment's tables of the newest committed run that was finished; where there is none, it says so. A name
such as "benchmarks/overlap" shows the table of that result in results/benchmarks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.records.record import Record, load
from reproduce.tables.all import document, facts, tables
from reproduce.tables.benchmark_block import benchmark_block
from reproduce.tables.prediction_docs import rendered

__all__ = ["MARK", "render", "render_blocks", "stale"]

MARK = re.compile(r"(?P<begin><!-- from records: (?P<name>.*?) -->\n)(?P<old>.*?)(?P<end><!-- end -->)", re.DOTALL)


def render(root: Path, known: Callable[[Path], bool] = Path.is_file) -> dict[Path, str]:
    """Return every file below `root` that is made from records, or has such a block, with its whole new text.

    Raises:
        Error: a record is broken, or a block names no experiment.
    """
    records = {path: load(path) for path in sorted((root / "results" / "measured").rglob("*.json")) if known(path)}
    files = {path.with_suffix(".md"): document(record) for path, record in records.items()}
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if MARK.search(text):
            files[page] = render_blocks(text, page, records)
    page = root / "docs" / "prediction.md"
    if page.exists():
        files[page] = rendered(files.get(page, page.read_text(encoding="utf-8")), root / "results" / "predicted")
    return files


def stale(files: dict[Path, str]) -> list[Path]:
    """Return the files that differ from what they should be."""
    return [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def render_blocks(text: str, page: Path, records: dict[Path, Record]) -> str:
    """Return the text of `page` with every block made anew.

    Raises:
        Error: a block names no experiment.
    """

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name.startswith("benchmarks/"):
            return f"{match['begin']}{benchmark_block(page, name.removeprefix('benchmarks/'))}{match['end']}"
        if name not in EXPERIMENTS:
            raise Error(f"{page}: a block is from {name!r}; name one of {', '.join(EXPERIMENTS)}")
        return f"{match['begin']}{_block(name, page, records)}{match['end']}"

    return MARK.sub(block, text)


def _block(experiment: str, page: Path, records: dict[Path, Record]) -> str:
    newest = _newest(experiment, records.items())
    if newest is None:
        return "Nothing measured is committed yet.\n"
    path, record = newest
    link = Path(os.path.relpath(path.with_suffix(".md"), page.parent)).as_posix()
    parts = [table.markdown(level=3) for table in tables(record, experiment)]
    return "\n\n".join([*parts, f"{_circumstances(record)}; [more of this run]({link})"]) + "\n\n"


def _newest(experiment: str, records: Iterable[tuple[Path, Record]]) -> tuple[Path, Record] | None:
    """Return the finished run that was started last of those that measured something of the experiment."""
    found = [
        (record.run.started, path, record)
        for path, record in records
        if record.run is not None
        and record.run.state == "finished"
        and any(result.experiment == experiment and result.status == "measured" for result in record.results)
    ]
    if not found:
        return None
    _, path, record = max(found, key=lambda each: (each[0], each[1]))
    return path, record


def _circumstances(record: Record) -> str:
    """Say in a line where a run was made."""
    lines: Sequence[str] = facts(record)
    machine = next(line for line in lines if line.startswith("machine: "))
    assert record.run is not None
    return f"Measured {record.run.started[:10]} with torch {record.run.versions.get('torch')} on {lines[0]}; {machine}"
