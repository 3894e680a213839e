"""Plans' distance from the best: a real run of two generated models, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import certificate
from benchmarks.certificate import OTHERS, generated, main, table
from reproduce.records.record import Record, Result, load


def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "SETS", {"generated": lambda: generated(2)})
    main(["--json", str(tmp_path / "result.json")])
    kept = load(tmp_path / "result.json")
    assert [(result.experiment, result.row) for result in kept.results] == [
        (f"generated, {seed}", way) for seed in range(2) for way in ("plan", *OTHERS)
    ]
    assert table(kept) in capsys.readouterr().out


def test_a_balance_that_is_faster_than_the_plan_is_counted() -> None:
    def result(case: str, way: str, **values: float) -> Result:
        return Result(f"zoo, {case}", way, "predicted" if values else "out of memory", values=dict(values))

    results = [
        result("a", "plan", seconds=1.0, bound=1.0),
        *(result("a", way, seconds=seconds) for way, seconds in zip(OTHERS, (2.0, 1.0, 0.9), strict=True)),
        result("b", "plan", seconds=1.03, bound=1.0),
        *(result("b", way, **({} if way == "by time" else {"seconds": 2.06})) for way in OTHERS),
        *(result("c", way) for way in ("plan", *OTHERS)),
    ]
    row = table(Record("certificate", "", "predicted", {}, results)).splitlines()[-1]
    assert row.split() == ["zoo", "2", "50%", "100%", "1.50%", "3.0%", "2.00", "(0)", "1.50", "(0)", "0.90", "(1)", "1"]
