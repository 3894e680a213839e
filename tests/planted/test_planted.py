"""The rows match the files, and a fault in a tiny tree is found."""

import ast
import subprocess
import threading
from pathlib import Path

import pytest

from .__main__ import ALL_PASS, try_fault
from .rows import ROOT, Row, copied, read

ROWS = read()


@pytest.mark.parametrize("row", ROWS, ids=[f"{k} {row.file}" for k, row in enumerate(ROWS)])
def test_rows(row: Row) -> None:
    """The old text occurs once in the file, and the new text changes the program."""
    assert ast.dump(ast.parse(row.planted())) != ast.dump(ast.parse((ROOT / row.file).read_text()))


def test_a_fault_is_found(tmp_path: Path) -> None:
    """A fault is found if a test of the module fails, but not if that test always fails."""
    code = "def less(a, b):\n    return a < b\n\ndef more(a, b):\n    return a > b\n"
    tests = "import code_\n\ndef test_less():\n    assert not code_.less(1, 1)\n\ndef test_no():\n    assert False\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / "code_.py").write_text(code)
    (tmp_path / "tests/test_code.py").write_text(tests)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    rows = [Row("code_.py", "off by one", f"a {old} b", f"a {old}= b") for old in "<>"]
    with copied(tmp_path) as plain:
        found = [try_fault(row, plain, 600, threading.Event()) for row in rows]
    assert [(row.found, row.by) for row in found] == [
        (True, "tests/test_code.py::test_less"),
        (False, f"{ALL_PASS} but 1, which fail in any case or not always"),
    ]
