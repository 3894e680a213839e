"""Hold what the papers published, as records under `results/paper/`, one for each of their tables."""

import functools
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from reproduce.records.places import RESULTS, Json, decode, read_json
from reproduce.records.record import Record, Result, load, save

PAPER = RESULTS / "paper"
DISCREPANCIES = "discrepancies"  # the table that says where the sources disagree

# prefix of a discrepancy's name, prefix of the ids of the tables that it concerns
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


class _Row(Struct, forbid_unknown_fields=True):
    experiment: str
    config: dict[str, Json]
    values: dict[str, Json]


class _Table(Struct, forbid_unknown_fields=True):
    id: str
    title: str
    source: dict[str, Json]
    hardware: dict[str, Json] | None
    software: dict[str, Json] | None
    unit: dict[str, str]
    columns: list[str]
    rows: list[_Row]
    notes: list[str]

    def results(self) -> list[Result]:
        return [
            Result(self.id, row.experiment, "published", config=row.config, values=row.values)
            for row in self.rows
        ]


@functools.cache
def published(table: str) -> Record:
    """Return a published table by its id, or raise `Error` if there is none, or its file is broken."""
    return load(PAPER / f"{table}.json")


def import_tables(source: Path, to: Path) -> list[Path]:
    """Write a record for each table in the JSON file `source`; return their paths, or raise `Error`."""
    tables = decode(list[_Table], read_json(source), str(source))
    discrepancies = [
        result for table in tables if table.id == DISCREPANCIES for result in table.results()
    ]
    paths = []
    for table in tables:
        subjects = tuple(subject for subject, ids in CONCERNS if table.id.startswith(ids))
        concern = [result for result in discrepancies if result.row.startswith(subjects)]
        given = {name: value for name, value in asdict(table).items() if name not in ("id", "rows")}
        record = Record(
            table.id, kind="published", results=table.results(), discrepancies=concern, **given
        )
        paths.append(to / f"{record.name}.json")
        save(record, paths[-1])
    return paths
