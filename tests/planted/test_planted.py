"""Test rows.json and losses.json, which list faults, and the program that plants these faults.

To plant a fault means to make a copy of the code wrong or slower, and then to see whether a test,
or a check of speed, finds the fault.
"""

import ast
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gates.losses import GATES
from reproduce.cli.main import COMMANDS

from ..behaviours.compare import differences
from ..behaviours.guarded import GUARDS, OF_ITS_OWN
from . import losses
from .__main__ import ROOT, Row, copied, read, try_fault

ROWS = read()


@pytest.mark.parametrize("row", ROWS, ids=[f"{k} {row.file}" for k, row in enumerate(ROWS)])
def test_rows(row: Row) -> None:
    """Check that each fault of rows.json changes the code, and that the test to find it exists."""
    program, changed = (ROOT / row.file).read_text(), row.planted()
    assert changed != program
    if row.file.endswith(".py"):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(program))
    file, _, test = row.by.partition("::")
    function, _, _ = test.partition("[")
    if test:
        assert f"def {function}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("loss", losses.read(), ids=lambda loss: loss.kind)
def test_losses(loss: losses.Loss) -> None:
    """Check that each fault of losses.json, which makes the library slower, changes the code.

    Also check that the gates (checks of the command `regression`) that must find this fault exist.
    """
    program, changed = (ROOT / loss.file).read_text(), loss.planted()
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(program))
    assert loss.gates
    assert set(loss.gates) <= set(GATES)


def test_losses_are_looked_for_by_a_command_that_exists() -> None:
    name, *options = losses.ASKED
    (command,) = [each for each in COMMANDS if each.name == name]
    command.make_context(name, options)  # raises if there is no such option or value


def test_each_guard_has_a_fault_that_its_rows_have_to_find() -> None:
    found = []
    for row in ROWS:
        found += re.findall(r"::test_rows_of_guards\[(\w+)\]", row.by)
    assert sorted(found) == sorted(GUARDS - OF_ITS_OWN.keys())


CODE = """\
def less(a, b):
    return a < b

def more(a, b):
    return a > b
"""
CONFTEST = """\
def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true")

def pytest_collection_modifyitems(config, items):
    if not config.getoption("slow"):
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
"""
TESTS = """\
import code_
import pytest

def test_less():
    assert not code_.less(1, 1)

def test_no():
    assert False

@pytest.mark.slow
def test_slow():
    assert not code_.less(1, 1)

@pytest.mark.skip
def test_skipped():
    assert not code_.less(1, 1)
"""


def test_a_fault_is_found(tmp_path: Path) -> None:
    """Plant faults in a small project, and check the report on each of them.

    A fault is found if its test fails with the fault and passes without it. The test may be a slow
    one, but if the test is skipped, the fault does not count as found.
    """
    (tmp_path / "tests").mkdir()
    (tmp_path / "code_.py").write_text(CODE)
    (tmp_path / "tests/test_code.py").write_text(TESTS)
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    rows = []
    for old, by in (("<", "less"), ("<", "no"), (">", "slow"), ("<", "skipped")):
        test = f"tests/test_code.py::test_{by}"
        rows.append(Row("code_.py", "", f"a {old} b", f"a {old}= b", test))
    found = []
    with copied(tmp_path) as plain:
        for row in rows:
            result = try_fault(row, plain, 600, threading.Event())
            found.append(result)
    assert found == ["found", "FAILS", "LOST", "SKIPS"]


ONE, OTHER = torch.ones(2), torch.tensor([1.0, 1.1])
NEAR = ONE * (1 + 1e-6)
HALF, DOUBLE = ONE[:1], ONE.double()
TAKING = ONE.clone().requires_grad_() * 1
NAN = torch.full((2,), torch.nan)
X = {"x": ONE}
VALUES = [ONE, None, 1, "a"]
CASES: list[tuple[Any, Any, float, list[str]]] = [
    (ONE, ONE, 0, []),
    (VALUES, [ONE, None, 1, "a"], 0, []),
    ({"x": OTHER}, X, 0, ["x differs by 0.1, where the largest value is 1"]),
    ({"x": NEAR}, X, 1e-5, []),
    ({"x": NEAR}, X, 0, ["x differs by 9.5e-07, where the largest value is 1"]),
    ({"x": None}, X, 0, ["x missing"]),
    (X, {}, 0, ["x there, but not in the model"]),
    ({"x": HALF}, X, 1, ["x shape (1,) of torch.float32 for (2,) of torch.float32"]),
    ({"x": DOUBLE}, X, 1, ["x shape (2,) of torch.float64 for (2,) of torch.float32"]),
    (X, {"x": TAKING}, 0, ["x takes no gradient"]),
    ({"x": 1}, {"x": True}, 0, ["x is 1 for True"]),
    ([1.0], [1.0, 2.0], 0, ["1 missing", "length is 1 for 2"]),
    (NAN, ONE, 1, ["differs by nan, where the largest value is 1"]),
]


@pytest.mark.parametrize("ours, plain, tolerance, said", CASES)
def test_differences(ours: Any, plain: Any, tolerance: float, said: list[str]) -> None:
    assert [line.strip() for line in differences(ours, plain, tolerance)] == said
