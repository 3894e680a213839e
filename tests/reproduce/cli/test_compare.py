"""compare: the command's options, its exit codes, and one line for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduce.cli.main import main
from reproduce.records.record import Record, Result, save

RESULTS = Path(__file__).resolve().parents[3] / "results"
PAPER, MEASURED = str(RESULTS / "paper"), str(RESULTS / "measured")
SPEED = ("--filter", "experiment=amoebanet-speed")


def test_paper_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """What `make compare` is for: the published speed-ups beside those of a smaller model on another machine."""
    assert main(["compare", PAPER, MEASURED, *SPEED]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("amoebanet-speed: throughput, each side over its own; higher is better") and not err
    assert "GPipe n2m4" in out and "missing in A: checkpoint-only m1" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert main(["compare", PAPER, MEASURED, MEASURED, "--format", "json"]) == 0, "all of them"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([MEASURED], 2, "compare at least two sides, and at most 26; given: 1"),
        ([MEASURED, "nowhere"], 2, "nowhere: no such file or folder, and no git revision here"),
        ([MEASURED, __file__], 1, "test_compare.py: not JSON"),
        ([MEASURED, MEASURED, "--row", "n"], 2, "--row and --col go together"),
        ([MEASURED, MEASURED, "--row", "n", "--col", "m", "--format", "csv"], 2, "text or markdown, not csv"),
        ([MEASURED, MEASURED, "--row", "device", "--col", "m", *SPEED], 2, "are both at cpu x 1; name another field"),
        ([MEASURED, MEASURED, "--alpha", "0"], 2, "'--alpha'"),
    ],
)
def test_what_is_wrong_is_one_line(
    options: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *options]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reproduce: ") and said in err and err.count("\n") == 1


def steps(name: str, row: str, seconds: float) -> Result:
    """Make a row that reproduces a published one, of eight steps."""
    samples = {"step_time": [seconds] * 8, "round": [float(i) for i in range(8)]}
    link = f"tg-amoebanetd-speed/{row}"
    return Result("amoebanet-speed", name, "measured", "small", "cpu", {"batch_size": 8}, "naive", published=link,
                  samples=samples)  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "code", "said"), [(0.5, 0, ""), (1.0, 1, "1 row worse than in A: GPipe (amoebanet")]
)
def test_fail_on_regression(
    seconds: float, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published speed-up of n2m4 is 1.54."""
    rows = [steps("naive", "n2m1", 1.0), steps("GPipe", "n2m4", seconds)]
    save(Record("r", "T", "measured", {}, rows), tmp_path / "r.json")
    sides = [PAPER, str(tmp_path / "r.json")]
    assert main(["compare", *sides, *SPEED, "--fail-on-regression"]) == code
    out, err = capsys.readouterr()
    assert "geometric mean" in out, "the table is printed either way"
    assert said in err and (err != "") == bool(code)
    assert main(["compare", *sides, *SPEED]) == 0


def test_without_scipy_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["compare", MEASURED, MEASURED]) == 1
    assert capsys.readouterr().err == "reproduce: scipy is not installed: run 'make setup', or 'pip install scipy'\n"
