"""Test the program tests/planted/losses.py with made-up runs of `regression`."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gates.losses import GATES, table
from reproduce.error import Error
from reproduce.records.record import load

from . import losses
from .losses import NOTHING, Loss, Tally, found_by, is_as_wanted, main, planted

SPINS = "each backward spins for about a tenth of a millisecond"


class Runs:
    """A replacement for runs of the command `regression`, with made-up results.

    Attributes:
        answers: For each run to come, the gates (checks of `regression`) that find the planted loss
            of speed, or an exception to raise.
        asked: For each run so far, the gates that were to run.
    """

    def __init__(self) -> None:
        self.answers: list[set[str] | BaseException] = []
        self.asked: list[list[str]] = []

    def __call__(self, tree: Path, gates: Sequence[str], arguments: Sequence[str]) -> set[str]:
        self.asked.append(list(gates))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Plant nothing, and run nothing."""
    made = Runs()
    monkeypatch.setattr(losses, "found_by", made)
    monkeypatch.setattr(losses, "copied", lambda: nullcontext(Path()))
    monkeypatch.setattr(losses, "commit", lambda tree: None)
    monkeypatch.setattr(losses, "planted", lambda loss, tree: nullcontext())
    return made


def rows(file: Path) -> list[str]:
    """Return the rows of a record's table, without its heading and its last column."""
    lines = table(load(file)).splitlines()
    found = []
    for line in lines[2:]:
        *cells, _, of, _ = line.split()
        assert of == "of"
        found.append(" ".join(cells))
    return found


def test_a_result_says_of_which_revisions_its_runs_were() -> None:
    tally = Tally(NOTHING, [], revision="a")
    tally.add(["times"], set())
    tally.add(["times"], set())
    later = Tally(NOTHING, [], tally.results, "b")
    result, _ = later.add(["times"], set())
    assert result.config["revisions"] == {"a": 2, "b": 1}
    assert result.values["runs"] == 3


def test_what_is_missing_runs_and_is_added(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    asked = ["--out", str(file), "--only", "spins"]
    runs.answers = [{"times"}, KeyboardInterrupt()]
    with pytest.raises(SystemExit, match="130"):
        main([*asked, "--runs", "3"])
    assert rows(file) == [f"{SPINS} 0 of 1 0 of 1 1 of 1 0 of 1"]

    runs.answers = [{"times"}, set()]
    assert main([*asked, "--runs", "3"]) == 1, "one of three runs did not find it"
    assert rows(file) == [f"{SPINS} 0 of 3 0 of 3 2 of 3 0 of 3"]

    runs.answers = [{"times"}]
    runs.asked.clear()
    main([*asked, "--gate", "times", "--runs", "4"])
    assert runs.asked == [["times"]]
    main([*asked, "--runs", "3"])
    assert runs.asked == [["times"]], "all runs are there"
    assert rows(file) == [f"{SPINS} 0 of 3 0 of 3 3 of 4 0 of 4"]

    runs.answers = [set()]
    assert main(["--out", str(file), "--unchanged", "--runs", "1"]) == 0
    assert rows(file)[1:] == ["nothing is changed 0 of 1 0 of 1 0 of 1 0 of 1"]


def test_only_losses_of_the_chosen_gates_are_planted(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    runs.answers = [{"meeting"}] * 4
    assert main(["--out", str(file), "--gate", "meeting", "--runs", "1"]) == 0
    found = {result.experiment for result in load(file).results}
    assert found == {loss.kind for loss in losses.read() if "meeting" in loss.gates}


def test_runs_with_other_arguments_are_not_mixed(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    asked = ["--out", str(file), "--only", "spins", "--runs", "1"]
    runs.answers = [{"times"}]
    assert main([*asked, "--", "--restarts", "14"]) == 0
    with pytest.raises(Error, match=r"arguments .*'14'\] for regression, but now they are \[\]"):
        main(asked)
    with pytest.raises(Error, match="give --gate before the --"):
        main(["--", "--gate", "times"])
    with pytest.raises(Error, match="--only no such: no slow-down that the chosen gates"):
        main(["--only", "no such"])


@pytest.mark.parametrize(
    ("loss", "found", "wanted"),
    [
        (Loss("", "a loss", "", "", gates=["counts", "times"]), [{"counts"}] * 2, True),
        (Loss("", "a loss", "", "", gates=["counts"]), [{"counts"}, {"times"}], False),
        (Loss("", "a loss", "", "", gates=["counts"]), [{"meeting"}] * 2, False),
        (Loss("", "a loss", "", "", gates=["counts"]), [{"counts", "cannot tell"}] * 2, False),
        (NOTHING, [set(), set()], True),
        (NOTHING, [set(), {"meeting"}], False),
        (NOTHING, [set(), {"cannot tell"}], False),
    ],
)
def test_what_is_wanted(loss: Loss, found: list[set[str]], wanted: bool) -> None:
    tally = Tally(loss, [])
    for each in found:
        tally.add(GATES, each)
    assert is_as_wanted(tally, GATES) == wanted


def test_a_loss_is_planted_and_taken_out_again(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("x = 1\n")
    with planted(Loss("code.py", "a loss", "1", "2"), tmp_path):
        assert file.read_text() == "x = 2\n"
    assert file.read_text() == "x = 1\n"


FOUND = {"numbers": [{"row": "counts", "verdict": "worse"}, {"row": "a case", "verdict": "worse"}]}
NONE = {"numbers": [{"row": "meeting", "verdict": "~"}]}
PROGRAM = """
import sys
if "counts" not in sys.argv:
    sys.exit("all gates")
sys.stdout.write({printed!r})
sys.exit({code!r})
"""


@pytest.mark.parametrize(
    ("printed", "code", "found"),
    [
        (json.dumps(FOUND), 1, {"counts", "times"}),
        (json.dumps(NONE), 0, set()),
        (json.dumps(NONE), 2, {"cannot tell"}),
        ("", 2, {"cannot tell"}),
    ],
)
def test_what_regression_has_found(
    printed: str, code: Any, found: set[str], tmp_path: Path
) -> None:
    (tmp_path / "reproduce.py").write_text(PROGRAM.format(printed=printed, code=code))
    assert found_by(tmp_path, ["counts"], []) == found
