"""Predict the rows of all tables of the league, and write the predictions into results/league.

The league is a set of tables that other projects have published. The predictions are computed from
counts of the layers' operators, so that nothing is run on a device.
"""

import sys
from collections.abc import Sequence

from benchmarks.harness import command
from benchmarks.league.predicted import predicted
from benchmarks.league.table import predicted_path, published_paths, table
from reproduce.numbers.sources import Entry
from reproduce.records.record import load, save
from reproduce.tables.output import Number, of_entry, written


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict every table, and print how far the predictions are from the published numbers."""
    options = command("league", __doc__, record=False).parse_args(arguments)
    numbers: list[Number] = []
    for path in published_paths():
        made = predicted(load(path))
        save(made, predicted_path(path))
        print(f"predicted: {path.stem}", file=sys.stderr)
        for result in made.results:
            numbers += of_entry(Entry(made, result))
    print(written(options.format, numbers, table("simple"), table("pipe")).rstrip())


if __name__ == "__main__":
    main()
