"""Read the numbers that the authors of GPipe and torchgpipe published in papers and benchmarks.

The folder `results/paper/` has a record (a JSON file of results) for each published table.
"""

import functools
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from reproduce.records.places import RESULTS, decode, read_json
from reproduce.records.record import Fields, Record, Result, load, save

PAPER = RESULTS / "paper"
DISCREPANCIES = "discrepancies"  # the table that says where the sources disagree

# A discrepancy is a contradiction between published sources. Each pair says which published tables
# a discrepancy concerns: the first words of the discrepancy's name, and the first characters of the
# tables' ids.
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
    config: Fields
    values: Fields


class _Table(Struct, forbid_unknown_fields=True):
    id: str
    title: str
    source: Fields
    hardware: Fields | None
    software: Fields | None
    unit: dict[str, str]
    columns: list[str]
    rows: list[_Row]
    notes: list[str]

    def results(self) -> list[Result]:
        results = []
        for row in self.rows:
            name = row.experiment
            result = Result(self.id, name, "published", config=row.config, values=row.values)
            results.append(result)
        return results


@functools.cache
def published(table: str) -> Record:
    """Return the record of a published table, given the table's id, such as `tg-unet-memory`.

    Raises:
        Error: There is no table with this id, or its file is broken.
    """
    return load(PAPER / f"{table}.json")


def import_tables(source: Path, to: Path) -> list[Path]:
    """Write a record for each published table in a JSON file; return the paths of the records.

    Args:
        source: The JSON file, which contains a list of tables.
        to: The folder for the records.

    Raises:
        Error: The JSON file cannot be read, or is not a list of tables.
    """
    tables = decode(list[_Table], read_json(source), str(source))
    discrepancies: list[Result] = []
    for table in tables:
        if table.id == DISCREPANCIES:
            discrepancies += table.results()
    paths = []
    for table in tables:
        names = tuple(name for name, ids in CONCERNS if table.id.startswith(ids))
        concern = [result for result in discrepancies if result.row.startswith(names)]
        fields = asdict(table)
        name = fields.pop("id")
        del fields["rows"]
        record = Record(
            name, kind="published", results=table.results(), discrepancies=concern, **fields
        )
        path = to / f"{name}.json"
        save(record, path)
        paths.append(path)
    return paths
