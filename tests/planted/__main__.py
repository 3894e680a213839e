"""Plant each fault in a copy, and see whether the tests that import its module find it."""

from __future__ import annotations

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

from .importers import importers
from .rows import Row, copied, read, write

LIMIT = 120  # seconds for the tests of one fault
QUIET = 60  # of them without a word: what runs for so long hangs, if without the fault it ends within half of that
ALL_PASS, AT_LIMIT = "all tests pass", f"no failure in {LIMIT} s"


def run_tests(tree: Path, tests: list[str], limit: float, stop: threading.Event) -> tuple[int | None, str, float]:
    """Run tests up to the first failure. Return the exit code (None at the limit), the last test, and its silence."""
    log = tree.with_suffix(f".{threading.get_ident()}.log")
    command = [sys.executable, "-m", "pytest", "-xv", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() - start < limit and not stop.wait(0.2):
                pass
        finally:
            code, silence = process.poll(), time.time() - log.stat().st_mtime
            with suppress(ProcessLookupError):  # where it has ended and left nothing behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    written = log.read_text(errors="replace")
    last = re.findall(
        r"^(?:ERROR |FAILED )?(tests/\S+\.py(?:::.*?)?)(?: - .*| (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL).*| *)$",
        written,
        re.M,
    )
    return code, last[-1] if last else "", silence


def tried(row: Row, plain: Path, stop: threading.Event) -> Row:
    """Plant a fault in a copy of the plain tree, and return the row with what tests make of it."""
    rounds = importers(plain, row.file)
    end = time.monotonic() + LIMIT
    result = Row(row.file, row.kind, row.old, row.new, found=False, by=ALL_PASS if rounds else "no test imports it")
    with copied(plain) as tree:
        (tree / row.file).write_text(row.planted(plain))
        passed_over: list[str] = []
        while rounds and not stop.is_set():
            code, last, silence = run_tests(tree, [*rounds[0], *passed_over], end - time.monotonic(), stop)
            if code in (0, 5):
                rounds.pop(0)
                continue
            if code is None and silence < QUIET:
                result.by = AT_LIMIT
                break
            last = last or rounds[0][0]  # where not even that is told, as no test has begun
            if run_tests(plain, [last], QUIET / 2 if code is None else QUIET, stop)[0] == 0:
                result.found, result.by = True, last.split("[")[0] + (" hangs" if code is None else "")
                break
            passed_over.append(f"--deselect={last}")  # it fails, or takes long, without the fault, too
            result.by = f"{ALL_PASS} but {len(passed_over)}, which fail in any case"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--jobs", type=int, choices=[1, 2], default=1, help="how many faults to try at once")
    parser.add_argument("--record", action="store_true", help="write the results into the rows' file")
    parser.add_argument("files", nargs="*", help="try the faults of these files only")
    arguments = parser.parse_args()
    rows, stop = read(), threading.Event()
    chosen = [k for k, row in enumerate(rows) if not arguments.files or row.file in arguments.files]
    lost = 0
    with copied() as plain, ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            for row in rows:
                row.planted()
            results = [(k, pool.submit(tried, rows[k], plain, stop)) for k in chosen]
            for k, future in results:
                before, after = rows[k], future.result()
                gone = bool(before.found) and not after.found
                lost += gone
                mark = "found" if after.found else "LOST " if gone else "-    "
                print(f"{mark}  {after.kind:17}  {after.file:40}  {after.by}", flush=True)
                rows[k] = after
                if arguments.record:
                    write(rows)
        except ValueError as error:
            raise SystemExit(f"planted: {error}") from None
        except KeyboardInterrupt:
            return 130
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    print(f"{sum(bool(rows[k].found) for k in chosen)} of {len(chosen)} found" + f", {lost} no more" * bool(lost))
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
