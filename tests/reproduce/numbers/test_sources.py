"""Records come from files, folders, pytest-benchmark and git revisions; of several runs, the one that is shown."""

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
from reproduce.tables.predicted import MeasuredRow, measured_rows, predicted_tables

from ..made import commit, emulated, record, row

FOREIGN = Path(__file__).parents[1] / "records" / "data" / "pytest-benchmark.json"
GPUS = Machine("Linux", "a CPU", 4, 8, None, [Gpu("a GPU", 2**30)] * 4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a git checkout with two runs in results/measured. Only the old one is committed."""
    monkeypatch.chdir(tmp_path)
    measured = tmp_path / "results" / "measured"
    measured.mkdir(parents=True)
    save(record(row("x", [2.0]), row("y", [2.0])), measured / "old.json")
    commit(tmp_path, "before")
    new = record(row("x", [1.0]), emulated(row("z", [1.0])), started="2021-01-01T00:00:00Z")
    save(replace(new, name="new"), measured / "new.json")
    return measured


@pytest.mark.parametrize(
    ("name", "rows", "superseded"),
    [
        ("results/measured/old.json", {"x": 2.0, "y": 2.0}, 0),
        (
            "results/measured",
            {"y": 2.0, "x": 1.0, "z": 1.0},
            1,
        ),  # the newest run's of those with most rows
        ("before", {"x": 2.0, "y": 2.0}, 0),
        ("HEAD:results/measured", {"x": 2.0, "y": 2.0}, 0),
        ("before:results/measured/old.json", {"x": 2.0, "y": 2.0}, 0),
    ],
)
def test_a_side_has_each_row_once(
    folder: Path, name: str, rows: dict[str, float], superseded: int
) -> None:
    side = load_side("A", name)
    steps = {entry.result.row: entry.result.samples["step_time"] for entry in side.entries}
    assert (steps, side.superseded) == (
        {row: [seconds] for row, seconds in rows.items()},
        superseded,
    )
    said = write_comparisons([], [side], Rule(), [], "text")
    assert ("A: e: rows of 2 runs, not in turn: name, new" in said) == bool(superseded)
    with pytest.raises(
        Error, match=r"^HEAD:docs: that .* no record .* in docs; name a place as HEAD:FOLDER$"
    ):
        load_side("A", "HEAD:docs")


def test_pytest_benchmark() -> None:
    one, two = load_side("A", str(FOREIGN)).entries
    assert (one.result.row, two.result.row) == ("test_one[1]", "test_two")
    assert one.result.config == {"benchmark": "tests/test_it.py::test_one[1]", "n": 1}
    assert one.result.experiment == "tests/test_it.py"
    assert one.result.samples == {"time": [0.5, 0.25, 0.75]}
    assert two.result.samples == {"time": [2.0]}, (
        "without --benchmark-save-data there is only the median"
    )
    run = one.record.run
    assert (
        run is not None
        and run.seed is None
        and run.machine.cpu == "a CPU"
        and run.machine.cores == 4
    )
    assert run.git is not None and run.git.revision == "abc" and run.git.dirty


def result(name: str = "n2m1", **changes: Any) -> Result:
    """Make a result like a published row, of three steps, with the given changes."""
    link, config = (
        f"tg-amoebanetd-speed/{name}",
        {"configuration": "as published", "batch_size": 96},
    )
    made = row(
        name,
        [1.0, 2.0, 30.0],
        experiment="amoebanet-speed",
        scale="paper",
        published=link,
        config=config,
    )
    return replace(made, **changes)


OTHERS: list[dict[str, Any]] = [
    {"scale": "small"},
    {"experiment": "unet-speed"},
    {"status": "failed"},
    {"emulated": True, "status": "emulated"},
    {"samples": {}},
    {"device": "meta"},
    {"published": None},
    {"config": {"configuration": "GPipe", "batch_size": 96}},
]


@pytest.mark.parametrize("changes", OTHERS, ids=lambda changes: next(iter(changes)))
def test_only_rows_as_published_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    save(record(result(**changes)), tmp_path / "a.json")
    assert measured_rows("amoebanet-speed", tmp_path) == {}


def test_the_run_that_is_shown_counts_whatever_its_file_is_called(tmp_path: Path) -> None:
    new = result(samples={"step_time": [4.0]})
    memory = result("pipeline-2", config={}, samples={}, values={"peak_allocated": [2**30, 2**31]})
    many = [
        new,
        result("n4m4", samples={"step_time": [2.0], "others": [0.2]}),
        result("n8m4"),
        result("n8m1"),
    ]
    save(
        record(*many, started="2026-01-02T00:00:00Z", machine=GPUS, device="cuda"),
        tmp_path / "a.json",
    )
    save(
        record(result(), result("n4m1"), memory, started="2026-01-01T00:00:00Z"),
        tmp_path / "b.json",
    )
    (tmp_path / "c.json").write_text("{")
    assert measured_rows("amoebanet-speed", tmp_path) == {
        "n2m1": MeasuredRow("2 x a GPU", 24.0),
        "n4m4": MeasuredRow("2 x a GPU", 48.0, disturbed=True),
        **dict.fromkeys(("n8m4", "n8m1"), MeasuredRow("2 x a GPU", 48.0)),
        "n4m1": MeasuredRow("a CPU", 48.0),
        "pipeline-2": MeasuredRow("a CPU", None, 3 * 2**30),
    }


@pytest.mark.parametrize(
    ("name", "said", "epoch"),
    [
        ("unet-speed", "a median step, on 8 x a GPU: {}", True),
        ("unet-ablation", "a median step, on 8 x a GPU: {}", False),
        ("unet-memory", "measured, allocated: {} 5.0 on 8 x a GPU", False),
    ],
)
def test_tables_say_what_was_measured_and_where(name: str, said: str, epoch: bool) -> None:
    predicted = load(RESULTS / "predicted" / f"{name}-p40x8.json")
    last = predicted.results[-1].row
    table, *_ = predicted_tables(
        predicted, {last: MeasuredRow("8 x a GPU", 123.4, 5 * 2**30, disturbed=True)}
    )
    notes = " ".join(table.notes)
    assert (
        said.format(last) in notes and ("an epoch, which ends in a smaller one" in notes) == epoch
    )
    assert name == "unet-memory" or [cells[-1] for cells in table.rows][-2:] == [
        "not run",
        "123.4*",
    ]
