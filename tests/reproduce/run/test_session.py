"""Tests of `Session`, which runs the rows (configurations) of experiments.

Each row must get a result, which has an error if the training fails.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from reproduce.experiments.row import PUBLISHED_BALANCE
from reproduce.predict.link import Link
from reproduce.run.engines.engines import ONLY_EMULATED
from torchgpipe.plan.predict.replay import Event, Timeline

from ..tiny import TINY
from .conftest import ROWS, SECONDS, Fake

PAPER = "p40x8, in proportion to the tasks"
OWN = "a100x8"
GIVEN = "h100x8, in proportion to the tasks"
NONE = torch.OutOfMemoryError("CUDA out of memory")
FEW_DEVICES = {row.name for row in ROWS if row.devices <= 2}
MANY_DEVICES = {row.name for row in ROWS if row.devices > 2}


@pytest.mark.parametrize(
    ("most", "own", "link", "links"),
    [
        (8, None, [], [PAPER, None]),
        (2, OWN, [], [OWN, OWN]),
        (2, OWN, ["--link=h100x8"], [GIVEN, GIVEN]),
        (0, OWN, [], []),
    ],
)
def test_every_row_ends_in_a_result(
    fake: type[Fake],
    run: Any,
    most: int,
    own: str | None,
    link: list[str],
    links: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check which rows (configurations) of a run are measured, and which are emulated.

    A row is measured if there are enough devices, and emulated if it needs at most `--emulate`
    devices. A row with a published balance is only emulated.
    """
    monkeypatch.setattr("reproduce.run.session.own_links", lambda devices: own)
    emulate = f"--emulate={most}" if most else "--no-emulate"
    emulated_names = {f"{row.name} emulated" for row in ROWS if row.devices <= most}

    found = run("tiny-speed", emulate, *link, "--steps=3")

    emulated, measured, lacking = set(), set(), set()
    for name, result in found.items():
        if name not in emulated_names:
            assert "link" not in result.config
        if result.status == "needs devices":
            lacking.add(name)
            assert result.reason == "needs 8 devices"
            assert not result.samples
            continue
        if result.status == "emulated":
            emulated.add(name)
        else:
            assert result.status == "measured"
            measured.add(name)
        samples, config = result.samples, result.config
        assert fake.order.count(name) == 3
        assert len(samples["step_time"]) == 3
        assert len(set(samples["round"])) == 3
        assert samples["loss"] == [1, 1, 1]
        assert config["balance"] == [1] * config["partitions"], "the balance as used is recorded"
    assert emulated == emulated_names
    assert measured == FEW_DEVICES
    assert lacking == (set() if most == 8 else MANY_DEVICES)
    n2m4, gpipe = found["n2m4"], found["GPipe n2m4"]
    assert gpipe.values["utilization_problem"].startswith("AttributeError"), "a fake has no tasks"
    assert n2m4.over == "n2m1"
    assert n2m4.published == "tg-amoebanetd-speed/n2m4"
    if most:
        copies = [found[f"{name} emulated"].config.get("link") for name in ("n2m4", "GPipe n2m4")]
        assert copies == links
    if most == 8:
        eight = found["GPipe n8m4 emulated"]
        assert eight.samples == {
            "step_time": [SECONDS] * 3,
            "here_time": [0.5] * 3,
            "work_time": [3.0] * 3,
            "loss": [1] * 3,
            "round": found["naive n8 emulated"].samples["round"],
        }
        utilization = [0.5, 0, 0, 0, 0, 0, 0, 0]
        assert eight.values == {"executed": 4, "bubble": 7 / 8, "utilization": utilization}


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("experiment", "row", "others", "at"),
    [
        ("tiny-speed", "naive n2", ("naive n2 emulated", "GPipe n2m4"), 0),
        ("tiny-speed", "naive n2", ("naive n2 emulated", "GPipe n2m4"), 2),
        ("tiny-speed", "naive n2 emulated", ("naive n2", "GPipe n2m4 emulated"), 0),
        ("tiny-speed", "naive n2 emulated", ("naive n2", "GPipe n2m4 emulated"), 2),
        ("tiny-memory", "baseline", ("pipeline-2",), 0),
    ],
)
@pytest.mark.parametrize("error", [ValueError("no"), NONE])
def test_a_row_that_fails_is_a_result(
    fake: type[Fake],
    run: Any,
    experiment: str,
    row: str,
    others: tuple[str, ...],
    at: int,
    error: Exception,
) -> None:
    code, status, reason = 2, "failed", r"ValueError: no \(conftest.py, line \d+\)"
    if error is NONE:
        code, status, reason = 0, "out of memory", "out of memory"
        if "emulated" in row:
            reason += r": its 2 partition\(s\) take \d+ GiB on the one device .*"
    fake.raises[row] = lambda step: error if step >= at else None

    found = run(experiment, "--steps=3", status=code)

    assert found[row].status == status
    assert re.fullmatch(reason, found[row].reason)
    for name in others:
        assert found[name].status == ("emulated" if "emulated" in name else "measured")


def test_a_row_with_a_published_balance_is_not_measured(fake: type[Fake], run: Any) -> None:
    rows = [replace(row, configuration=PUBLISHED_BALANCE) for row in ROWS if row.name == "n2m4"]

    found = run("tiny-speed", "--no-emulate", rows=tuple(rows), status=2)

    assert found["n2m4"].status == "not run"
    assert found["n2m4"].reason == ONLY_EMULATED
    assert not fake.order


def test_copies_are_those_of_the_published_rows_whatever_rows_are_chosen(
    fake: type[Fake], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a row's emulated copies do not depend on which other rows are run."""
    papers: list[list[str]] = []

    class Noted(Link):
        def __init__(self, hardware: Any, rows: Any = None) -> None:
            super().__init__(hardware, rows)
            papers.append([*rows])

    monkeypatch.setattr("reproduce.run.session.Link", Noted)
    run("tiny-speed", "--steps=1", "--link=p40x8")
    run("tiny-speed", "--steps=1", "--link=p40x8", "--row", "GPipe n2m4")
    whole, chosen = papers
    assert whole == chosen
    assert "n2m4" in whole


def test_rows_appear_before_all_is_done(
    fake: type[Fake], run: Any, monkeypatch: Any, capsys: Any
) -> None:
    """Check which results a run prints to stderr before it ends.

    After the first round (one step of each configuration), the run prints a table of speeds. After
    each measured memory peak, it prints a line.
    """
    monkeypatch.setattr("reproduce.run.speed.PREVIEW_AFTER", -1)
    steps_of_tables = re.compile(r"(\d) steps?\s+per\s+row")

    run("tiny-speed", "--steps=2")

    early = capsys.readouterr().err
    assert steps_of_tables.findall(early) == ["1", "1"]
    assert steps_of_tables.findall(run.out) == ["2", "2"]
    assert run.said.count("after 1 round; ") == 3
    run("tiny-speed", "--steps=1")
    assert "after 1 round; " not in run.said, "the table comes at once"
    run("tiny-memory")
    assert "pipeline-2: peaks of 0 MiB" in run.said


def test_memory_rows_run_alone_and_for_any_n(
    fake: type[Fake], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reproduce.run.progress.SECONDS_BETWEEN_LINES", 0.0)

    def alone(_: int) -> Exception | None:
        return None if fake.alive == {"pipeline-1"} else ValueError(str(fake.alive))

    fake.raises["pipeline-1"] = alone

    found = run("tiny-memory")

    names = [name for name in found if not name.endswith("paper")]
    assert len(names) == 5
    assert len(found) == 10
    for name in names:
        assert found[name].status == "measured"
        assert found[f"{name} paper"].device == "meta"
        assert fake.order.count(name) == 2
    assert set(fake.order) == set(names)
    eight, published = found["pipeline-8"], found["pipeline-8 paper"]
    assert eight.values["peak_allocated"] == [7] * 8
    assert eight.config["balance"] == [1] * 8
    parameters = 1844858344
    assert published.values == {"parameters": parameters, "model_bytes": 12 * parameters}
    steps = re.findall(r"left: memory, (.*):", run.said)
    expected = []
    for k in range(1, 6):
        expected += [f"step {step} of 2, row {k} of 5" for step in (1, 2)]
    assert steps == expected


def test_a_changed_row_is_another_row(fake: type[Fake], run: Any) -> None:
    """Check the results of a row (configuration) that the option `--set` has changed.

    The changed row has a new name, and its results say which settings were changed.
    """
    found = run("tiny-speed", "--row", "n2m4", "--steps=1", "--set", "m=2", "batch_size=6")

    names = {"n2m4 m=2 batch_size=6", "n2m4 m=2 batch_size=6 emulated"}
    assert set(found) == names
    assert set(fake.order) == names
    for result in found.values():
        assert result.published is None
        assert result.config["chunks"] == 2
        assert result.config["batch_size"] == 6
        assert result.config["changed_from"] == "n2m4"
        assert result.config["changed"] == {"m": 2, "batch_size": 6}
    emulated = found["n2m4 m=2 batch_size=6 emulated"]
    assert emulated.config["link"] == PAPER, "its copies are those of the row that it was"
    assert run.record.run.settings["set"] == ["m=2", "batch_size=6"]
    assert "changed rows" in run.out
    assert "changed by --set" in run.out
    assert "published:" not in run.out


@pytest.mark.quick(2)
@pytest.mark.parametrize("partitions", [2, 4])
@pytest.mark.parametrize("error", [None, ValueError("no")])
@pytest.mark.usefixtures("fake")
def test_an_ablation_has_speed_utilization_and_memory(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None, partitions: int
) -> None:
    """Check that the results of an ablation have speed, utilization and memory.

    Measured and emulated results have the same memory peaks, because these do not depend on time.
    """

    def peak(*arguments: Any, **options: Any) -> dict[str, list[int]]:
        if error is not None:
            raise error
        return {"peak_allocated": [5, 6]}

    timeline = Timeline([Event("forward", 0, 1, 0.0, 1.0)], 2.0, 2)
    monkeypatch.setattr("reproduce.run.timed.record_step", lambda training, devices: timeline)
    monkeypatch.setattr("reproduce.run.peak.measure_peak", peak)
    scale = TINY["tiny-ablation"].scale("small")
    rows = [replace(row, partitions=partitions) for row in scale.rows]
    expected = set()
    for row in rows:
        expected.add(f"{row.name} emulated")
        if partitions == 2:
            expected.add(row.name)

    found = run("tiny-ablation", "--steps=3", rows=tuple(rows))

    timed = set()
    for name, result in found.items():
        if not result.samples:
            continue
        timed.add(name)
        values = result.values
        emulated = [0.5, 0, 0, 0][:partitions]
        assert values["utilization"] == (emulated if "emulated" in name else [0.0, 0.5])
        assert len(result.samples["step_time"]) == 3, "the times are kept in any case"
        if error is None:
            assert values["peak_allocated"] == [5, 6]
            assert values["model_bytes"] == 8 * values["parameters"]
        else:
            assert values["memory_problem"].startswith("ValueError: no")
    assert timed == expected
