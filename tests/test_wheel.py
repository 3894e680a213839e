"""Tests of the wheel, from which the library is installed.

The wheel must contain the library, and the package `reproduce` with its data. Both must work
without a git checkout.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "torchgpipe",
    "reproduce",
    "results",
)
WRITING = {
    "report": "report.html",
    "predict unet-speed": "predicted/*.json",
    "import-paper tables.json": "paper",
}
REFUSED = ("publish x --force", "render", "regression --base HEAD")
EACH = """
import sys
from reproduce.cli.main import main
print([main(each.split()) for each in sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_wheel_has_all_that_the_program_needs(tmp_path: Path) -> None:
    source, wheels, installed = tmp_path / "source", tmp_path / "wheels", tmp_path / "installed"
    copy_needed(source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build: list[Any] = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as file:
        assert_content(file.namelist())

    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tables = elsewhere / "tables.json"
    tables.write_text("[]")
    arguments = ("run", "amoebanet-memory", "--scale", "small", "--on", "cpu", "--row", "baseline")
    done = run(installed, elsewhere, str(installed / "bin" / "reproduce"), *arguments)
    assert done.returncode == 0, done.stderr
    runs = elsewhere / "runs"
    assert len(list(runs.glob("*.json"))) == 1
    done = run(installed, elsewhere, sys.executable, "-c", EACH, *WRITING, *REFUSED)
    assert done.stdout.endswith("[0, 0, 0, 2, 2, 2]\n"), done.stderr
    assert done.stderr.count("needs a checkout") == 3, done.stderr
    for written in WRITING.values():
        assert list(elsewhere.glob(written)), written
    assert_older(installed, tables.stat().st_mtime_ns)


def copy_needed(to: Path) -> None:
    """Copy what a wheel is built from."""
    to.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in NEEDED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, to / name, ignore=ignored)
        else:
            shutil.copy(path, to)


def assert_content(names: list[str]) -> None:
    """Assert that the files of a wheel are those of the packages `torchgpipe` and `reproduce`.

    These files must include the published results of all papers.
    """
    tops, published = set(), set()
    for name in names:
        top = name.partition("/")[0]
        if not top.endswith(".dist-info"):
            tops.add(top)
        if name.startswith("reproduce/results/paper/"):
            published.add(Path(name).name)
    assert tops == {"torchgpipe", "reproduce"}
    papers = ROOT / "results" / "paper"
    assert published == {path.name for path in papers.glob("*.json")}


def run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def assert_older(folder: Path, time: int) -> None:
    """Assert that each file in a folder was last changed before a time, given in nanoseconds."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert files
    for path in files:
        assert path.stat().st_mtime_ns < time, path
