"""Folders contain few files, and files are short, so that a reader finds a place quickly."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIDE_BY_SIDE = 15
"""The largest number of Python files in a folder, not counting `__init__.py`."""
LONGEST = 350
"""The largest number of lines in a Python file."""


def files() -> list[Path]:
    """Return all Python files of the project, but not those of virtual environments and builds."""
    found = [ROOT / "setup.py"]
    for top in ("torchgpipe", "reproduce", "benchmarks", "tests", "examples"):
        found += (ROOT / top).rglob("*.py")
    return found


def test_files_side_by_side() -> None:
    counts: Counter[Path] = Counter()
    for path in files():
        if path.name != "__init__.py":
            counts[path.parent] += 1
    assert counts
    for folder, count in counts.items():
        assert count <= SIDE_BY_SIDE, f"{folder} has {count} files"


def test_the_longest_file() -> None:
    found = files()
    assert found
    for path in found:
        lines = path.read_text().count("\n")
        assert lines <= LONGEST, f"{path} has {lines} lines"
