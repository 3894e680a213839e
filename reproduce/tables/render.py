"""Generate text from records: a page for each record, and marked blocks in README.md and docs/.

A record is a file of results. A block is the text of a page between two comments. The first comment
names the content of the block:

    <!-- from records: amoebanet-speed -->
    ...
    <!-- end -->

The names after `from records:` are of four kinds:

- The name of an experiment, such as "amoebanet-speed": the block gets the tables of one run of the
  experiment, the best one (`ranked`).
- The name of an experiment, followed by "/short": the block gets only two of these tables.
- The name of an experiment, followed by "/predicted": the block gets a table of predictions beside
  the published numbers and the numbers of runs at the published size. Each machine has a column.
- A name like "benchmarks/overlap": the block gets the table of the record "overlap" in the folder
  results/benchmarks. `benchmarks/render.py` makes this table.

If there is no record yet, the block says so. Blocks that are generated from docstrings instead
begin with `<!-- from docstrings: benchmarks/api -->`.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import LIKE_PUBLISHED
from reproduce.numbers.metrics import DISTURBED
from reproduce.records.record import Record, is_continued, load, ranked
from reproduce.tables.all import about_run, document, tables
from reproduce.tables.layout import many

FOLDERS = ("measured", "predicted")
SHORT = (LIKE_PUBLISHED, "batch")
"""The groups of rows that the README shows, in short blocks."""
# Of the notes below its tables, a short block keeps those that have one of these texts.
KEPT = re.compile("|".join(map(re.escape, (DISTURBED, "emul./meas.", "Speed-ups are over "))))
NOTHING = "Nothing measured is committed yet.\n"
MARK = re.compile(
    r"(?P<begin><!-- from (?:records|docstrings): (?P<name>.*?) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)

# A function that returns the new text of a generated block. Its arguments are the path of the page
# that has the block, and the part of the block's name after the slash.
Maker = Callable[[Path, str], str]
Texts = dict[Path, str]
Records = Mapping[Path, Record]


def render(root: Path, benchmarks: Maker | None = None) -> Texts:
    """Return the new text of every file that is generated, or that has a generated block.

    The keys of the result are the paths of the files. Nothing is written.

    Args:
        root: The top folder of the repository.
        benchmarks: The function that makes blocks whose name begins with "benchmarks/". It is an
            argument, because `reproduce` must not import the folder `benchmarks`.

    Raises:
        Error: A record is broken, or a block's name is unknown.
    """
    records = {}
    files: Texts = {}
    for folder in FOLDERS:
        for path in sorted((root / "results" / folder).rglob("*.json")):
            record = load(path)
            records[path] = record
            files[path.with_suffix(".md")] = document(record)
    makers: dict[str, Maker] = {}
    for name in EXPERIMENTS:
        makers[name] = functools.partial(_experiment_block, name, records)
    if benchmarks is not None:
        makers["benchmarks"] = benchmarks
    pages = sorted([root / "README.md", *(root / "docs").rglob("*.md")])
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if MARK.search(text):
            files[page] = _with_new_blocks(text, page, makers)
    return files


def _with_new_blocks(text: str, page: Path, makers: Mapping[str, Maker]) -> str:
    """Replace the generated blocks in the text of a page, and return the new text.

    Args:
        text: The text of the page.
        page: The path of the page.
        makers: Functions that generate blocks. The key of a function is the part before the slash
            in the names of its blocks. Without a function for "benchmarks", the blocks of this name
            stay as they are.
    """

    def block(match: re.Match[str]) -> str:
        kind, _, name = match["name"].partition("/")
        make = makers.get(kind)
        if make is not None:
            return match["begin"] + make(page, name) + match["end"]
        if kind == "benchmarks":
            return match[0]
        known = ", ".join(makers)
        raise Error(
            f"{page}: a generated block has the unknown name {match['name']!r}; use one of {known}"
        )

    return MARK.sub(block, text)


def stale(files: Mapping[Path, str]) -> list[Path]:
    """Return the paths of the files whose text on disk differs from the new text in `files`."""
    found = []
    for path, text in files.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            found.append(path)
    return found


def _experiment_block(experiment: str, records: Records, page: Path, part: str) -> str:
    """Return the generated block of an experiment: the tables of its best run (`ranked`).

    If `part` is "short", the block has only two tables: one with the rows that repeat published
    rows, and one with the rows of equal batch size. Their notes are left out, except those that
    explain a mark or the abbreviation of a column. If `part` is "predicted", the block has the
    tables of predictions instead.
    """
    if part == "predicted":
        return _predicted_block(experiment, records)
    runs = [record for record in records.values() if record.run is not None]
    first = next(iter(ranked(runs, experiment)), None)
    if first is None or first.run is None:
        return NOTHING
    run = first.run
    path = next(path for path, record in records.items() if record is first)
    if part == "short":
        parts = _short_tables(first, experiment)
    else:
        parts = []
        for table in tables(first, experiment):
            block = table.markdown(level=3)
            parts.append(block)
    about = about_run(first, run)
    when = run.started[:10]
    if run.state != "finished":
        when += f" ({run.state})"
    # The time of a run that was continued would include the pause.
    if run.ended is not None and not is_continued(first):
        when += f" in {many(max(1, round(run.seconds / 60)), 'minute')}"
    more = link(page, path.with_suffix(".md"))
    where = f"at {about['devices']}; {about['machine']}"
    under = f"These rows were run on {when} with torch {run.versions.get('torch')}, {where}"
    parts.append(f"{under}. [This page]({more}) says more about the run.")
    return "\n\n".join(parts) + "\n\n"


def _predicted_block(experiment: str, records: Records) -> str:
    """Return the tables of an experiment's predictions."""
    parts = []
    for record in records.values():
        if record.kind == "predicted" and record.results[0].experiment == experiment:
            parts += [table.markdown(level=3).strip() for table in tables(record)]
    return "\n\n".join(parts) + "\n\n" if parts else NOTHING


def _short_tables(record: Record, experiment: str) -> list[str]:
    parts = []
    for group in SHORT:
        for table in tables(record, experiment, group):
            notes = list(filter(KEPT.search, table.notes))
            short = replace(table, notes=notes)
            parts.append(short.markdown(level=3).strip())
    return parts


def link(page: Path, path: Path) -> str:
    """Return the target of a link from a page to a file: a path relative to the page's folder."""
    relative = os.path.relpath(path, page.parent)
    return Path(relative).as_posix()
