"""Tests of `benchmarks.gates.counts`, a program that counts what runs in a training step.

It counts, for example, operators and autograd nodes. It compares the counts, and the orders in
which devices run their tasks, with committed files, so that no change of the code slows down the
library unnoticed.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import torchgpipe.engine.relay
import torchgpipe.schedules.named
from benchmarks.gates import counts
from benchmarks.gates.counted import Configuration, Counts, count
from benchmarks.gates.counts import ADVICE, COUNTS, FOLDER, differences, main, other_orders
from benchmarks.gates.orders import order
from reproduce.error import Error, Worse
from reproduce.machine.description import ROOT
from torchgpipe.engine.arrangement import orders as cached
from torchgpipe.task.task import TaskGraph

from ...start import forked

relay: Any = torchgpipe.engine.relay
named: Any = torchgpipe.schedules.named
WORKERS = Configuration("linear", 2, 4, "always", "workers")
HERE = str(WORKERS)
TASKS = 2 * 4  # backward tasks of this configuration
FOUND = Counts(
    Counter({"aten.detach.default": 16, "aten.empty.default": 0, "aten.add.Tensor": -2}),
    nodes=8,
    waits=4,
)
ROW = FOUND.totals()


def test_the_gate() -> None:
    """Check that `benchmarks.gates.counts` finds the counts and orders that are committed.

    The program runs in another process, because it forks, which is unsafe in a process with
    threads.
    """
    code, said, wrong = forked("benchmarks.gates.counts")
    assert code == 0, wrong
    assert said.endswith(" orders: as committed\n")


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


def test_another_order_is_told_from_the_first_other_task_on() -> None:
    file = {"a": ["0 1 B0 B1", "0 B0 1 B1"], "gone": [""], "the same": ["0"]}
    noted = {"a": ["0 1 B0 B1", "0 1 B0 B1"], "the same": ["0"]}
    assert other_orders(file, noted) == [
        "a: device 1 runs 1 B0 B1 after its first 1 tasks, which was B0 1 B1",
        "gone: in orders.json, but no longer counted",
    ]
    shorter = {"a": ["0 1 B0", "0 B0 1 B1"], "gone": [""], "the same": ["0"]}
    assert other_orders(file, shorter) == [
        "a: device 0 runs nothing after its first 3 tasks, which was B1"
    ]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `benchmarks.gates.counts` use a temporary folder, and made-up counts of a configuration.

    Returns:
        The path of the file of counts, which does not exist yet.
    """
    monkeypatch.setattr(counts, "FOLDER", tmp_path)
    monkeypatch.setattr(counts, "count_all", lambda: ({HERE: FOUND}, {HERE: ["0 B0"]}))
    return tmp_path / COUNTS


def test_update_then_compare(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--update"])
    text = file.read_text()
    assert len(text.splitlines()) == 3, "a line for each configuration, between braces"
    new = f"{HERE}: counted, but not in counts.json\n{HERE}: counted, but not in orders.json\n"
    assert capsys.readouterr().out == f"{new}1 counts and 1 orders: written\n"
    main([])
    assert capsys.readouterr().out == "1 counts and 1 orders: as committed\n"

    file.write_text(text.replace('"waits": 4', '"waits": 3'))
    with pytest.raises(Worse, match=f"^{HERE}: waits grew from 3 to 4\n{ADVICE}$"):
        main([])
    assert capsys.readouterr().out == "", "only what has changed is said"


def test_the_formats(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--update", "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    first, *_, last = found["numbers"]
    asked = {"experiment": "counts", "row": HERE, "metric": "operators", "unit": "count"}
    assert first.items() >= {**asked, "value": 14, "verdict": "~"}.items()
    assert last.items() >= {"experiment": "orders", "metric": "order", "value": ["0 B0"]}.items()
    assert found["conclusion"].endswith("1 counts and 1 orders: written")

    file.write_text(file.read_text().replace('"waits": 4', '"waits": 3'))
    with pytest.raises(Worse):
        main(["--format", "csv"])
    _, *lines = capsys.readouterr().out.splitlines()
    (worse,) = [line for line in lines if "worse" in line]
    assert ",waits,count," in worse
    with pytest.raises(Worse):
        main(["--format", "markdown"])
    assert capsys.readouterr().out == f"- {HERE}: waits grew from 3 to 4\n- {ADVICE}\n"


def false_base(tmp_path: Path, code: int, row: dict[str, int], orders: list[str]) -> Path:
    """Make a folder with a false torchgpipe, which serves as the base.

    When the gate imports it, it prints what the gate would print for a base with the counts `row`
    and the orders of tasks `orders`, and ends the process with the exit code `code`.
    """
    numbers: list[dict[str, Any]] = [{"experiment": "orders", "row": HERE, "value": orders}]
    for metric, value in row.items():
        numbers.append({"experiment": "counts", "row": HERE, "metric": metric, "value": value})
    text = json.dumps({"numbers": numbers})
    module = f"import os\nprint({text!r}, flush=True)\nos.write(2, b'why\\n')\nos._exit({code})\n"
    (tmp_path / "torchgpipe").mkdir()
    (tmp_path / "torchgpipe" / "__init__.py").write_text(module)
    (tmp_path / "torchgpipe" / "__version__.py").touch()
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1])
def test_a_base_is_compared_whatever_is_committed(
    code: int, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that a higher count is found even if the committed files have the higher count, too.

    The gate, run on the base, ends with exit code 1 if the base's counts differ from the committed
    files.
    """
    main(["--update"])
    fewer, more = {**ROW, "waits": 3}, {**ROW, "waits": 5}
    base = false_base(tmp_path, code, fewer, ["0 B0"])
    capsys.readouterr()
    with pytest.raises(Worse, match=f"^{HERE}: waits grew from 3 to 4$"):
        main(["--base", str(base)])

    shutil.rmtree(base / "torchgpipe")
    with pytest.raises(Worse) as worse:
        main(["--base", str(false_base(tmp_path, code, {**fewer, "nodes": 9}, ["0 B0"]))])
    assert str(worse.value).splitlines() == [
        f"{HERE}: nodes fell from 9 to 8",
        f"{HERE}: waits grew from 3 to 4",
    ], "what fell is said, too"

    shutil.rmtree(base / "torchgpipe")
    main(["--base", str(false_base(tmp_path, code, more, ["0 B0"])), "--format", "json"])
    said = json.loads(capsys.readouterr().out)
    assert said["conclusion"].splitlines() == [
        f"{HERE}: waits fell from 5 to 4",
        "1 counts and 1 orders: none is worse than in the base",
    ]
    assert {number["verdict"] for number in said["numbers"]} == {"~"}

    shutil.rmtree(base / "torchgpipe")
    with pytest.raises(Worse, match=f"^{HERE}: device 0 runs B0 after its first 1 tasks"):
        main(["--base", str(false_base(tmp_path, code, ROW, ["0 1 B0"]))])


def test_a_base_that_cannot_be_counted(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--update"])
    capsys.readouterr()
    base = false_base(tmp_path, 2, ROW, ["0 B0"])
    main(["--base", str(base)])
    files = "the counts and orders are compared with the committed files"
    remark = f"the base cannot be judged (why), so {files}"
    assert capsys.readouterr().out.splitlines() == [remark, "1 counts and 1 orders: as committed"]
    file.write_text(file.read_text().replace('"waits": 4', '"waits": 3'))
    with pytest.raises(Worse) as worse:
        main(["--base", str(base)])
    assert str(worse.value).splitlines() == [remark, f"{HERE}: waits grew from 3 to 4", ADVICE]


def test_only_the_library_of_a_base_is_taken(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that only torchgpipe is taken from a base that is a checkout, and not its gates."""
    main(["--update"])
    base = false_base(tmp_path, 0, {**ROW, "waits": 3}, ["0 B0"])
    (base / "benchmarks").mkdir()
    (base / "benchmarks" / "__init__.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(Worse, match=f"^{HERE}: waits grew from 3 to 4$"):
        main(["--base", str(base)])

    (base / "torchgpipe" / "__init__.py").write_text("print('hello')\n")
    capsys.readouterr()
    main(["--base", str(base)])
    assert "the base cannot be judged (" in capsys.readouterr().out
    for nothing in ("nowhere", str(base / "benchmarks")):
        with pytest.raises(SystemExit):
            main(["--base", nothing])
        assert "or a folder with a torchgpipe in it" in capsys.readouterr().err


def test_update_writes_the_files_and_not_the_base(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = false_base(tmp_path, 0, ROW, ["0 B0"])
    with pytest.raises(SystemExit):
        main(["--update", "--base", str(base)])
    assert "--update writes the committed files" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize("content", [None, "[1]"])
def test_a_broken_file_is_refused_in_one_line(content: str | None, file: Path) -> None:
    if content is not None:
        file.write_text(content)
    advice = "write it by python -m benchmarks.gates.counts --update"
    with pytest.raises(Error, match=f"^counts: .*{COUNTS}.*; {advice}$"):
        main([])


def waits_for_an_event() -> None:
    relay.threading.Event().wait(0)


def looks_into_a_queue() -> None:
    relay.SimpleQueue().empty()


def sleeps() -> None:
    time.sleep(0)


def reads_a_clock() -> None:
    time.perf_counter()


@pytest.mark.parametrize(
    ("does", "waits", "idles"),
    [(waits_for_an_event, 1, 0), (looks_into_a_queue, 0, 1), (sleeps, 0, 1), (reads_a_clock, 0, 1)],
)
def test_what_a_task_waits_for_counts(
    does: Any, waits: int, idles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that `benchmarks.gates.counts` counts waits and polling.

    The library's backwards do neither. So the test adds a call to each backward: a wait for an
    event, or, as polling, a look into a queue, a sleep, or a reading of a clock.
    """
    backward = TaskGraph.backward
    before = count(WORKERS)

    def with_more(self: TaskGraph, grads: Any, **options: Any) -> Any:
        does()
        return backward(self, grads, **options)

    monkeypatch.setattr(TaskGraph, "backward", with_more)
    after = count(WORKERS)
    assert after.waits == before.waits + waits * TASKS
    assert after.idles == idles * TASKS


def test_a_forward_that_is_one_place_late(monkeypatch: pytest.MonkeyPatch) -> None:
    committed = json.loads((FOLDER / "orders.json").read_text())
    name = "1F1B never workers"
    cached.cache_clear()
    assert order("workers", "1F1B", "never") == committed[name]
    cached.cache_clear()

    def late(n: int, m: int, v: int) -> Any:
        return named.looped(n, m, v, lambda d: max(0, n - 1 - d - (d == 0)))

    monkeypatch.setitem(named.NAMED, "1F1B", (late, 1))
    noted = {name: order("workers", "1F1B", "never")}
    cached.cache_clear()
    (line,) = other_orders({name: committed[name]}, noted)
    assert line.startswith(f"{name}: device 0 runs B0a 2a B1a")


BROKEN = {
    "a syntax error": ("engine/program.py", "class Program:", "class Program", "SyntaxError"),
    "a schedule that waits for ever": (
        "schedules/named.py",
        "per_device * (n - 1 - d))",
        "per_device * d)",
        "ValueError: device 0 waits for ever: ",
    ),
}


@pytest.mark.parametrize(
    ("gate", "fault"),
    [
        pytest.param("counts", "a schedule that waits for ever", marks=pytest.mark.slow),
        ("meeting", "a syntax error"),
        pytest.param("counts", "a syntax error", marks=pytest.mark.slow),
        pytest.param("meeting", "a schedule that waits for ever", marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_that_does_not_run_is_told_in_one_line(
    gate: str, fault: str, tmp_path: Path
) -> None:
    path, old, new, said = BROKEN[fault]
    shutil.copytree(ROOT / "torchgpipe", tmp_path / "torchgpipe")
    file = tmp_path / "torchgpipe" / path
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))

    found = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gates.{gate}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )

    assert found.returncode == 2
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"{gate}: the pipeline does not run: ")
    assert said in line
