"""compare: what `make compare` is for, and its gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduce.cli.main import main
from reproduce.records.record import save

from ..made import record, row

RESULTS = Path(__file__).resolve().parents[3] / "results"
PAPER, MEASURED = str(RESULTS / "paper"), str(RESULTS / "measured")
SPEED = ("--filter", "experiment=amoebanet-speed")


def test_paper_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """The published speed-ups beside those of a smaller model on another machine."""
    assert main(["compare", PAPER, MEASURED, *SPEED]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("amoebanet-speed: throughput, each side over its own; higher is better") and not err
    assert "\nn8m32 (emulated) " in out and "measured and emulated on " in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert main(["compare", PAPER, MEASURED, MEASURED, "--format", "json"]) == 0, "all of them"


@pytest.mark.parametrize(
    ("seconds", "code", "said"), [(0.5, 0, ""), (1.0, 1, "1 row worse than in A: GPipe (amoebanet")]
)
def test_fail_on_regression(
    seconds: float, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published speed-up of n2m4 is 1.54."""
    rows = [
        row(name, time, experiment="amoebanet-speed", over="naive", published=f"tg-amoebanetd-speed/{link}")
        for name, link, time in (("naive", "n2m1", 1.0), ("GPipe", "n2m4", seconds))
    ]
    save(record(*rows), tmp_path / "r.json")
    sides = [PAPER, str(tmp_path / "r.json")]
    assert main(["compare", *sides, *SPEED, "--fail-on-regression"]) == code
    out, err = capsys.readouterr()
    assert "geometric mean" in out, "the table is printed either way"
    assert said in err and (err != "") == bool(code)
    assert main(["compare", *sides, *SPEED]) == 0
