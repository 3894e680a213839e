"""Plant faults (wrong code) in copies of this repository, and check that tests find them.

rows.json lists the faults: the file, the text to replace, the faulty text, and the test that finds
the fault. Some of these tests need a browser. Without a browser, such a test is skipped, and it
stays unknown whether it finds its fault.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("rows.json")


@dataclass
class Row:
    """A fault to plant in a file: its `old` text is replaced by its `new` text.

    `by` names the test that finds the fault. It is empty if no test finds it.
    """

    file: str
    kind: str
    old: str
    new: str
    by: str = ""

    def planted(self, tree: Path = ROOT) -> str:
        """Return the text of the file after `old` is replaced by `new`, which plants the fault."""
        path = tree / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.old) != 1:
            raise SystemExit(
                "planted: the old text of a fault must occur once in its file, but "
                f"{self.file} has it {text.count(self.old)} times: {self.old!r}. If the file has "
                "moved or changed, correct `file` or `old` of this fault in tests/planted/*.json"
            )
        return text.replace(self.old, self.new)


def read() -> list[Row]:
    return [Row(**row) for row in json.loads(ROWS.read_text())]


@contextmanager
def copied(source: Path = ROOT) -> Iterator[Path]:
    """Copy the working tree to a temporary folder, without the files that git ignores.

    The copy is a git clone, because some tests call git.
    """
    with TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder, "tree")
        subprocess.run(
            ["git", "clone", "--quiet", "--shared", "--no-checkout", ".", str(tree)],
            cwd=source,
            check=True,
        )
        subprocess.run(["git", "reset", "--quiet"], cwd=tree, check=True)
        listed = subprocess.check_output(
            ["git", "ls-files", "-zco", "--exclude-standard"], cwd=source, text=True
        )
        for name in filter(None, listed.split("\0")):
            if (source / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, tree / name)
        yield tree


Outcome = Literal["passed", "failed", "skipped"]


def outcome(tree: Path, test: str, limit: float, stop: threading.Event) -> Outcome:
    """Run a test, even one that is marked as slow, and return its outcome.

    A test that takes longer than `limit` seconds counts as failed.
    """
    options = ["-xq", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code, printed = _run_pytest(tree, [*options, "--slow", test], limit, stop)
    if code != 0:
        return "failed"
    return "passed" if re.search(r"\b\d+ passed\b", printed) else "skipped"


def _run_pytest(
    tree: Path, arguments: Sequence[str], limit: float, stop: threading.Event
) -> tuple[int | None, str]:
    """Run pytest. Return its exit code (`None` if it had to be stopped) and all that it printed."""
    command = [sys.executable, "-m", "pytest", *arguments]
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    end = time.monotonic() + limit
    with TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=env,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < end and not stop.wait(0.2):
                pass
            code = process.poll()
        finally:
            with suppress(ProcessLookupError):  # the process group has ended already
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return code, printed.read()


def try_fault(row: Row, plain: Path, limit: float, stop: threading.Event) -> str:
    """Plant a fault, run the test that should find it, and return whether the test has found it.

    Returns:
        "found" if the test fails with the fault and passes without it, "LOST" if it passes with the
        fault, "FAILS" if it fails even without the fault, "SKIPS" if it is skipped, and "-" if the
        fault names no test.
    """
    if not row.by:
        return "-"
    with copied(plain) as tree:
        (tree / row.file).write_text(row.planted(plain))
        if (with_fault := outcome(tree, row.by, limit, stop)) != "failed":
            return "LOST" if with_fault == "passed" else "SKIPS"
    return "found" if outcome(plain, row.by, limit, stop) == "passed" else "FAILS"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument(
        "--jobs", type=int, choices=[1, 2], default=1, help="how many faults to try at once"
    )
    parser.add_argument(
        "--limit", type=int, default=120, help="seconds for a test; more where the machine is busy"
    )
    parser.add_argument("files", nargs="*", help="try the faults of these files only")
    arguments = parser.parse_args()
    # A shell can start background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows, stop, found = read(), threading.Event(), list[str]()
    rows = [row for row in rows if not arguments.files or row.file in arguments.files]
    with copied() as plain, ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            tries = [pool.submit(try_fault, row, plain, arguments.limit, stop) for row in rows]
            for row, tried in zip(rows, tries, strict=True):
                result = tried.result()
                found.append(result)
                by = row.by or "no test finds it"
                print(f"{result:5}  {row.kind:17}  {row.file:40}  {by}", flush=True)
        except KeyboardInterrupt:
            return 130
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    print(f"{found.count('found')} of {len(found)} found")
    return int(not {*found} <= {"found", "-"})


if __name__ == "__main__":
    sys.exit(main())
