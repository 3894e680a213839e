"""Mutation testing: plant each fault in a copy, and run the tests that import its module until one fails."""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from .rows import Row, copied, importers, read, write

QUIET = 60  # seconds without output: such a test hangs if without the fault it takes less than half of that
ALL_PASS = "all tests pass"


def run_tests(tree: Path, tests: list[str], end: float, stop: threading.Event) -> tuple[int | None, str, float]:
    """Run tests until one fails. Return the exit code (None: timeout), the last test, the seconds without output."""
    log = tree.with_suffix(f".{threading.get_ident()}.log")
    command = [sys.executable, "-m", "pytest", "-xv", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=tree, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() < end and not stop.wait(0.2):
                pass
        finally:
            code, silence = process.poll(), time.time() - log.stat().st_mtime
            with suppress(ProcessLookupError):  # the process group has ended already
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    written = log.read_text(errors="replace")
    last = re.findall(r"^(?:ERROR |FAILED )?(tests/\S+\.py(?:::.*?)?)(?: (?:-|[A-Z]{5,}) .*| *)$", written, re.M)
    return code, last[-1] if last else tests[0], silence  # the first file, if no test has begun


def finder(row: Row, tree: Path) -> list[list[str]]:
    """Return the test that found the fault before, if it still exists. To run it first saves minutes."""
    test = row.by.split(" ")[0] if row.found else ""
    file, _, name = test.partition("::")
    there = name and (tree / file).is_file() and f"def {name}(" in (tree / file).read_text()
    return [[test]] if there else []


def try_fault(row: Row, plain: Path, limit: int, stop: threading.Event) -> Row:
    """Plant a fault in a copy of the plain tree, run tests, and return the row with the result."""
    rounds = [*finder(row, plain), *importers(plain, row.file)]
    end = time.monotonic() + limit
    result = Row(row.file, row.kind, row.old, row.new, found=False, by=ALL_PASS if rounds else "no test imports it")
    with copied(plain) as tree:
        (tree / row.file).write_text(row.planted(plain))
        passed_over: list[str] = []
        while rounds and not stop.is_set():
            code, last, silence = run_tests(tree, [*rounds[0], *passed_over], end, stop)
            if code in (0, 5):
                rounds.pop(0)
                continue
            if code is None and silence < QUIET:
                result.by = f"no failure in {limit} s"
                break
            more = QUIET / 2 if code is None else QUIET
            with_it, without = (run_tests(each, [last], time.monotonic() + more, stop)[0] for each in (tree, plain))
            if with_it != 0 and without == 0:
                result.found, result.by = True, last.split("[")[0] + (" hangs" if code is None else "")
                break
            passed_over.append(f"--deselect={last}")  # it also fails without the fault, or is flaky with it
            result.by = f"{ALL_PASS} but {len(passed_over)}, which fail in any case or not always"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--jobs", type=int, choices=[1, 2], default=1, help="how many faults to try at once")
    parser.add_argument("--limit", type=int, default=120, help="seconds for each; more where the machine is busy")
    parser.add_argument("--record", action="store_true", help="write the results into the rows' file")
    parser.add_argument("files", nargs="*", help="try the faults of these files only")
    arguments = parser.parse_args()
    for each in (signal.SIGINT, signal.SIGTERM):  # a shell may start background jobs with the signal ignored
        signal.signal(each, signal.default_int_handler)
    rows, stop = read(), threading.Event()
    chosen = [k for k, row in enumerate(rows) if not arguments.files or row.file in arguments.files]
    _, lost = [row.planted() for row in rows], 0
    with copied() as plain, ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            tries = {k: pool.submit(try_fault, rows[k], plain, arguments.limit, stop) for k in chosen}
            for k in chosen:
                before, rows[k] = bool(rows[k].found), tries[k].result()
                lost += before > bool(rows[k].found)
                mark = "found" if rows[k].found else "LOST" if before else "-"
                print(f"{mark:5}  {rows[k].kind:17}  {rows[k].file:40}  {rows[k].by}", flush=True)
                if arguments.record:
                    write(rows)
        except KeyboardInterrupt:
            return 130
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    print(f"{sum(bool(rows[k].found) for k in chosen)} of {len(chosen)} found" + f", {lost} no more" * bool(lost))
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
