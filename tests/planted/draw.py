"""Draw random faults until there are 45 in the library and 15 in reproduce. Deleted rows are replaced by new ones."""

import argparse
import importlib
import multiprocessing
import os
import pkgutil
import random
import re
import sys
from collections import Counter
from pathlib import Path

from .candidates import NAMED, faults
from .rows import ROOT, Row, copied, read, write

COUNTS = {"torchgpipe": 45, "reproduce": 15}
FIRST = [name for name, *_ in NAMED] + ["dropped wait", "version check"]


def show(package: str, tree: Path, output: Path) -> None:
    """Import all modules of a tree's package, run tiny steps (or the commands list and show), and save the output."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    with output.open("w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    for module in pkgutil.walk_packages([package], f"{package}."):
        importlib.import_module(module.name)
    if package == "torchgpipe":
        behaviours = importlib.import_module("tests.behaviours.row")
        for each in ("always", "never"):
            assert not behaviours.unlike(behaviours.Row("a step"), "", "graph", each)
    else:
        main = importlib.import_module("reproduce.cli.main").main
        print(main(["list"]), main(["show", str(min(Path("results/measured").glob("*.json")))]), flush=True)


def shown(package: str, tree: Path) -> str | None:
    """Return the output of a short run, None if it fails or hangs."""
    output = tree.with_suffix(".txt")
    # Forked, so that torch is imported only once, here.
    process = multiprocessing.get_context("fork").Process(target=show, args=(package, tree, output))
    process.start()
    process.join(60)
    process.kill()
    process.join()
    return output.read_text() if process.exitcode == 0 else None


def draw(package: str, taken: list[Row], rng: random.Random, tree: Path) -> None:
    """Draw a kind (those of `FIRST` first), a file by its size, a fault that leaves a short run's output alone."""
    paths = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / package).rglob("*.py"))}
    rows: list[Row] = []
    for file in paths:
        rows += [] if re.search(r"/__\w+__\.py", file) else faults(file, paths[file].read_text())
    usual = shown(package, tree)
    assert usual is not None, "the short run fails without a fault, too"
    while (files := Counter(row.file for row in taken)).total() < COUNTS[package]:
        there = {(row.file, row.old, row.new) for row in taken}
        rows = [row for row in rows if files[row.file] < 2 and (row.file, row.old, row.new) not in there]
        kinds = {row.kind for row in rows}
        first = [kind for kind in FIRST if kind in kinds and all(row.kind != kind for row in taken)]
        kind = first[0] if first else rng.choice(sorted(kinds))
        names = sorted({row.file for row in rows if row.kind == kind})
        (name,) = rng.choices(names, [paths[name].stat().st_size for name in names])
        row = rng.choice([row for row in rows if (row.kind, row.file) == (kind, name)])
        rows = [other for other in rows if other is not row]
        (tree / row.file).write_text(row.planted())
        same = shown(package, tree) == usual
        (tree / row.file).write_text(paths[row.file].read_text())
        print("drawn   " if same else "rejected", row.kind, row.file, repr(row.new), flush=True)
        taken += [row] * same


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.planted.draw", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    rng = random.Random(parser.parse_args().seed)
    packages = {package: [row for row in read() if row.file.startswith(package)] for package in COUNTS}
    with copied() as tree:
        for package, taken in packages.items():
            draw(package, taken, rng, tree)
    write([row for taken in packages.values() for row in taken])


if __name__ == "__main__":
    main()
