"""Predict the rows of all tables of the league, and write the predictions into results/league.

Nothing is run on a device: the operators of the layers are counted.
"""

from collections.abc import Sequence

from benchmarks.harness import command
from benchmarks.league.predicted import predicted
from benchmarks.league.table import predicted_path, published_paths, table
from reproduce.records.record import load, save


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict every table, and print how far the predictions are from the published numbers."""
    command("league", __doc__, record=False).parse_args(arguments)
    for path in published_paths():
        save(predicted(load(path)), predicted_path(path))
        print(f"predicted: {path.stem}", flush=True)
    print(table("simple"))


if __name__ == "__main__":
    main()
