"""How many files may lie side by side, and how long one may be: what a reader has to look through to find a place."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIDE_BY_SIDE = 15  # files of Python in a folder, beside its `__init__`
LONGEST = 350  # lines of a file of Python


def files() -> list[Path]:
    """Return all files of Python, without those of environments and builds beside the packages."""
    tops = ["torchgpipe", "reproduce", "benchmarks", "tests", "examples"]
    return [path for top in tops for path in (ROOT / top).rglob("*.py")] + [ROOT / "setup.py"]


def test_files_side_by_side() -> None:
    folders = {path.parent for path in files()}
    many = {
        folder: n
        for folder in folders
        if (n := len({*folder.glob("*.py")} - {folder / "__init__.py"})) > SIDE_BY_SIDE
    }
    assert folders and not many


def test_the_longest_file() -> None:
    lengths = {path: path.read_text().count("\n") for path in files()}
    assert lengths and not {path: lines for path, lines in lengths.items() if lines > LONGEST}
