"""Tests of the size of folders and files, and of the density of code.

Folders must contain few files, and files must be short, so that readers find a place quickly.
Expressions must be simple, so that readers understand them at once.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIDE_BY_SIDE = 15
"""The largest number of Python files in a folder, not counting `__init__.py`."""
LONGEST = 370
"""The largest number of lines in a Python file."""
WIDEST = 100
"""The largest number of characters in a line."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


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


def test_no_line_is_wide() -> None:
    for path in files():
        text = path.read_text()
        for number, line in enumerate(text.splitlines(), 1):
            assert len(line) <= WIDEST, f"{path}:{number} has {len(line)} characters"
        assert not re.search(r"fmt: *skip", text), f"{path} keeps a line from being formatted"


@pytest.mark.parametrize(
    ("folder", "comprehensions", "expressions"),
    [("torchgpipe", 4, 2.0), ("reproduce", 4, 2.0), ("benchmarks", 4, 2.0), ("tests", 5, 2.6)],
)
def test_density(folder: str, comprehensions: float, expressions: float) -> None:
    """Check that the statements in a folder have few expressions and comprehensions.

    Args:
        folder: The folder.
        comprehensions: The largest number of comprehensions in 100 statements.
        expressions: The largest number of expressions in a statement, on average. Names and
            constants are not counted.
    """
    counts: Counter[str] = Counter()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            counts["statements"] += isinstance(node, ast.stmt)
            counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
            if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Constant):
                counts["expressions"] += 1
    assert 100 * counts["comprehensions"] / counts["statements"] <= comprehensions
    assert counts["expressions"] / counts["statements"] <= expressions


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a Python syntax tree below a node, without the node itself."""
    for child in ast.iter_child_nodes(node):
        yield from ast.walk(child)


def test_nothing_is_within_its_like() -> None:
    """Check that no comprehension is within another, and no conditional expression in another.

    A comprehension may have only one `for`, except in constants at the top of a module.
    """
    for path in files():
        tree = ast.parse(path.read_text())
        tables: set[ast.AST] = set()
        for statement in tree.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                tables.update(ast.walk(statement))
        for node in ast.walk(tree):
            for kinds in (COMPREHENSIONS, (ast.IfExp,)):
                if isinstance(node, kinds):
                    inner = [each for each in within(node) if isinstance(each, kinds)]
                    assert not inner, f"{path}:{node.lineno} has an expression like itself within"
            if isinstance(node, COMPREHENSIONS) and node not in tables:
                assert len(node.generators) == 1, f"{path}:{node.lineno} has two `for`"
