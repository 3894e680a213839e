"""Rows fit the files, and a fault in a tiny tree is found."""

from __future__ import annotations

import ast
import subprocess
import threading
from pathlib import Path

import pytest

from .__main__ import ALL_PASS, tried
from .rows import Row, copied, read

ROWS = read()


@pytest.mark.parametrize("row", ROWS, ids=[f"{k} {row.file}" for k, row in enumerate(ROWS)])
def test_rows(row: Row) -> None:
    """The file has the old text once, and is Python with the new text, too."""
    ast.parse(row.planted())


def test_sixty_all_over_the_code() -> None:
    files = [row.file for row in ROWS]
    assert [sum(file.startswith(package) for file in files) for package in ("torchgpipe/", "reproduce/")] == [45, 15]
    assert max(files.count(file) for file in files) <= 2


def test_old_text_that_has_gone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"^b\.py has 'x' 0 times.*moves of files change the rows' paths"):
        Row("b.py", "sign", "x", "y").planted(tmp_path)


def test_a_fault_is_found(tmp_path: Path) -> None:
    """One that a test of the module sees; not one that only a broken test sees; and the tree stays as it was."""
    code = "def less(a, b):\n    return a < b\n\n\ndef more(a, b):\n    return a > b\n"
    tests = (
        "from code_ import less\n\n\ndef test_less():\n    assert not less(1, 1)\n\n\ndef test_no():\n    assert 0\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "code_.py").write_text(code)
    (tmp_path / "tests/test_code.py").write_text(tests)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    rows = [Row("code_.py", "off by one", f"a {old} b", f"a {old}= b") for old in "<>"]
    with copied(tmp_path) as plain:
        found = [tried(row, plain, threading.Event()) for row in rows]
        assert (plain / "code_.py").read_text() == code
    assert [(row.found, row.by) for row in found] == [
        (True, "tests/test_code.py::test_less"),
        (False, f"{ALL_PASS} but 1, which fail in any case"),
    ]
