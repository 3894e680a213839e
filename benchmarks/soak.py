"""An hour of trainings on four ranks in which things go wrong at random, and in which every number is checked.

    python -m benchmarks.soak --minutes 60 --seed 1 --json runs/soak.json
    python -m benchmarks.soak --seed 1 --only 17                             # that episode alone

An episode is a short training of a small model. Ranks are killed, stopped, raise, run out of memory or hang, in any
place; then they are started again, or go on, from the last saved state. Losses, norms of gradients, outputs,
parameters, buffers and the optimizer's state are compared with those of an undisturbed `GPipe` in one process.

Each episode that has ended is a line in a log beside the record (FILE.jsonl). Started again, the same command goes on
with the next episode.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.harness import command, positive, start
from benchmarks.soak_episode import Trial
from benchmarks.soak_plan import draw_episode
from benchmarks.soak_processes import Crew, Networks, use
from benchmarks.soak_reports import Line
from benchmarks.soak_summary import bad, summary, table
from benchmarks.two_machines import again_apart, problem
from reproduce.cli.interrupt import interruptible
from reproduce.error import Error
from reproduce.records.record import Record, Run, save
from reproduce.run.progress import Progress
from reproduce.run.recorder import now

__all__ = ["main", "table"]

SILENCE = 3.0
"""Seconds, for all pipelines."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run episodes until the time is over, and print what happened; exit with 1 if anything was not as it should be."""
    options = parser().parse_args(arguments)
    if not options.inside:
        if (why := problem()) is None:
            again_apart("soak", arguments)
        print(f"no network namespaces ({why}): no links are cut", file=sys.stderr)
    path: Path | None = None if options.only else options.json
    apart = options.inside
    del options.inside
    record = start(options, "soak", "random faults", {}, devices=4)
    try:
        log = Log(path, record)
    except Error as error:
        raise SystemExit(str(error)) from None
    numbers: Iterable[int] = options.only or itertools.count(log.next)
    failed = None if options.json is None else options.json.with_suffix(".failed")
    progress, state = Progress(), "interrupted"
    try:
        with interruptible() as check, closing(episodes(options.seed, numbers, failed, apart=apart)) as lines:
            while options.only or log.seconds < 60 * options.minutes:
                if (line := next(lines, None)) is None:
                    break
                log.add(line)
                if (said := bad(line)) and not line["again"]:
                    print(f"episode {line['episode']}: {said[0]}", file=sys.stderr)
                progress.show(f"{len(log.lines)} episodes, {log.seconds / 60:.1f} of {options.minutes:g} minutes")
                check()
        state = "finished"
    except KeyboardInterrupt:
        pass
    progress.clear()
    assert log.record.run is not None
    record = replace(log.record, run=replace(log.record.run, state=state, ended=now()), results=summary(log.lines))
    print(table(record))
    if path is not None:
        save(record, path)
    if state == "interrupted":
        raise SystemExit(130)
    raise SystemExit(any(bad(line) for line in log.lines if not line["again"]))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = command("soak", __doc__ or "")
    made.add_argument("--minutes", type=float, default=60.0, help="how long, all runs together (default 60)")
    made.add_argument("--seed", type=positive, default=1, help="what everything follows from (default 1)")
    made.add_argument("--only", type=int, nargs="+", metavar="N", help="run these episodes, and keep nothing")
    made.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return made


def episodes(seed: int, numbers: Iterable[int], failed: Path | None, *, apart: bool) -> Generator[Line]:
    """Run episodes, with networks if this process is `apart`; yield a line for each.

    What processes have printed in those that fail stays in a folder.
    """
    networks = None
    if apart:
        networks = Networks()
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory(prefix="soak-") as name, closing(Crew(Path(name), networks)) as crew:
        for number in numbers:
            stopped = True
            while stopped:  # what fails when the soak was stopped meanwhile is tried again
                folder = Path(name) / f"{number} {time.monotonic_ns()}"
                began, trial = time.monotonic(), Trial(draw_episode(seed, number, SILENCE, cuts=apart), crew, folder)
                trial.run()
                line = trial.line() | {"seconds": round(time.monotonic() - began - trial.clock.stopped, 3)}
                stopped = bool(bad(line)) and not trial.wrong and trial.clock.stopped > 0
                if bad(line):
                    crew.end()
                    if failed is not None:
                        shutil.copytree(folder, failed / folder.name)
                shutil.rmtree(folder, ignore_errors=True)
                yield line | {"again": stopped, "use": line["use"] | {"soak": {"life": 1, **use()}}}


class Log:
    """A line for each episode that has ended, in a file if there is one, which a later run goes on with."""

    def __init__(self, path: Path | None, record: Record) -> None:
        self._path = None if path is None else path.with_suffix(".jsonl")
        self.record = record
        self.lines: list[Line] = []
        if self._path is not None and self._path.exists():
            text = self._path.read_text()
            text = text[: text.rfind("\n") + 1]  # a line that was not finished is none
            self._path.write_text(text)
            head, *self.lines = [json.loads(line) for line in text.splitlines()]
            self.record = replace(record, run=msgspec.convert(head, Run))
            self._check(record)
        else:
            self._write(msgspec.to_builtins(record.run))

    @property
    def seconds(self) -> float:
        """How long all episodes took."""
        return float(sum(line["seconds"] for line in self.lines))

    @property
    def next(self) -> int:
        """The number of the next episode."""
        return 1 + max((line["episode"] for line in self.lines if not line["again"]), default=0)

    def add(self, line: Line) -> None:
        """Add a line."""
        self.lines.append(line)
        self._write(line)

    def _write(self, line: Line) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _check(self, now: Record) -> None:
        """Refuse to go on with what another revision, or another seed, began."""
        assert now.run is not None and self.record.run is not None
        for what, old, new in (
            ("revision", self.record.run.git and self.record.run.git.revision, now.run.git and now.run.git.revision),
            ("seed", self.record.run.settings["seed"], now.run.settings["seed"]),
        ):
            if old != new:
                raise Error(
                    f"{self._path} was begun with the {what} {old}, not {new}; go on with that, or name another"
                )


if __name__ == "__main__":
    main()
