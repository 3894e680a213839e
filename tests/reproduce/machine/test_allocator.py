"""The allocator: a program starts over once, with what it was given, and lets the user's own settings stand."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from reproduce.machine.allocator import KEEP_FREED

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, os, sys
print("started", file=sys.stderr)
from reproduce.machine.allocator import keep_freed_memory
keep_freed_memory()
print(json.dumps([sys.argv[1:], {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
@pytest.mark.parametrize(
    ("given", "starts", "found"),
    [
        ({}, 2, KEEP_FREED),
        ({"MALLOC_TOP_PAD_": "1"}, 1, {"MALLOC_TOP_PAD_": "1"}),
        ({"MALLOC_ARENA_MAX": "2"}, 2, {"MALLOC_ARENA_MAX": "2", **KEEP_FREED}),
    ],
    ids=["nothing", "one of them", "something else"],
)
def test_starts_over_once(given: dict[str, str], starts: int, found: dict[str, str]) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, "--an", "option"]
    environment = {**own, **given, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["--an", "option"], found]
    assert done.stderr.count("started") == starts
