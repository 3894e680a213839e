"""Hold what the papers published, as records under `results/paper/`, one for each of their tables."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.records.decode import DecodeError, Json, decode
from reproduce.records.record import Record, Result, load, save

__all__ = ["PAPER", "convert", "import_tables", "published"]

PAPER = ROOT / "results" / "paper"
DISCREPANCIES = "discrepancies"  # the table that says where the sources disagree

# how a discrepancy's name starts -> how the ids of the tables start that it concerns
CONCERNS = (
    ("amoebanetd-speed", "tg-amoebanetd-speed"),
    ("amoebanet max_pool_3x3", "tg-amoebanetd-"),
    ("units of AmoebaNet-D memory", "tg-amoebanetd-memory"),
    ("units of AmoebaNet-D memory", "gpipe-table1-amoebanet"),
    ("resnet101-speed", "tg-resnet101-speed"),
    ("resnet101-accuracy", "tg-resnet101-accuracy"),
    ("unet-memory", "tg-unet-memory"),
    ("torchgpipe README AmoebaNet-B accuracy", "gpipe-table4-accuracy"),
    ("GPipe Table 1 hardware", "gpipe-table1-"),
    ("GPipe Table 1 Transformer", "gpipe-table1-transformer"),
    ("GPipe Table 1 AmoebaNet", "gpipe-table1-amoebanet"),
    ("GPipe partition list", "gpipe-table1-transformer"),
)


@dataclass(frozen=True)
class TableRow:
    """Hold one row as the published tables' file has it."""

    experiment: str
    config: dict[str, Json]
    values: dict[str, Json]


@dataclass(frozen=True)
class Table:
    """Hold one table as the published tables' file has it."""

    id: str
    title: str
    source: dict[str, Json]
    hardware: dict[str, Json] | None
    software: dict[str, Json] | None
    unit: dict[str, str]
    columns: list[str]
    rows: list[TableRow]
    notes: list[str]


@functools.cache
def published(table: str) -> Record:
    """Return a published table by its id.

    Raises:
        Error: there is none, or its file is broken.
    """
    return load(PAPER / f"{table}.json")


def import_tables(source: Path, to: Path = PAPER) -> list[Path]:
    """Write a record for each table in the file `source`, and return their paths.

    Raises:
        Error: the file is not what it should be, or a record cannot be written.
    """
    try:
        tables = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise Error(f"{source}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise Error(f"{source}: not JSON ({error})") from error
    try:
        records = convert(tables)
    except DecodeError as error:
        raise Error(f"{source}: {error}") from error

    paths = []
    for record in records:
        paths.append(to / f"{record.name}.json")
        save(record, paths[-1])
    return paths


def convert(tables: Json) -> list[Record]:
    """Turn published tables, as parsed from their JSON file, into records.

    Raises:
        DecodeError: a table is not as it should be; the message says which and where.
    """
    decoded = decode(list[Table], tables)
    disagreements = [_result(table, row) for table in decoded if table.id == DISCREPANCIES for row in table.rows]
    return [
        Record(
            name=table.id,
            title=table.title,
            kind="published",
            unit=table.unit,
            results=[_result(table, row) for row in table.rows],
            source=table.source,
            hardware=table.hardware,
            software=table.software,
            columns=table.columns,
            notes=table.notes,
            discrepancies=[result for result in disagreements if _concerns(result.row, table.id)],
        )
        for table in decoded
    ]


def _result(table: Table, row: TableRow) -> Result:
    return Result(experiment=table.id, row=row.experiment, status="published", config=row.config, values=row.values)


def _concerns(disagreement: str, table: str) -> bool:
    return any(disagreement.startswith(subject) and table.startswith(tables) for subject, tables in CONCERNS)
