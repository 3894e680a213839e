"""The gate of overlap: as it is, all tasks meet; whoever loses overlap is named."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gates import meeting
from benchmarks.gates.meeting import LOOKS, N, Scene, main, on_devices, on_rank, over_workers
from reproduce.machine.description import ROOT
from torchgpipe.engine import graph
from torchgpipe.engine.program import Program
from torchgpipe.engine.relay import Relay
from torchgpipe.schedules import Action
from torchgpipe.task.task import TaskGraph
from torchgpipe.tensors.copy import CopyPath

Plant = Callable[[pytest.MonkeyPatch], None]


def test_the_gate() -> None:
    """In a process of its own: it forks."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.gates.meeting"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def on_ranks(scene: Scene, looks: int) -> str | None:
    default = dist.distributed_c10d._get_default_store()
    return on_rank(scene, looks, dist.PrefixStore("meeting", default))  # type: ignore[attr-defined]


METHODS = {
    "forward": "forward",
    "recomputation": "recompute",
    "backward": "backward",
    "backward_inputs": "backward",
    "backward_weights": "backward_weights",
}
"""What runs a task of each kind."""


def locked(tasks: str = "", locks: int = 1) -> Plant:
    """Run tasks of this kind under a lock, of which partitions share so many."""
    made = [threading.RLock() for _ in range(locks)]

    def plant(patch: pytest.MonkeyPatch) -> None:
        for kind, method in METHODS.items():
            if not kind.startswith(tasks):
                continue
            run = getattr(TaskGraph, method)

            def under(self: TaskGraph, *given: Any, run: Any = run, **options: Any) -> Any:
                with made[self.stage.index % locks]:
                    return run(self, *given, **options)

            patch.setattr(TaskGraph, method, under)

    return plant


def late(patch: pytest.MonkeyPatch) -> None:
    """Leave recomputations to the backwards, which wait for their gradients first."""
    run = Program.run

    def without(self: Program, actions: Any, *given: Any, **options: Any) -> None:
        run(self, [action for action in actions if action.kind != "recompute"], *given, **options)

    patch.setattr(Program, "run", without)


def sends_wait(patch: pytest.MonkeyPatch) -> None:
    """Give an item, and wait until it is taken."""
    give = Relay.give

    def sent(self: Relay, action: Action, item: Any) -> None:
        give(self, action, item)
        forward = action.kind == "forward"
        while not self._ends[forward, action.stage + forward][0].empty():
            time.sleep(0.0001)

    patch.setattr(Relay, "give", sent)


def synchronous(patch: pytest.MonkeyPatch) -> None:
    """Let the host wait for each copy."""
    move = CopyPath.move

    def moved(self: CopyPath, *given: Any, **options: Any) -> Any:
        copies = move(self, *given, **options)
        torch.cuda.synchronize()
        return copies

    patch.setattr(CopyPath, "move", moved)


def without_streams(patch: pytest.MonkeyPatch) -> None:
    """Let copies have no streams of their own."""
    patch.setattr(graph, "CopyPath", lambda *given, own: CopyPath(*given, own=False))


ALWAYS, AHEAD = Scene("always"), Scene("never", ahead=True)
COPY = "forward of micro-batch 1 on stage 0 did not begin while copy after forward of micro-batch 0"
NEXT = "forward of micro-batch 2 on stage 0"
LATE = "did not begin while recompute of micro-batch 5 on stage 3 ran"
ON_RANKS = pytest.mark.ranks(N)
Row = tuple[Callable[..., str | None], Scene, Plant, str]

# Of each loss: who runs, what they run, the fault that is planted, and words of the line that has to name the loss.
LOSSES: dict[str, Row] = {
    "a lock around tasks": (over_workers, ALWAYS, locked(), "forward of micro-batch"),
    "a lock around forwards": (over_workers, ALWAYS, locked("forward"), "forward of micro-batch"),
    "a lock around backwards": (over_workers, AHEAD, locked("backward"), "backward of micro-batch"),
    "a lock around 1F1B": (over_workers, Scene("never", schedule="1F1B"), locked(), "micro-batch"),
    "a lock around halves": (
        over_workers,
        Scene("never", schedule="ZBH1"),
        locked("backward_"),
        "backward_",
    ),
    "late recomputations of 1F1B": (
        over_workers,
        Scene("always", schedule="1F1B"),
        late,
        "recompute",
    ),
    "a lock of two partitions": (over_workers, ALWAYS, locked(locks=3), "forward of micro-batch"),
    "late recomputations": (over_workers, ALWAYS, late, LATE),
    "late recomputations of ranks": (on_ranks, ALWAYS, late, LATE),
    "a send that waits": (over_workers, AHEAD, sends_wait, NEXT),
    "a copy that the host waits for": (on_devices, ALWAYS, synchronous, COPY),
    "a copy among the tasks": (on_devices, ALWAYS, without_streams, COPY),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[ON_RANKS] * (row[0] is on_ranks)) for name, row in LOSSES.items()],
)
def test_a_planted_loss_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, scene, plant, said = LOSSES[name]
    plant(monkeypatch)
    line = run(scene, LOOKS)
    assert line is not None and said in line and " did not begin while " in line


def test_what_is_missed_once_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of what is missed for long, each engine's first is told."""

    class Slow:
        def run(self, scene: Scene, looks: int) -> str | None:
            return "a did not begin while b ran" if looks == LOOKS else None

        def close(self) -> None:
            pass

    monkeypatch.setattr(meeting, "Ranks", Slow)
    monkeypatch.setattr(
        meeting, "over_workers", lambda scene, looks: "x" if scene.mode == "never" else None
    )
    monkeypatch.setattr(meeting, "on_devices", lambda scene, looks: None)
    with pytest.raises(SystemExit, match=r"^workers, never: x$"):
        main([])
