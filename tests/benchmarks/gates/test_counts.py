"""The gate: nothing in a training step may come to be more, or less, than the committed file says."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import benchmarks.gates.counts
import torchgpipe.engine.relay
from benchmarks.gates.counts import ADVICE, CONFIGURATIONS, FILE, Counts, count, differences, main
from reproduce.error import Error
from torchgpipe.task.task import TaskGraph

relay: Any = torchgpipe.engine.relay
HERE = "linear n2m4 always workers"  # of eight tasks
FOUND = Counts(
    Counter({"aten.detach.default": 16, "aten.empty.default": 0, "aten.add.Tensor": -2}),
    nodes=8,
    waits=4,
)
ROW = FOUND.totals()


def test_the_gate() -> None:
    lines = differences(
        json.loads(FILE.read_text()), {name: count(*each) for name, each in CONFIGURATIONS.items()}
    )
    assert not lines, "\n".join(["", *lines, ADVICE])


def test_what_differs_is_told() -> None:
    file = {
        HERE: ROW | {"operators": 12, "nodes": 7, "waits": 5},
        "linear n3": ROW,
        "the same": ROW,
    }
    assert differences(file, {HERE: FOUND, "new": FOUND, "the same": FOUND}) == [
        "linear n3: in counts.json, but no longer counted",
        "new: counted, but not in counts.json",
        f"{HERE}: operators grew from 12 to 14; in all -2 aten.add.Tensor, +16 aten.detach.default",
        f"{HERE}: nodes grew from 7 to 8",
        f"{HERE}: waits fell from 5 to 4",
    ]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of its own for the command, which counts one configuration that needs no time."""
    monkeypatch.setattr(benchmarks.gates.counts, "FILE", tmp_path / "counts.json")
    monkeypatch.setattr(benchmarks.gates.counts, "CONFIGURATIONS", {HERE: ()})
    monkeypatch.setattr(benchmarks.gates.counts, "count", lambda: FOUND)
    return tmp_path / "counts.json"


def test_update_then_compare(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--update"])
    assert len(file.read_text().splitlines()) == 3  # a line for each configuration, between braces
    main([])
    assert capsys.readouterr().out.splitlines() == 2 * [f'"{HERE}": {json.dumps(ROW)}']

    file.write_text(file.read_text().replace('"waits": 4', '"waits": 3'))
    with pytest.raises(SystemExit, match=f"^\n{HERE}: waits grew from 3 to 4\n{ADVICE}$"):
        main([])


@pytest.mark.parametrize("content", [None, "[1]"])
def test_a_broken_file_is_refused_in_one_line(content: str | None, file: Path) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(
        Error, match=f"^counts: {file}.*; write it by python -m benchmarks.gates.counts --update$"
    ):
        main([])


def test_an_event_counts_as_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task has any, and what tasks have, `test_the_gate` counts."""
    backward, before = TaskGraph.backward, count(*CONFIGURATIONS[HERE])

    def changed(self: TaskGraph, grads: Any, **options: Any) -> Any:
        relay.threading.Event().wait(0)
        return backward(self, grads, **options)

    monkeypatch.setattr(TaskGraph, "backward", changed)
    assert count(*CONFIGURATIONS[HERE]).waits == before.waits + 8
