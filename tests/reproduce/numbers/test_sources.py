"""Tests of how records are found in files, folders, pytest-benchmark's files and git revisions.

If several runs have results for the same experiment, the run with the most rows (configurations) is
used. Among runs with equally many rows, the newest is used. The tables of predictions follow the
same rule.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.error import Error
from reproduce.machine.description import Gpu, Machine
from reproduce.numbers.significance import Rule
from reproduce.numbers.sources import load_side
from reproduce.records.places import RESULTS
from reproduce.records.record import Result, load, save
from reproduce.tables.comparison import write_comparisons
from reproduce.tables.measured import MeasuredRow, measured_rows
from reproduce.tables.predicted import NOT_MEASURED, predicted_tables

from ..made import commit, emulated, record, row

FOREIGN = Path(__file__).parents[1] / "records" / "data" / "pytest-benchmark.json"
GPUS = Machine("Linux", "a CPU", 4, 8, None, [Gpu("a GPU", 2**30)] * 4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a git checkout with two runs in results/measured. Only the older run is committed."""
    monkeypatch.chdir(tmp_path)
    measured = tmp_path / "results" / "measured"
    measured.mkdir(parents=True)
    old = record(row("x", [2.0]), row("y", [2.0]))
    save(old, measured / "old.json")
    commit(tmp_path, "before")
    x, z = row("x", [1.0]), row("z", [1.0])
    new = record(x, emulated(z), started="2021-01-01T00:00:00Z")
    save(replace(new, name="new"), measured / "new.json")
    return measured


@pytest.mark.parametrize(
    ("name", "rows", "superseded"),
    [
        ("results/measured/old.json", {"x": 2.0, "y": 2.0}, 0),
        # Among the runs with the most rows, the newest run counts.
        ("results/measured", {"y": 2.0, "x": 1.0, "z": 1.0}, 1),
        ("before", {"x": 2.0, "y": 2.0}, 0),
        ("HEAD:results/measured", {"x": 2.0, "y": 2.0}, 0),
        ("before:results/measured/old.json", {"x": 2.0, "y": 2.0}, 0),
    ],
)
def test_a_side_has_each_row_once(
    folder: Path, name: str, rows: dict[str, float], superseded: int
) -> None:
    side = load_side("A", name)

    steps = {}
    for entry in side.entries:
        (steps[entry.result.row],) = entry.result.samples["step_time"]
    assert steps == rows
    assert side.superseded == superseded
    said = write_comparisons([], [side], Rule(), [], "text")
    assert ("A: e: rows of 2 runs, not in turn: name, new" in said) == bool(superseded)
    message = r"^HEAD:docs: this .* no record .* in docs; name another folder as HEAD:FOLDER$"
    with pytest.raises(Error, match=message):
        load_side("A", "HEAD:docs")


def test_pytest_benchmark() -> None:
    first, second = load_side("A", str(FOREIGN)).entries

    one, two = first.result, second.result
    assert one.row == "test_one[1]"
    assert two.row == "test_two"
    assert one.config == {"benchmark": "tests/test_it.py::test_one[1]", "n": 1}
    assert one.experiment == "tests/test_it.py"
    assert one.samples == {"time": [0.5, 0.25, 0.75]}
    assert two.samples == {"time": [2.0]}, "without --benchmark-save-data there is only the median"
    run = first.record.run
    assert run is not None
    assert run.seed is None
    assert run.machine.cpu == "a CPU"
    assert run.machine.cores == 4
    assert run.git is not None
    assert run.git.revision == "abc"
    assert run.git.dirty


@pytest.mark.parametrize("commit", [{"id": "unversioned"}, {"id": "unknown"}, {}, None], ids=str)
def test_pytest_benchmark_outside_a_checkout(commit: Any, tmp_path: Path) -> None:
    data = {**json.loads(FOREIGN.read_text()), "commit_info": commit}
    file = tmp_path / "benchmark.json"
    file.write_text(json.dumps(data))

    side = load_side("A", str(file))

    assert side.records[0].run is not None
    assert side.records[0].run.git is None
    assert "git" not in write_comparisons([], [side], Rule(), [], "text")


def result(name: str = "n2m1", **changes: Any) -> Result:
    """Make a result with three steps of a published configuration.

    Args:
        name: The name of the configuration.
        changes: New values for fields of the result.
    """
    fields: dict[str, Any] = {
        "experiment": "amoebanet-speed",
        "scale": "paper",
        "published": f"tg-amoebanetd-speed/{name}",
        "config": {"configuration": "as published", "batch_size": 96},
    }
    made = row(name, [1.0, 2.0, 30.0], **fields)
    return replace(made, **changes)


OTHERS: list[dict[str, Any]] = [
    {"scale": "small"},
    {"experiment": "unet-speed"},
    {"status": "failed"},
    {"emulated": True, "status": "failed"},
    {"samples": {}},
    {"emulated": True, "status": "emulated", "samples": {}, "values": {"peak_allocated": [1]}},
    {"device": "meta"},
    {"published": None},
    {"config": {"configuration": "GPipe", "batch_size": 96}},
]


@pytest.mark.parametrize("changes", OTHERS, ids=lambda changes: "-".join(changes))
def test_only_rows_as_published_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    save(record(result(**changes)), tmp_path / "a.json")
    assert measured_rows("amoebanet-speed", tmp_path) == {}


def test_the_run_that_is_shown_counts_whatever_its_file_is_called(tmp_path: Path) -> None:
    new = result(samples={"step_time": [4.0]})
    memory = result("pipeline-2", config={}, samples={}, values={"peak_allocated": [2**30, 2**31]})
    disturbed = result("n4m4", samples={"step_time": [2.0], "others": [0.2]})
    many = [new, disturbed, result("n8m4"), result("n8m1")]
    newer = record(*many, started="2026-01-02T00:00:00Z", machine=GPUS, device="cuda")
    save(newer, tmp_path / "a.json")
    older = record(result(), result("n4m1"), memory, started="2026-01-01T00:00:00Z")
    save(older, tmp_path / "b.json")
    (tmp_path / "c.json").write_text("{")

    assert measured_rows("amoebanet-speed", tmp_path) == {
        "2 x a GPU": {
            "n2m1": MeasuredRow(24.0),
            "n4m4": MeasuredRow(48.0, disturbed=True),
            "n8m4": MeasuredRow(48.0),
            "n8m1": MeasuredRow(48.0),
        },
        "a CPU": {
            "n2m1": MeasuredRow(48.0),
            "n4m1": MeasuredRow(48.0),
            "pipeline-2": MeasuredRow(None, 3 * 2**30),
        },
    }


@pytest.mark.parametrize("first", ["2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"])
def test_a_measured_row_counts_before_an_emulated_one(tmp_path: Path, first: str) -> None:
    changes: dict[str, Any] = {
        "emulated": True,
        "status": "emulated",
        "samples": {"step_time": [4.0]},
    }
    rows = [result(**changes), result("n8m1", **changes)]
    save(record(*rows, started=first), tmp_path / "a.json")
    save(record(result(), started="2026-01-02T00:00:00Z"), tmp_path / "b.json")

    (measured,) = measured_rows("amoebanet-speed", tmp_path).values()

    assert measured["n2m1"] == MeasuredRow(48.0)
    assert measured["n8m1"] == MeasuredRow(24.0, how="emulated")
    predicted = load(RESULTS / "predicted/amoebanet-speed-p40x8.json")
    (table,) = predicted_tables(predicted, {"a CPU": measured})
    (alone,) = predicted_tables(predicted, {"a CPU": {"n8m1": measured["n8m1"]}})
    assert table.headings[-1] == "measured or\nemulated"
    assert alone.headings[-1] == "emulated"
    median = "(samples/s of a median step)"
    assert f"These rows were emulated on a CPU {median}: n8m1" in table.notes
    assert f"These rows were measured on a CPU {median}: n2m1" in table.notes
    assert NOT_MEASURED in alone.notes
    assert NOT_MEASURED not in table.notes


def test_each_machine_has_a_column() -> None:
    """Check that a table of predictions has a column for each GPU on which its rows have run."""
    predicted = load(RESULTS / "predicted/amoebanet-speed-p40x8.json")
    measured = {
        "1 x GPU A": {"n2m1": MeasuredRow(1.0, how="emulated")},
        "1 x GPU B": {"n2m1": MeasuredRow(2.0, how="emulated"), "n2m4": MeasuredRow(3.0)},
        "1 x GPU C": {"pipeline-2": MeasuredRow(None, 4.0)},
    }

    (table,) = predicted_tables(predicted, measured)

    *_, first, second = table.headings
    assert first == "emulated\n1 x GPU A"
    assert second == "measured or\nemulated\n1 x GPU B"
    assert table.rows[0][-2:] == ("1.0", "2.0")
    assert table.rows[1][-2:] == ("not run", "3.0")
    median = "(samples/s of a median step)"
    assert f"These rows were emulated on 1 x GPU B {median}: n2m1" in table.notes
    assert f"These rows were measured on 1 x GPU B {median}: n2m4" in table.notes


@pytest.mark.parametrize(
    ("name", "said", "epoch"),
    [
        ("unet-speed", "measured on 8 x a GPU (samples/s of a median step): {}", True),
        ("unet-ablation", "measured on 8 x a GPU (samples/s of a median step): {}", False),
        ("unet-memory", "measured, allocated: {} 5.0 on 8 x a GPU", False),
    ],
)
def test_tables_say_what_was_measured_and_where(name: str, said: str, epoch: bool) -> None:
    predicted = load(RESULTS / "predicted" / f"{name}-p40x8.json")
    last = predicted.results[-1].row
    measured = MeasuredRow(123.4, 5 * 2**30, disturbed=True)

    table, *_ = predicted_tables(predicted, {"8 x a GPU": {last: measured}})

    notes = " ".join(table.notes)
    assert said.format(last) in notes
    assert ("an epoch, whose last mini-batch is smaller" in notes) == epoch
    if name != "unet-memory":
        *_, before_last_row, last_row = table.rows
        assert before_last_row[-1] == "not run"
        assert last_row[-1] == "123.4*"


def test_methods_of_two_classes_are_two_rows(tmp_path: Path) -> None:
    """Check that pytest-benchmark's results of equally named methods are kept apart."""
    data = json.loads(FOREIGN.read_text())
    for k, kind in enumerate(("TestEncode", "TestDecode")):
        data["benchmarks"][k].update(name="test_it", fullname=f"tests/test_it.py::{kind}::test_it")
    file = tmp_path / "benchmark.json"
    file.write_text(json.dumps(data))

    side = load_side("A", str(file))

    assert [each.result.row for each in side.entries] == [
        "TestEncode::test_it",
        "TestDecode::test_it",
    ]
    assert side.superseded == 0
