"""How large each folder may be. Growth is a decision: it changes a line here, and the diff shows it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIDE_BY_SIDE = 15  # files of Python in a folder, beside its `__init__`
STATEMENTS = 27_200  # in all; docstrings are none. Lines can be had by squeezing, and statements cannot.

# Lines of Python. A folder's limit holds for the folders within it together; "." is all.
LIMITS = {
    ".": 46_500,
    "torchgpipe": 14_000,
    "torchgpipe/schedules": 600,
    "torchgpipe/tensors": 650,
    "torchgpipe/task": 1_900,
    "torchgpipe/engine": 1_100,
    "torchgpipe/skip": 310,
    "torchgpipe/trace": 1_700,
    "torchgpipe/balance": 480,
    "torchgpipe/distributed": 2_100,
    "torchgpipe/state": 700,
    "torchgpipe/plan": 3_900,
    "torchgpipe/timeline": 380,
    "reproduce": 10_400,
    "benchmarks": 2_400,
    "tests": 19_400,
    "examples": 300,
}


def files(folder: str) -> list[Path]:
    """Return a folder's files of Python, without those of environments and builds beside the packages."""
    tops = ["."] if folder != "." else ["torchgpipe", "reproduce", "benchmarks", "tests", "examples"]
    found = [path for top in tops for path in (ROOT / folder / top).rglob("*.py")]
    return found + ([ROOT / "setup.py"] if folder == "." else [])


def statements(path: Path) -> int:
    """Count the statements of a file, without docstrings."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = sum(isinstance(node, scopes) and ast.get_docstring(node, clean=False) is not None for node in nodes)
    return sum(isinstance(node, ast.stmt) for node in nodes) - documented


@pytest.mark.parametrize("folder", LIMITS)
def test_lines(folder: str) -> None:
    lines = sum(path.read_text().count("\n") for path in files(folder))
    assert 0 < lines <= LIMITS[folder], f"{folder} has {lines:,} lines of Python, and may have {LIMITS[folder]:,}"


def test_statements() -> None:
    count = sum(map(statements, files(".")))
    assert 0 < count <= STATEMENTS, f"there are {count:,} statements, and may be {STATEMENTS:,}"


def test_files_side_by_side() -> None:
    folders = {path.parent for path in files(".")}
    many = {
        folder: n for folder in folders if (n := len({*folder.glob("*.py")} - {folder / "__init__.py"})) > SIDE_BY_SIDE
    }
    assert folders and not many
