"""Draw faults from a seed, up to 45 in the library and 15 in reproduce; reject what any run would show.

Rows that are there stay. For one that is no fault after all, or whose code has gone, delete it and draw again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
from collections import Counter
from pathlib import Path

from .candidates import NAMED, Finder
from .rows import ROOT, ROWS, Row, copied, read, write
from .smoke import show

COUNTS = {"torchgpipe": 45, "reproduce": 15}
FILES_LIMIT = 2  # faults in one file
# Files that are about to go, and functions about what goes in the others.
GOES = (
    r"hang\.py|plan/(bound|branch|chain|needs|cuts|balances|trial|search)\.py|reproduce/predict/(calibrate|older)\.py"
)
GOES += r"|models/older\.py|cli/calibrate\.py|league_docs\.py|report/curves\.py|/__\w+__\.py"
GOING = r"\b(silence|hangs?|_watch)\b"  # in pool.py and those that call it
FIRST = [name for name, *_ in NAMED] + ["dropped wait", "version check"]


def candidates(package: str) -> list[Row]:
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if not re.search(GOES, file):
            found += Finder(
                file, path.read_text(), GOING if re.search(r"torchgpipe/(pool|gpipe)\.py", file) else "(?!)"
            ).rows
    return found


def shown(tree: Path, package: str) -> str | None:
    """Return what a short run prints, None if it fails or hangs."""
    output = tree.with_suffix(".txt")
    # Forked, so that torch is imported once for all.
    process = multiprocessing.get_context("fork").Process(target=show, args=(package, tree, output))
    process.start()
    process.join(60)
    process.kill()
    process.join()
    return output.read_text() if process.exitcode == 0 else None


def draw(package: str, taken: list[Row], count: int, rng: random.Random, tree: Path) -> list[Row]:
    """Draw a kind, then a file of that kind by its size, then a fault; each kind of the plan's comes first once."""
    rows, usual = candidates(package), shown(tree, package)
    if usual is None:
        raise SystemExit("the short run fails without a fault, too")
    there = {(row.file, row.new) for row in taken}
    rows = [row for row in rows if (row.file, row.new) not in there]
    first = [kind for kind in FIRST if all(row.kind != kind for row in taken)]
    while len(taken) < count:
        files = Counter(row.file for row in taken)
        rows = [row for row in rows if files[row.file] < FILES_LIMIT]
        first = [kind for kind in first if any(row.kind == kind for row in rows)]
        kind = first[0] if first else rng.choice(sorted({row.kind for row in rows}))
        names = sorted({row.file for row in rows if row.kind == kind})
        (name,) = rng.choices(names, [(ROOT / n).stat().st_size for n in names])
        row = rng.choice([row for row in rows if (row.kind, row.file) == (kind, name)])
        rows = [other for other in rows if other is not row]
        path = tree / row.file
        path.write_text(row.planted())
        same = shown(tree, package) == usual
        path.write_text((ROOT / row.file).read_text())
        print("drawn   " if same else "rejected", row.kind, row.file, repr(row.new), flush=True)
        if same:
            taken.append(row)
            first = [other for other in first if other != kind]
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    rng = random.Random(parser.parse_args().seed)
    rows = read() if ROWS.exists() else []
    with copied() as tree:
        for package, count in COUNTS.items():
            mine = [row for row in rows if row.file.startswith(package)]
            rows = [row for row in rows if row not in mine] + draw(package, mine, count, rng, tree)
    write(rows)


if __name__ == "__main__":
    main()
