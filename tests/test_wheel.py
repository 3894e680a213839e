"""A wheel: the library and the suite with its data, outside of a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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
EACH = "import sys; from reproduce.cli.main import main; print([main(each.split()) for each in sys.argv[1:]])"


@pytest.mark.slow
def test_a_wheel_has_all_that_the_program_needs(tmp_path: Path) -> None:
    source, wheels, installed = tmp_path / "source", tmp_path / "wheels", tmp_path / "installed"
    source.mkdir()
    for name in NEEDED:
        path = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, source / name, ignore=ignored) if path.is_dir() else shutil.copy(
            path, source
        )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source],
        check=True,
    )
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as file:
        tops = {name.partition("/")[0] for name in file.namelist()}
        published = {
            Path(name).name
            for name in file.namelist()
            if name.startswith("reproduce/results/paper/")
        }
    assert {top for top in tops if not top.endswith(".dist-info")} == {"torchgpipe", "reproduce"}
    assert published == {path.name for path in (ROOT / "results" / "paper").glob("*.json")}

    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    arguments = ("run", "amoebanet-memory", "--scale", "small", "--on", "cpu", "--row", "baseline")
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (tables := elsewhere / "tables.json").write_text("[]")
    command = [str(installed / "bin" / "reproduce"), *arguments]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((elsewhere / "runs").glob("*.json"))) == 1
    command = [sys.executable, "-c", EACH, *WRITING, *REFUSED]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert (
        done.stdout.endswith("[0, 0, 0, 2, 2, 2]\n") and done.stderr.count("needs a checkout") == 3
    ), done.stderr
    assert all(list(elsewhere.glob(written)) for written in WRITING.values())
    files = [path for path in installed.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert files and not [
        path for path in files if path.stat().st_mtime_ns >= tables.stat().st_mtime_ns
    ]
