"""Plant losses of speed in copies of this repository; count how often `regression` finds them.

losses.json has the losses: the file, the old text, the new text, and the gates that find the loss.

    python -m tests.planted.losses                          # 10 runs of each loss: hours
    python -m tests.planted.losses --unchanged --runs 40    # how often there is an alarm
    python -m tests.planted.losses --only spins --runs 3 -- --gate times --restarts 14

The arguments after `--` are for `python -m reproduce regression`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from reproduce.error import WORSE

from .__main__ import Row, copied

LOSSES = Path(__file__).with_name("losses.json")
GATES = ("counts", "meeting", "times")
ASKED = ["regression", "--base", "HEAD", "--format", "json"]


@dataclass
class Loss(Row):
    """A loss of speed, and the gates that find it."""

    gates: list[str] = field(default_factory=list)


def read() -> list[Loss]:
    return [Loss(**row) for row in json.loads(LOSSES.read_text())]


def found_by(tree: Path, arguments: list[str]) -> set[str]:
    """Compare the working tree with its commit; return the gates that find a loss.

    The result also has `cannot tell` if the exit code says so.
    """
    command = [sys.executable, "-m", "reproduce", *ASKED]
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run([*command, *arguments], cwd=tree, env=env, capture_output=True)
    found = set[str]()
    for number in json.loads(ended.stdout)["numbers"] if ended.stdout else ():
        if number["verdict"] == "worse":
            found.add(number["row"] if number["row"] in GATES else "times")
    if ended.returncode not in (0, WORSE):
        found.add("cannot tell")
        *_, why = ended.stderr.decode().splitlines() or [""]
        print(why, file=sys.stderr)
    return found


def commit(tree: Path) -> None:
    """Commit the whole working tree, which may have changes that the repository lacks."""
    name = ["-c", "user.name=planted", "-c", "user.email=planted@localhost"]
    subprocess.run(["git", "add", "--all"], cwd=tree, check=True)
    message = ["commit", "--quiet", "--allow-empty", "--no-verify", "--message", "unchanged"]
    subprocess.run(["git", *name, *message], cwd=tree, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted.losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=10, help="how many runs of each loss")
    parser.add_argument("--only", default="", metavar="TEXT", help="losses with this text")
    parser.add_argument("--unchanged", action="store_true", help="plant nothing")
    parser.add_argument("arguments", nargs="*", help="arguments of regression, after --")
    asked = parser.parse_args()
    losses = [loss for loss in read() if asked.only in loss.kind]
    if asked.unchanged:
        losses = [Loss("", "nothing is changed", "", "")]
    missed = 0
    with copied() as tree:
        commit(tree)
        for loss in losses:
            path = tree / loss.file
            if loss.file:
                before = path.read_text()
                path.write_text(loss.planted(tree))
            by = Counter[str]()
            runs = 0
            untold = 0
            for _ in range(asked.runs):
                found = found_by(tree, asked.arguments)
                by.update(found)
                runs += not found.isdisjoint(GATES)
                untold += "cannot tell" in found
            if loss.file:
                path.write_text(before)
            wanted = 0 if asked.unchanged else asked.runs
            missed += runs != wanted or untold > 0
            each = [f"{name} {count}" for name, count in sorted(by.items())]
            names = ", ".join(each) or "by none"
            listed = ", ".join(loss.gates) or "none"
            said = f"found in {runs} of {asked.runs}  {loss.kind}  ({names}; listed: {listed})"
            print(said, flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
