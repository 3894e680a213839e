"""Predicted steps beside real ones: the order of tasks exactly, times loosely; and that enough was validated."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import validation
from benchmarks.validation import MODELS, SETUPS, Model, main, predictions, table
from reproduce.records.record import Record, Result, load
from torchgpipe.plan.replay import Timeline

COMMITTED = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "validation.json"
Order = dict[int, list[tuple[str, int]]]


def order(events: Sequence[Any]) -> Order:
    """Return each partition's tasks in the order in which they start, from (kind, micro-batch, partition, start)."""
    found: Order = {}
    for kind, i, j, *_ in sorted(events, key=lambda event: event[3]):
        found.setdefault(j, []).append((kind, i))
    return found


def same_order(timeline: Timeline, trace: Sequence[Sequence[Any]]) -> bool:
    """Compare the order in each partition; and over all of them, where tasks run one at a time."""
    if max(i for _, i, *_ in trace) > 0:
        return order(timeline.events) == order(trace)
    replayed, real = (sorted(events, key=lambda event: event[3]) for events in (timeline.events, trace))
    return [tuple(event[:3]) for event in replayed] == [tuple(event[:3]) for event in real]


def pairs(record: Record) -> Iterator[tuple[Timeline, list[list[Any]]]]:
    """Yield each configuration's predicted step and the trace of a real one."""
    for timeline, result in predictions(record).values():
        yield timeline, result.values["trace"]


def tiny() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Record:
    """A real run, of a tiny model in more configurations than are validated."""
    monkeypatch.setattr(validation, "MODELS", {"tiny": Model(tiny, (64,), 12)})
    more = [(n, m, mode) for n in (1, 2, 3) for m in (1, 3, 4) for mode in ("never", "except_last", "always")]
    monkeypatch.setattr(validation, "SETUPS", more)
    threads = torch.get_num_threads()
    try:
        main(["--rounds", "2", "--json", str(tmp_path / "result.json")])
    finally:
        torch.set_num_threads(threads)
    kept = load(tmp_path / "result.json")
    assert table(kept) in capsys.readouterr().out
    return kept


def test_a_real_run(record: Record) -> None:
    """The order of tasks is the replay's, and every sample is kept."""
    found = list(pairs(record))
    for timeline, trace in found:
        assert same_order(timeline, trace)
        ends = {(kind, i, j): end for kind, i, j, _, end in trace}
        for kind, i, j, start, _ in trace:
            before = {"forward": j - 1, "backward": j + 1}.get(kind)
            assert start >= ends.get((kind, i, before), 0.0), "nothing starts before what it needs is there"
    assert len(found) == 27
    profiles = [result for result in record.results if "size" in result.config]
    assert [result.config["size"] for result in profiles] == [3, 4, 12]
    for result in profiles:
        lengths = {kind: [len(x) for x in rounds] for kind, rounds in result.values["shared"].items()}
        assert lengths == {kind: [8, 8] for kind in ("forward", "graph", "backward")}
    steps = [result.samples for result in record.results if "size" not in result.config]
    assert len(steps) == 27 and all(len(each["time"]) == len(each["planned"]) == 2 for each in steps)


def fabricated(**more: list[float]) -> Record:
    """A record whose every step is predicted to take two seconds."""
    times = {"forward": [[1.0]], "graph": [[1.0]], "backward": [[1.0]]}
    profile = Result("tiny", "profile", "measured", config={"size": 2}, values={"alone": times, "shared": times})
    setup = {"batch_size": 2, "balance": [1], "chunks": 1, "checkpoint": "never"}
    measured = {"a": [2.0, 9.0, 2.0], "b": [1.6, 1.6, 1.6], "c": [4.0, 4.0, 4.0]}
    results = [
        Result("tiny", name, "measured", config=setup, samples={"time": seconds, **more})
        for name, seconds in measured.items()
    ]
    return Record("validation", "", "measured", {}, [profile, *results])


def cells_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]


def test_the_median_is_of_the_rows() -> None:
    text = table(fabricated(planned=[3.0, 2.4, 1.0]), "pipe")
    assert text.startswith("3 configurations, 3 rounds\n")
    headings, _, *rows = cells_of(text)
    assert headings[:4] == ["configuration", "predicted ms", "measured ms", "error"]
    assert [row[3] for row in rows] == ["+0.0%", "+25.0%", "-50.0%", "25.0%"]
    column = headings.index("as plan predicts")
    assert [row[column] for row in rows] == ["+20.0%", "+50.0%", "-40.0%", "40.0%"]
    assert "target: 10%" in rows[-1][0]
    assert "as plan predicts" not in table(fabricated(), "pipe")  # older records have none


def test_the_committed_traces_are_those_of_the_replay() -> None:
    """Of one step each, so their times are compared loosely: half of the rows within a quarter, all within twice."""
    ratios = []
    for timeline, trace in pairs(load(COMMITTED)):
        assert same_order(timeline, trace)
        ratios.append(timeline.seconds / max(end for *_, end in trace))
    assert len(ratios) == len(MODELS) * len(set(SETUPS)) >= 20
    assert all(0.5 < ratio < 2 for ratio in ratios)
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < 0.25


def test_the_committed_median_meets_its_target() -> None:
    """The replay's, and that of what users get."""
    headings, *_, last = cells_of(table(load(COMMITTED), "pipe"))
    medians = dict(zip(headings, last, strict=True))
    assert medians["configuration"] == "median error, either way (target: 10%)"
    for heading in ("error", "as plan predicts"):
        assert 0 < float(medians[heading].rstrip("%")) <= 10
