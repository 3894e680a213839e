"""Test that the predictions in docs/league.md are what the code predicts today.

The tests also check the errors of the predictions, which are their differences from published
numbers.
"""

from typing import Any

import pytest

from benchmarks.league.predicted import predicted
from benchmarks.league.table import differences, predicted_path, published_paths
from reproduce.error import Error
from reproduce.records.record import Record, Result, load

# The tables with so few or so small models that they are predicted in a second.
QUICK = ("dlperf-megatron", "torchtitan")
PATHS: list[Any] = []
for path in published_paths():
    marks = [] if path.stem in QUICK else [pytest.mark.slow]
    PATHS.append(pytest.param(path, id=path.stem, marks=marks))


@pytest.mark.parametrize("path", PATHS)
def test_predictions_are_not_stale(path: Any) -> None:
    made = predicted(load(path))
    kept = load(predicted_path(path))
    assert made.title == kept.title
    for new, old in zip(made.results, kept.results, strict=True):
        assert (new.row, new.over, new.hardware) == (old.row, old.over, old.hardware)
        assert new.config == old.config
        for name, value in old.values.items():
            # Other releases of PyTorch can run other operators.
            assert new.values[name] == pytest.approx(value, rel=0.02), (new.row, name)


def record(kind: str, speeds: dict[str, float]) -> Record:
    """Make a record with the samples/s of rows (configurations). Speed-ups are relative to row `a`.

    Args:
        kind: The name and the title of the record.
        speeds: The samples/s of each row.
    """
    results = []
    for name, speed in speeds.items():
        over = None if name == "a" else "a"
        values = {"throughput": speed}
        results.append(Result("table", name, "published", over=over, values=values))
    return Record(kind, kind, "published", {"throughput": "samples/s"}, results)


def test_differences_of_speeds_and_of_speed_ups() -> None:
    published = record("published", {"a": 10.0, "b": 20.0, "c": 40.0})
    speeds, ratios = differences(published, record("ours", {"a": 20.0, "b": 20.0, "c": 60.0}))
    assert speeds == [1.0, 0.0, 0.5]
    assert ratios == [0.5, 0.25]


def test_predictions_of_other_rows_are_refused() -> None:
    published = record("published", {"a": 10.0, "b": 20.0})
    with pytest.raises(Error, match=r"^ours has other rows: run 'python -m benchmarks.league'$"):
        differences(published, record("ours", {"a": 10.0}))
