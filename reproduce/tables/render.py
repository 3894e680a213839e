"""Generate text from records: a page for each record, and the marked blocks in README.md and docs/.

A block is the text between two comments, the first of which names its content:

    <!-- from records: amoebanet-speed -->
    ...
    <!-- end -->

- an experiment's name: the tables of its run that `ranked` puts first; followed by "/short", only two of them;
- a name such as "benchmarks/overlap": the table of that record in results/benchmarks, made by `benchmarks/render.py`.

If there is no record yet, the block says so.
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
from reproduce.records.record import Record, load, ranked
from reproduce.tables.all import about_run, document, tables

FOLDERS = ("measured", "predicted")
SHORT = (LIKE_PUBLISHED, "batch")  # the groups of rows that the README shows
NOTHING = "Nothing measured is committed yet.\n"
MARK = re.compile(
    r"(?P<begin><!-- from records: (?P<name>.*?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)


Maker = Callable[
    [Path, str], str
]  # given a page and a block's name behind the slash, returns the block's text


def render(root: Path, benchmarks: Maker | None = None) -> dict[Path, str]:
    """Return every file below `root` that is generated, or has a generated block, with its new text.

    `benchmarks` makes the blocks of that folder. It is an argument because that folder imports this package.
    It raises `Error` if a record is broken, or a block's name is unknown.
    """
    records = {
        path: load(path)
        for name in FOLDERS
        for path in sorted((root / "results" / name).rglob("*.json"))
    }
    files = {path.with_suffix(".md"): document(record) for path, record in records.items()}
    makers: dict[str, Maker] = {
        **{name: functools.partial(_experiment_block, name, records) for name in EXPERIMENTS},
        **({} if benchmarks is None else {"benchmarks": benchmarks}),
    }

    def block(match: re.Match[str]) -> str:
        kind, _, name = match["name"].partition("/")
        if kind == "benchmarks" and benchmarks is None:
            return match[0]
        if kind not in makers:
            raise Error(
                f"{page}: a block is from {match['name']!r}; name one of {', '.join(makers)}"
            )
        return f"{match['begin']}{makers[kind](page, name)}{match['end']}"

    for page in sorted([root / "README.md", *(root / "docs").rglob("*.md")]):
        text = page.read_text(encoding="utf-8")
        if MARK.search(text):
            files[page] = MARK.sub(block, text)
    return files


def stale(files: Mapping[Path, str]) -> list[Path]:
    """Return the files whose text on disk is not the new one."""
    return [
        path
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def _experiment_block(
    experiment: str, records: Mapping[Path, Record], page: Path, part: str
) -> str:
    """Return the tables of the run of the experiment that counts.

    The part "short" has the rows like the published ones and those at equal batch size, without notes.
    """
    record = next(iter(ranked([each for each in records.values() if each.run], experiment)), None)
    if record is None or record.run is None:
        return NOTHING
    run, path = record.run, next(path for path, each in records.items() if each is record)
    if part == "short":
        chosen = [each for group in SHORT for each in tables(record, experiment, group)]
        kept = [
            replace(each, notes=[note for note in each.notes if note == DISTURBED])
            for each in chosen
        ]
        parts = [each.markdown(level=3).strip() for each in kept]
    else:
        parts = [table.markdown(level=3) for table in tables(record, experiment)]
    about = about_run(record, run)
    when = run.started[:10] + f" ({run.state})" * (run.state != "finished")
    under = f"Run on {when} with torch {run.versions.get('torch')}, {about['devices']}; {about['machine']}"
    return (
        "\n\n".join([*parts, f"{under}; [more of this run]({link(page, path.with_suffix('.md'))})"])
        + "\n\n"
    )


def link(page: Path, path: Path) -> str:
    """Return the path of a file relative to the page."""
    return Path(os.path.relpath(path, page.parent)).as_posix()
