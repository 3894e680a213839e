"""The gate: nothing in a training step may come to be more, or less, than the committed file says."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import benchmarks.gates.counts
import torchgpipe.engine.relay
from benchmarks.gates.counts import ADVICE, CONFIGURATIONS, FILE, Counts, count, differences, main
from torchgpipe.task import randomness
from torchgpipe.task.task_graph import TaskGraph

relay: Any = torchgpipe.engine.relay
HERE = "linear n2m4 always workers"  # of eight tasks
FOUND = Counts(Counter({"aten.detach.default": 16, "aten.empty.default": 0, "aten.add.Tensor": -2}), nodes=8, waits=4)
ROW = FOUND.totals()


def test_the_gate() -> None:
    lines = differences(json.loads(FILE.read_text()), {name: count(*each) for name, each in CONFIGURATIONS.items()})
    assert not lines, "\n".join(["", *lines, ADVICE])


# What the file says, and how what is counted differs.
DIFFERENCES: list[tuple[dict[str, dict[str, int]], list[str]]] = [
    ({HERE: ROW}, []),
    ({HERE: ROW | {"nodes": 7}}, [f"{HERE}: nodes grew from 7 to 8"]),
    ({HERE: ROW | {"waits": 5}}, [f"{HERE}: waits fell from 5 to 4"]),
    (
        {HERE: ROW | {"operators": 12}},
        [f"{HERE}: operators grew from 12 to 14; in all -2 aten.add.Tensor, +16 aten.detach.default"],
    ),
    (
        {"linear n3": ROW},
        ["linear n3: in counts.json, but no longer counted", f"{HERE}: counted, but not in counts.json"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("file", "lines"), DIFFERENCES)
def test_differences(file: dict[str, dict[str, int]], lines: list[str]) -> None:
    assert differences(file, {HERE: FOUND}) == lines


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


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"linear": {"nodes": "8"}}'])
def test_a_broken_file_is_refused_in_one_line(content: str | None, file: Path) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=f"^counts: {file}.*; write it by python -m benchmarks.gates.counts --update$"):
        main([])


def one_more_graph(grad: Tensor) -> None:
    with torch.enable_grad():
        grad.detach().requires_grad_().sum().backward()


def one_more_lock(grad: Tensor) -> None:
    with randomness.DEFAULT_GENERATOR_LOCK:
        pass


def one_more_thread(grad: Tensor) -> None:
    thread = threading.Thread(target=grad.detach)
    thread.start()
    thread.join()


# What each task does before its backward, and by how much a count grows for that.
PLANTS: list[tuple[Callable[[Tensor], object], str, int]] = [
    (torch.square, "operators", 1),
    (one_more_graph, "nodes", 2),
    (lambda grad: relay.SimpleQueue().put(grad), "waits", 1),
    (one_more_lock, "waits", 1),
    (lambda grad: relay.threading.Event().wait(0), "waits", 1),
    (one_more_thread, "waits", 1),
    (one_more_thread, "operators", 1),
]


@pytest.mark.parametrize(("plant", "name", "growth"), PLANTS)
def test_growth_is_seen(plant: Callable[[Tensor], object], name: str, growth: int, monkeypatch: Any) -> None:
    backward, before = TaskGraph.backward, count(*CONFIGURATIONS[HERE])

    def changed(self: TaskGraph, grads: Any, *, keep: bool = False) -> Any:
        plant(grads[0])
        return backward(self, grads, keep=keep)

    monkeypatch.setattr(TaskGraph, "backward", changed)
    after = count(*CONFIGURATIONS[HERE])
    assert after.totals()[name] - before.totals()[name] == 8 * growth
