"""report: the command writes the page, where it was told to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reproduce.cli.main import main
from reproduce.report.page import TITLE

PAPER = Path(__file__).resolve().parents[3] / "results" / "paper"


@pytest.mark.parametrize("named", [False, True])
def test_it_is_written(named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "paper").mkdir()
    shutil.copy(PAPER / "tg-unet-speed.json", tmp_path / "paper")
    path = tmp_path / ("other.html" if named else "report.html")
    assert main(["report", "--results", str(tmp_path), *(["--out", str(path)] if named else [])]) == 0
    assert capsys.readouterr().out == f"written: {path}\n"
    text = path.read_text()
    assert f"<title>{TITLE}</title>" in text and ">88.5<" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["paper", path.name])
