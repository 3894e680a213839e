"""report: the command writes the page, and tells in one line what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reproduce.cli.main import main
from reproduce.report.page import TITLE

RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Copy one published table, which makes a small report."""
    (tmp_path / "paper").mkdir()
    shutil.copy(RESULTS / "paper" / "tg-unet-speed.json", tmp_path / "paper")
    return tmp_path


@pytest.mark.parametrize("named", [False, True])
def test_it_is_written(named: bool, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results / ("other.html" if named else "report.html")
    options = ["--out", str(path)] if named else []
    assert main(["report", "--results", str(results), *options]) == 0
    assert capsys.readouterr().out == f"written: {path}\n"
    text = path.read_text()
    assert f"<title>{TITLE}</title>" in text and ">88.5<" in text
    assert sorted(file.name for file in results.iterdir()) == sorted(["paper", path.name])


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--results", "nowhere"], 2, "'--results': Directory 'nowhere' does not exist."),
        (["--results", "empty"], 2, "--results empty: no record (*.json) in its folders paper, predicted, measured"),
        (
            ["--results", ".", "--out", "nowhere/r.html"],
            1,
            "nowhere/r.html: cannot be written (No such file or directory)",
        ),
        (["--results", ".", "--out", "empty"], 2, "'--out': File 'empty' is a directory."),
        (["--results", ".", "--trace", "none.json"], 1, "none.json: cannot be read (No such file or directory)"),
        (["--results", "broken"], 1, 'broken/paper/x.json: not a record (its "format" is not'),
    ],
)
def test_what_is_wrong_is_one_line(
    options: list[str], code: int, said: str, results: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(results)
    Path("empty").mkdir()
    Path("broken/paper").mkdir(parents=True)
    Path("broken/paper/x.json").write_text("{}")
    assert main(["report", *options]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reproduce: ") and said in err and err.count("\n") == 1
    assert not Path("report.html").exists()


def test_without_matplotlib_one_line_says_what_to_do(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else name)
    assert main(["report", "--results", str(results)]) == 1
    said = "reproduce: matplotlib is not installed: run 'make setup', or 'pip install matplotlib'\n"
    assert capsys.readouterr().err == said
