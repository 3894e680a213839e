"""Tests of the gate of counts, which checks that the counts of a training step have not changed.

The counts are, for example, how many operators run. The expected counts are in a committed file.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import torchgpipe.engine.relay
from benchmarks.gates import counts
from benchmarks.gates.counts import ADVICE, CONFIGURATIONS, FILE, Counts, count, differences, main
from reproduce.error import Error
from torchgpipe.task.task import TaskGraph

relay: Any = torchgpipe.engine.relay
HERE = "linear n2m4 always workers"
TASKS = 2 * 4  # backward tasks of this configuration
FOUND = Counts(
    Counter({"aten.detach.default": 16, "aten.empty.default": 0, "aten.add.Tensor": -2}),
    nodes=8,
    waits=4,
)
ROW = FOUND.totals()


def test_the_gate() -> None:
    file = json.loads(FILE.read_text())
    counted = {name: count(*each) for name, each in CONFIGURATIONS.items()}
    lines = differences(file, counted)
    assert not lines, "\n".join(["", *lines, ADVICE])


def test_what_differs_is_told() -> None:
    other = {"operators": 12, "nodes": 7, "waits": 5}
    file = {HERE: other, "linear n3": ROW, "the same": ROW}
    counted = {HERE: FOUND, "new": FOUND, "the same": FOUND}
    assert differences(file, counted) == [
        "linear n3: in counts.json, but no longer counted",
        "new: counted, but not in counts.json",
        f"{HERE}: operators grew from 12 to 14; in all -2 aten.add.Tensor, +16 aten.detach.default",
        f"{HERE}: nodes grew from 7 to 8",
        f"{HERE}: waits fell from 5 to 4",
    ]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the gate use a new file, and a single configuration with made-up counts."""
    path = tmp_path / "counts.json"
    monkeypatch.setattr(counts, "FILE", path)
    monkeypatch.setattr(counts, "CONFIGURATIONS", {HERE: ()})
    monkeypatch.setattr(counts, "count", lambda: FOUND)
    return path


def test_update_then_compare(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--update"])
    text = file.read_text()
    assert len(text.splitlines()) == 3, "a line for each configuration, between braces"
    main([])
    printed = f'"{HERE}": {json.dumps(ROW)}\n'
    assert capsys.readouterr().out == printed * 2

    file.write_text(text.replace('"waits": 4', '"waits": 3'))
    with pytest.raises(SystemExit, match=f"^\n{HERE}: waits grew from 3 to 4\n{ADVICE}$"):
        main([])


@pytest.mark.parametrize("content", [None, "[1]"])
def test_a_broken_file_is_refused_in_one_line(content: str | None, file: Path) -> None:
    if content is not None:
        file.write_text(content)
    advice = "write it by python -m benchmarks.gates.counts --update"
    with pytest.raises(Error, match=f"^counts: {file}.*; {advice}$"):
        main([])


def test_an_event_counts_as_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a task waits for an event, the gate counts this wait.

    No task of the library waits for an event, so `test_the_gate` does not show this.
    """
    backward = TaskGraph.backward
    configuration = CONFIGURATIONS[HERE]
    before = count(*configuration)

    def with_event(self: TaskGraph, grads: Any, **options: Any) -> Any:
        event = relay.threading.Event()
        event.wait(0)
        return backward(self, grads, **options)

    monkeypatch.setattr(TaskGraph, "backward", with_event)
    after = count(*configuration)
    assert after.waits == before.waits + TASKS
