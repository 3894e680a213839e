"""Make a plain table of results: a line for each row, and a column for each kind of number.

This table is for records (files of results) without a special table. Examples are the papers'
tables, the records of `benchmarks`, and runs of experiments that this program does not know.
"""

import textwrap
from collections.abc import Iterator, Sequence
from statistics import median

from reproduce.numbers.match import grouped
from reproduce.records.places import Json
from reproduce.records.record import Record, Result
from reproduce.tables.layout import (
    WIDTH,
    Column,
    GiB,
    Table,
    by_value,
    in_lines,
    number,
    ratio,
    table,
)
from reproduce.tables.output import SPREAD

Results = Sequence[Result]
Columns = list[Column[Result]]
WORDS = 20
"""The width of a cell of words, in characters."""
# The fields of a configuration that are shown if they differ between the rows, and their headings.
SETTINGS = {"partitions": "n", "chunks": "m", "batch_size": "batch", "hardware": "hardware"}


def _name(text: str) -> str:
    """Break a name into lines of at most `WORDS` characters, but never inside a word."""
    return textwrap.fill(text, WORDS, break_long_words=False, break_on_hyphens=False)


CASE = Column[Result]("case", lambda result: _name(result.experiment), left=True)
ROW = Column[Result]("row", lambda result: _name(result.row), left=True)


def plain_tables(record: Record, results: Results) -> list[Table]:
    """Return a plain table of results, or several tables if it is too wide for a terminal.

    If the record has several experiments, the first column names the experiment.
    """
    if not results:
        return []
    cases = {result.experiment for result in results}
    naming = [CASE, ROW] if len(cases) > 1 else [ROW]
    columns: Columns = []
    for name, heading in SETTINGS.items():
        if _differ(results, name):
            columns.append(_setting(heading, name))
    names = _names(record, results)
    columns += [_values(record, name) for name in names]
    columns.append(Column("status", _status))
    columns.append(Column("reason", _reason))
    *others, last = _side_by_side(naming, columns, results)
    made = [table(record.title, each, results) for each in others]
    notes = [*_about_source(record), *_about_values(record, results, names)]
    made.append(table(record.title, last, results, notes))
    return made


def _side_by_side(naming: Columns, columns: Columns, results: Results) -> list[Columns]:
    """Divide the columns of a table into groups that are narrow enough for a terminal.

    Args:
        naming: The columns that name a row. Each group begins with them.
        columns: The other columns.
        results: The rows of the table.
    """
    groups = [[*naming]]
    for column in columns:
        wider = [*groups[-1], column]
        lines = table("", wider, results).text().splitlines()
        if len(wider) > len(naming) + 1 and max(map(len, lines)) > WIDTH:
            wider = [*naming, column]
            groups.append(wider)
        groups[-1] = wider
    return groups


def _differ(results: Results, name: str) -> bool:
    """Return whether rows differ in the field `name` of their configuration.

    If the field's values are lists, return False, because lists are not shown.
    """
    found = []
    for result in results:
        value = result.config.get(name)
        if isinstance(value, list):
            return False
        if value is not None and value not in found:
            found.append(value)
    return len(found) > 1


def _setting(heading: str, name: str) -> Column[Result]:
    return Column(heading, lambda result: result.config.get(name), nothing="-")


def _names(record: Record, results: Results) -> list[str]:
    """Return the names of all values and samples in the results, in the order of the columns.

    The names in `record.columns` come first.
    """
    names = dict.fromkeys(record.columns)
    for result in results:
        names.update(dict.fromkeys(result.values))
        names.update(dict.fromkeys(result.samples))
    names.pop(SPREAD, None)
    return list(names)


def _values(record: Record, name: str) -> Column[Result]:
    """Return the column that shows the value `name` of each row, or the median of its samples.

    Bytes are shown in GiB. Published numbers are shown with all their digits.
    """
    in_bytes = record.unit.get(name, "").startswith("bytes")
    heading = f"{name}_(GiB)" if in_bytes else name

    def value(result: Result) -> object:
        found = result.values.get(name)
        if result.samples.get(name):
            found = median(result.samples[name])
        if found is None:
            return None
        spread = result.values.get(SPREAD, {}).get(name)
        if spread is not None:
            return _with_spread(found, spread)
        return _in_gib(found) if in_bytes else _text(found, exact=record.kind == "published")

    return Column(heading.replace("_", "\n"), value)


def _in_gib(value: float | list[float]) -> str:
    sizes = value if isinstance(value, list) else [value]
    return in_lines([size / GiB for size in sizes], "{:.1f}")


def _text(value: Json, *, exact: bool) -> str:
    """Format a value: a number, a list, or words. If `exact`, keep all digits of a number."""
    if isinstance(value, list):
        return in_lines(value, "{}")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.10g}" if exact else ratio(value)
    return textwrap.fill(str(value), WORDS)


def _with_spread(middle: float, spread: Sequence[float]) -> str:
    low, high, _ = spread
    return f"{number(middle)}\n({number(low)}-{number(high)})"


def _status(result: Result) -> str | None:
    """Return a row's status, such as "failed", or None if the row has numbers to show instead."""
    return None if result.values or result.samples else result.status


def _reason(result: Result) -> str | None:
    return None if result.reason is None else textwrap.fill(result.reason, WORDS)


def _about_source(record: Record) -> Iterator[str]:
    """Yield notes about a file of results: the source of its numbers, and the hardware.

    If the sources of a published number contradict each other, a note says how.
    """
    if record.run is None:
        yield record.kind
    source = record.source or {}
    place = source.get("paper") or source.get("repo") or source.get("where")
    if place:
        yield f"source: {place}"
    described = []
    for key, value in (record.hardware or {}).items():
        if value:
            described.append(f"{key} {value}")
    if described:
        yield f"hardware: {', '.join(described)}"
    yield from record.notes
    verdicts = {each.row: str(each.values.get("verdict")) for each in record.discrepancies}
    for verdict, rows in by_value(verdicts).items():
        yield f"{rows}: {verdict}"


def _about_values(record: Record, results: Results, names: Sequence[str]) -> Iterator[str]:
    """Yield notes about the units of the numbers, and about the versions that were measured."""
    units = grouped(filter(record.unit.get, names), record.unit.__getitem__)
    for unit, having in units.items():
        yield f"{', '.join(having)}: {unit}"
    if any(SPREAD in result.values for result in results):
        yield "in brackets: quartiles"
    versions = {}
    for result in results:
        if "version" in result.config:
            versions[result.row] = str(result.config["version"])
    for version, rows in by_value(versions).items():
        yield f"{rows}: {version}"
