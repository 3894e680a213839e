"""Plant changes that make the library slower, and count how often `regression` finds them.

losses.json lists these losses of speed: the file, the text to replace, the slower text, and the
gates that must find the loss. A gate is a check of `regression`, which compares two revisions.

    python -m tests.planted.losses                          # 10 runs of each loss: hours
    python -m tests.planted.losses --gate counts --gate meeting --runs 1    # minutes
    python -m tests.planted.losses --unchanged --runs 40    # how often there is a false alarm
    python -m tests.planted.losses --gate times --only spins --runs 3 -- --restarts 14

The arguments after `--` are for `python -m reproduce regression`. With `--out FILE`, the results
are written to a record, and a later start adds only the runs that the record does not have yet.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from benchmarks.gates.losses import CANNOT_TELL, FOUND, GATES, REVISIONS, RUNS, table
from benchmarks.harness import (
    Found,
    by_case,
    collect,
    command,
    continued,
    in_format,
    positive,
    start,
)
from reproduce.error import WORSE, Error
from reproduce.records.record import Record, Result, load

from .__main__ import Row, copied

LOSSES = Path(__file__).with_name("losses.json")
ASKED = ["regression", "--base", "HEAD", "--format", "json"]
TITLE = "Losses of speed that were planted, and the gates of regression that find them"


@dataclass
class Loss(Row):
    """A change that makes the library slower, and the names of the gates that must find it.

    A gate is a check of the command `regression`.
    """

    gates: list[str] = field(default_factory=list)


NOTHING = Loss("", "nothing is changed", "", "")


def read() -> list[Loss]:
    return [Loss(**row) for row in json.loads(LOSSES.read_text())]


def chosen(asked: Namespace) -> list[Loss]:
    """Return the losses of speed (changes that make the library slower) that are to be planted.

    A loss is chosen if its description contains the text of `--only`, and if `--gate` names a gate
    (check of `regression`) that must find the loss. With `--unchanged`, nothing is planted.
    """
    if asked.unchanged:
        return [NOTHING]
    gates = set(asked.gates or GATES)
    losses = [loss for loss in read() if asked.only in loss.kind and gates & set(loss.gates)]
    if not losses:
        raise Error(
            f"--only {asked.only}: no slow-down that the chosen gates must find has this text in "
            "its `kind`; tests/planted/losses.json lists the kinds of all planted slow-downs"
        )
    return losses


class Tally:
    """Counts how often each gate (check of `regression`) has run, and has found one planted loss.

    Args:
        loss: The change that makes the library slower.
        arguments: Further arguments of the command `regression`, whose checks are the gates.
        before: Maps the name of each gate to its results in earlier runs.
        revision: The git revision of the code that is judged now.
    """

    def __init__(
        self,
        loss: Loss,
        arguments: Sequence[str],
        before: dict[str, Result] | None = None,
        revision: str = "",
    ) -> None:
        self.loss = loss
        self.arguments = list(arguments)
        self.revision = revision
        self.results = dict(before or {})

    def runs(self, name: str) -> int:
        """Return how often a gate (check of `regression`) has run.

        For the name `CANNOT_TELL`, return how often `regression` has run.
        """
        result = self.results.get(name)
        return 0 if result is None else int(result.values[RUNS])

    def found(self, name: str) -> int:
        """Return in how many of its runs a gate (check of `regression`) has found the loss.

        For the name `CANNOT_TELL`, return how many runs of `regression` have ended without a
        verdict.
        """
        result = self.results.get(name)
        return 0 if result is None else int(result.values[FOUND])

    def missing(self, gates: Sequence[str], runs: int) -> list[str]:
        """Return the names in `gates` of gates that have run less than `runs` times.

        A gate is a check of `regression`. Only runs with this planted loss count.
        """
        return [gate for gate in gates if self.runs(gate) < runs]

    def add(self, gates: Sequence[str], found: set[str]) -> list[Result]:
        """Count one more run of the given gates.

        Args:
            gates: The gates that have run.
            found: The gates in `gates` that have found the planted loss.

        Returns:
            The new counts, as results for a record.
        """
        for name in (*gates, CANNOT_TELL):
            values = {FOUND: self.found(name) + (name in found), RUNS: self.runs(name) + 1}
            earlier = self.results.get(name)
            revisions = Counter[str]({} if earlier is None else earlier.config.get(REVISIONS, {}))
            revisions[self.revision] += 1
            config = {"arguments": self.arguments, REVISIONS: dict(revisions)}
            self.results[name] = Result(
                self.loss.kind, name, "measured", config=config, values=values
            )
        return list(self.results.values())


def is_as_wanted(tally: Tally, gates: Sequence[str]) -> bool:
    """Return whether `regression` has found a planted loss of speed reliably.

    At least one gate (check of `regression`) that should find the loss must have found it in each
    of the gate's runs, and no run may have ended without a verdict. If nothing was planted
    (`NOTHING`), no gate may find anything.

    Args:
        tally: The counted results for the loss.
        gates: The gates that have run.
    """
    if tally.found(CANNOT_TELL):
        return False
    loss = tally.loss
    if loss is NOTHING:
        return not any(tally.found(gate) for gate in gates)
    finding = [gate for gate in gates if gate in loss.gates]
    return any(tally.found(gate) == tally.runs(gate) for gate in finding)


def judged(tallies: Sequence[Tally], gates: Sequence[str], runs: int) -> Found:
    """Plant each loss of speed, and run `regression` until each gate (check) has run `runs` times.

    Yield the results after each run.
    """
    with copied() as tree:
        commit(tree)
        for tally in tallies:
            with planted(tally.loss, tree):
                while missing := tally.missing(gates, runs):
                    found = found_by(tree, missing, tally.arguments)
                    yield tally.add(missing, found)


@contextmanager
def planted(loss: Loss, tree: Path) -> Iterator[None]:
    """Plant a loss of speed in the working tree `tree` until the `with` block ends."""
    if loss is NOTHING:
        yield
        return
    path = tree / loss.file
    before = path.read_text()
    path.write_text(loss.planted(tree))
    try:
        yield
    finally:
        path.write_text(before)


def found_by(tree: Path, gates: Sequence[str], arguments: Sequence[str]) -> set[str]:
    """Run `regression` in a working tree. Return the names of the gates that find a loss of speed.

    If the exit code says that `regression` could not judge, the result contains `CANNOT_TELL`.
    """
    program = [sys.executable, "-m", "reproduce", *ASKED]
    if len(gates) < len(GATES):  # all gates are the default
        for gate in gates:
            program += ["--gate", gate]
    folders = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join(folders)
    env = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*program, *arguments], cwd=tree, env=env, stdout=pipe, stderr=pipe, text=True
    )
    try:
        printed, said = process.communicate()
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    found = set[str]()
    for number in json.loads(printed)["numbers"] if printed else ():
        if number["verdict"] == "worse":
            found.add(number["row"] if number["row"] in GATES else "times")
    if process.returncode not in (0, WORSE):
        found.add(CANNOT_TELL)
        *_, why = said.splitlines() or [""]
        print(why, file=sys.stderr)
    return found


def commit(tree: Path) -> None:
    """Commit all files of the copy `tree`, also those that are not committed in the original."""
    name = ["-c", "user.name=planted", "-c", "user.email=planted@localhost"]
    subprocess.run(["git", "add", "--all"], cwd=tree, check=True)
    message = ["commit", "--quiet", "--allow-empty", "--no-verify", "--message", "unchanged"]
    subprocess.run(["git", *name, *message], cwd=tree, check=True)


def begun(asked: Namespace) -> Record:
    """Return the record that this run of the program fills, with earlier results of `--out FILE`.

    Raises:
        Error: If the results in the file were found with other arguments of `regression`, or if the
            arguments after `--` contain `--gate`.
    """
    if "--gate" in asked.arguments:
        raise Error(
            "give --gate before the --, not after it: this program counts the runs of each gate, "
            "so it has to know the gates"
        )
    options = Namespace(out=asked.out, arguments=asked.arguments)
    units = {FOUND: "count", RUNS: "count"}
    record = start(options, "losses", TITLE, units, devices=2)
    assert record.run is not None
    run = replace(record.run, command=["python", "-m", "tests.planted.losses"])
    record = replace(record, run=run)
    if asked.out is None or not asked.out.exists():
        return record
    before = load(asked.out)
    for result in before.results:
        other = result.config["arguments"]
        if other != asked.arguments:
            raise Error(
                f"--out {asked.out}: the runs in this file had the arguments {other} for "
                f"regression, but now they are {asked.arguments}; name another file"
            )
    # Each result says with which revisions its runs were, so no note has to say it.
    return replace(continued(record, before), notes=before.notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count how often planted losses of speed are found. Return the exit code.

    The exit code is 0 if all losses are found reliably, and otherwise 1.
    """
    parser = command("losses", __doc__, package="tests.planted")
    parser.add_argument(
        "--runs", type=positive, default=10, metavar="N", help="runs of each loss (default 10)"
    )
    parser.add_argument(
        "--gate",
        action="append",
        choices=GATES,
        dest="gates",
        help="only this gate, and losses that it finds; repeatable",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only losses with this text")
    parser.add_argument("--unchanged", action="store_true", help="plant nothing")
    parser.add_argument("arguments", nargs="*", help="arguments of regression, after --")
    asked = parser.parse_args(arguments)
    gates = asked.gates or GATES
    losses = chosen(asked)
    record = begun(asked)
    before = by_case(record)
    assert record.run is not None
    git = record.run.git
    revision = "unknown" if git is None else git.name(9, "+")
    tallies = []
    total = 0
    for loss in losses:
        tally = Tally(loss, asked.arguments, before.get(loss.kind), revision)
        total += max(0, asked.runs - min(map(tally.runs, gates)))
        tallies.append(tally)
    found = judged(tallies, gates, asked.runs)
    collect(record, asked.out, found, total, in_format(asked.format, table))
    return int(not all(is_as_wanted(tally, gates) for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
