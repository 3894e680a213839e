"""Tests of `benchmarks.gates.meeting`, a program that checks that tasks run at the same time.

The tests plant faults that make tasks wait for each other. The program's error must then name the
tasks that no longer overlap.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gates import overlap
from benchmarks.gates.failures import in_one_line
from benchmarks.gates.meeting import main
from benchmarks.gates.overlap import LOOKS, Met, lost_scenes, on_devices, on_rank, over_workers
from benchmarks.gates.scenes import N, Scene
from reproduce.error import Error, Worse
from reproduce.machine.description import ROOT
from torchgpipe.engine import graph
from torchgpipe.engine.program import Program
from torchgpipe.engine.relay import Relay
from torchgpipe.schedules import Action
from torchgpipe.task.task import TaskGraph
from torchgpipe.tensors.copy import CopyPath

from ...start import forked

Plant = Callable[[pytest.MonkeyPatch], None]


def test_the_gate() -> None:
    """Check that `benchmarks.gates.meeting` finds that all tasks overlap as they should.

    The program runs in another process, because it forks.
    """
    code, _, wrong = forked("benchmarks.gates.meeting")
    assert code == 0, wrong


def on_ranks(scene: Scene, looks: int) -> str | None:
    default = dist.distributed_c10d._get_default_store()
    return on_rank(dist.PrefixStore("meeting", default), scene, looks)  # type: ignore[attr-defined]


METHODS = {
    "forward": "forward",
    "recomputation": "recompute",
    "backward": "backward",
    "backward_inputs": "backward",
    "backward_weights": "backward_weights",
}
"""The method of `TaskGraph` that runs a task of each kind."""


def locked(tasks: str = "", locks: int = 1) -> Plant:
    """Return a function that plants a fault: tasks hold a lock, so that some cannot overlap.

    Args:
        tasks: Only tasks whose kind starts with this text hold a lock.
        locks: The number of locks. Tasks of partition j hold the lock number j modulo `locks`.
    """
    methods = [method for kind, method in METHODS.items() if kind.startswith(tasks)]
    return lock_in(*methods, locks=locks)


def lock_in(*methods: str, locks: int = 1) -> Plant:
    """Return a function that plants a fault: methods of `TaskGraph` hold a lock while they run.

    Args:
        methods: The names of the methods.
        locks: The number of locks. Tasks of partition j hold the lock number j modulo `locks`.
    """
    made = [threading.RLock() for _ in range(locks)]

    def plant(patch: pytest.MonkeyPatch) -> None:
        for method in methods:
            run = getattr(TaskGraph, method)

            def under(self: TaskGraph, *given: Any, run: Any = run, **options: Any) -> Any:
                with made[self.stage.index % locks]:
                    return run(self, *given, **options)

            patch.setattr(TaskGraph, method, under)

    return plant


def late(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: a recomputation starts only when the gradient has arrived."""
    run = Program.run

    def without(self: Program, actions: Any, *given: Any, **options: Any) -> None:
        others = [action for action in actions if action.kind != "recompute"]
        run(self, others, *given, **options)

    patch.setattr(Program, "run", without)


def sends_wait(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: a sender waits until the receiver has taken its tensors."""
    give = Relay.give

    def sent(self: Relay, action: Action, item: Any) -> None:
        give(self, action, item)
        forward = action.kind == "forward"
        queue = self._ends[forward, action.stage + forward][0]
        while not queue.empty():
            time.sleep(0.0001)

    patch.setattr(Relay, "give", sent)


def synchronous(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: the host waits for each copy between GPUs."""
    move = CopyPath.move

    def moved(self: CopyPath, *given: Any, **options: Any) -> Any:
        copies = move(self, *given, **options)
        torch.cuda.synchronize()
        return copies

    patch.setattr(CopyPath, "move", moved)


def without_streams(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: copies run on the streams of the computation."""
    patch.setattr(graph, "CopyPath", lambda *given, own: CopyPath(*given, own=False))


ALWAYS = Scene("always")
AHEAD = Scene("never", ahead=True)
STEPS = Scene("never", schedule="1F1B")
RECOMPUTED_STEPS = Scene("always", schedule="1F1B")
HALVES = Scene("never", schedule="ZBH1")
COPY = "forward of micro-batch 1 on stage 0 did not begin while copy after forward of micro-batch 0"
NEXT = "forward of micro-batch 2 on stage 0"
LATE = "did not begin while recompute of micro-batch 5 on stage 3 ran"
ON_RANKS = pytest.mark.ranks(N)
Row = tuple[Callable[..., str | None], Scene, Plant, str]

# Faults that keep tasks from running at the same time. Each value has four parts: a function that
# runs a scene; the scene, which is a small pipeline in which certain tasks must overlap; a function
# that plants the fault; and words that must be in the program's error.
LOSSES: dict[str, Row] = {
    "a lock around tasks": (over_workers, ALWAYS, locked(), "forward of micro-batch"),
    "a lock around forwards": (over_workers, ALWAYS, locked("forward"), "forward of micro-batch"),
    "a lock around backwards": (over_workers, AHEAD, locked("backward"), "backward of micro-batch"),
    "a lock around 1F1B": (over_workers, STEPS, locked(), "micro-batch"),
    "a lock around halves": (over_workers, HALVES, locked("backward_"), "backward_"),
    "a lock in first passes": (over_workers, ALWAYS, lock_in("_first_pass"), "forward of"),
    "a lock in recomputations": (over_workers, ALWAYS, lock_in("_recompute"), "recompute of"),
    "a lock in backwards": (
        over_workers,
        AHEAD,
        lock_in("_run_guarded"),
        "backward of micro-batch",
    ),
    "late recomputations of 1F1B": (over_workers, RECOMPUTED_STEPS, late, "recompute"),
    "a lock of two partitions": (over_workers, ALWAYS, locked(locks=3), "forward of micro-batch"),
    "late recomputations": (over_workers, ALWAYS, late, LATE),
    "late recomputations of ranks": (on_ranks, ALWAYS, late, LATE),
    "late recomputations of 1F1B over ranks": (on_ranks, RECOMPUTED_STEPS, late, "recompute"),
    "a send that waits": (over_workers, AHEAD, sends_wait, NEXT),
    "a copy that the host waits for": (on_devices, ALWAYS, synchronous, COPY),
    "a copy among the tasks": (on_devices, ALWAYS, without_streams, COPY),
}


NAMES = []
for loss, (on, *_) in LOSSES.items():
    NAMES.append(pytest.param(loss, marks=[ON_RANKS] if on is on_ranks else []))


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_loss_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, scene, plant, said = LOSSES[name]
    plant(monkeypatch)

    line = run(scene, LOOKS)

    assert line is not None
    assert said in line
    assert " did not begin while " in line


def test_what_is_missed_once_is_no_loss() -> None:
    """Check that an overlap of tasks is reported as missing only if it is missing each time.

    An overlap can be missing once by chance, if the machine is busy.
    """

    def slow(scene: Scene, looks: int) -> str | None:
        return "a did not begin while b ran" if looks == LOOKS else None

    def lost(scene: Scene, looks: int) -> str | None:
        return "x" if scene.mode == "never" else None

    never = Scene("never")
    scenes = [ALWAYS, AHEAD, never]
    assert lost_scenes("ranks", slow, scenes) == []
    assert lost_scenes("workers", lost, scenes) == [f"workers, {AHEAD}: x", f"workers, {never}: x"]


def test_what_is_lost_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Met("ranks", 2, []), Met("workers", 3, ["workers, never: x"])]
    monkeypatch.setattr(overlap, "every", lambda ranks: found)
    with pytest.raises(Worse, match=r"^workers, never: x$"):
        main([])
    assert capsys.readouterr().out == ""
    with pytest.raises(Worse, match=r"^workers, never: x$"):
        main(["--format", "json"])
    printed = json.loads(capsys.readouterr().out)
    said = [(each["row"], each["value"], each["verdict"]) for each in printed["numbers"]]
    assert said == [("ranks", 2, "~"), ("workers", 3, "worse")]
    assert printed["conclusion"] == "workers, never: x"


@pytest.mark.slow
def test_a_fault_of_the_base_is_no_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = [Met("ranks", 2, ["ranks: y"]), Met("workers", 3, ["workers, never: x"])]
    monkeypatch.setattr(overlap, "every", lambda ranks: found)
    (tmp_path / "torchgpipe").mkdir()
    (tmp_path / "torchgpipe" / "__version__.py").touch()
    printed = {"numbers": [{"reason": "workers, never: x"}, {"reason": None}]}
    module = f"import os\nprint({json.dumps(printed)!r}, flush=True)\nos._exit(1)\n"
    (tmp_path / "torchgpipe" / "__init__.py").write_text(module)
    with pytest.raises(Worse, match=r"^ranks: y$"):
        main(["--base", str(tmp_path)])

    # Another fault of the same engine is not hidden by the base's fault.
    found[:] = [Met("workers", 3, ["workers, never: x", "workers, 1F1B: z"])]
    with pytest.raises(Worse, match=r"^workers, 1F1B: z$"):
        main(["--base", str(tmp_path)])

    found[:] = [Met("workers", 3, ["workers, never: x"])]
    main(["--base", str(tmp_path)])
    assert capsys.readouterr().out == "the base has the same fault: workers, never: x\n"

    (tmp_path / "torchgpipe" / "__init__.py").write_text("import os\nos._exit(2)\n")
    with pytest.raises(Worse, match=r"^workers, never: x$"):
        main(["--base", str(tmp_path)])


HANGS = """
import threading
from benchmarks.gates.failures import in_one_line

with in_one_line("meeting", patience=0.2):
    threading.Event().wait()
"""


def test_a_pipeline_that_hangs_is_told_in_one_line() -> None:
    found = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2
    line = "meeting: the pipeline does not run: it has not ended after 0.2 seconds\n"
    assert found.stderr == line


@pytest.mark.parametrize(
    ("error", "said"), [(Error("rank 1 ended"), "rank 1 ended"), (OSError("a\nb"), "OSError: a")]
)
def test_an_error_is_told_in_one_line(error: Exception, said: str) -> None:
    line = f"^meeting: the pipeline does not run: {said}$"
    with pytest.raises(Error, match=line), in_one_line("meeting"):
        raise error
