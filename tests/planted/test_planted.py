"""What the suite relies on: rows match the files, a fault in a tiny tree is found, and what differs is said."""

import ast
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ..behaviours.compare import differences
from .__main__ import ROOT, Row, copied, read, try_fault

ROWS = read()


@pytest.mark.parametrize("row", ROWS, ids=[f"{k} {row.file}" for k, row in enumerate(ROWS)])
def test_rows(row: Row) -> None:
    """The old text occurs once in the file, the new text changes the program, and there is such a test."""
    assert ast.dump(ast.parse(row.planted())) != ast.dump(ast.parse((ROOT / row.file).read_text()))
    file, _, test = row.by.partition("::")
    assert not test or f"def {test}(" in (ROOT / file).read_text()


def test_a_fault_is_found(tmp_path: Path) -> None:
    """It is found if the test fails with it alone."""
    code = "def less(a, b):\n    return a < b\n\ndef more(a, b):\n    return a > b\n"
    tests = "import code_\n\ndef test_less():\n    assert not code_.less(1, 1)\n\ndef test_no():\n    assert False\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / "code_.py").write_text(code)
    (tmp_path / "tests/test_code.py").write_text(tests)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    named = [("<", "less"), ("<", "no"), (">", "less")]
    rows = [
        Row("code_.py", "", f"a {old} b", f"a {old}= b", f"tests/test_code.py::test_{by}")
        for old, by in named
    ]
    with copied(tmp_path) as plain:
        found = [try_fault(row, plain, 600, threading.Event()) for row in rows]
    assert found == ["found", "FAILS", "LOST"]


ONE, OTHER = torch.ones(2), torch.tensor([1.0, 1.1])
CASES: list[tuple[Any, Any, float, list[str]]] = [
    (ONE, ONE, 0, []),
    ([ONE, None, 1, "a"], [ONE, None, 1, "a"], 0, []),
    ({"x": OTHER}, {"x": ONE}, 0, ["x differs by 0.1, where the largest value is 1"]),
    ({"x": ONE * (1 + 1e-6)}, {"x": ONE}, 1e-5, []),
    (
        {"x": ONE * (1 + 1e-6)},
        {"x": ONE},
        0,
        ["x differs by 9.5e-07, where the largest value is 1"],
    ),
    ({"x": None}, {"x": ONE}, 0, ["x missing"]),
    ({"x": ONE}, {}, 0, ["x there, but not in the model"]),
    ({"x": ONE[:1]}, {"x": ONE}, 1, ["x shape (1,) of torch.float32 for (2,) of torch.float32"]),
    (
        {"x": ONE.double()},
        {"x": ONE},
        1,
        ["x shape (2,) of torch.float64 for (2,) of torch.float32"],
    ),
    ({"x": ONE}, {"x": ONE.clone().requires_grad_() * 1}, 0, ["x takes no gradient"]),
    ({"x": 1}, {"x": True}, 0, ["x is 1 for True"]),
    ([1.0], [1.0, 2.0], 0, ["1 missing", "length is 1 for 2"]),
    (torch.full((2,), torch.nan), ONE, 1, ["differs by nan, where the largest value is 1"]),
]


@pytest.mark.parametrize("ours, plain, tolerance, said", CASES)
def test_differences(ours: Any, plain: Any, tolerance: float, said: list[str]) -> None:
    assert [line.strip() for line in differences(ours, plain, tolerance)] == said
