"""Predictions beside measured steps: a real run of every way to train, and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import prediction
from benchmarks.prediction import BASE, WAYS, main, table
from reproduce.records.record import load
from torchgpipe.plan.hardware import load_hardware


def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "MODELS", {"MLP": replace(BASE, batch_size=8)})
    monkeypatch.setattr(prediction, "calibrated", lambda devices: load_hardware("p40x8"))
    threads = torch.get_num_threads()
    try:
        main(["--rounds", "1", "--json", str(tmp_path / "result.json")])
    finally:
        torch.set_num_threads(threads)
    kept = load(tmp_path / "result.json")
    assert [result.row for result in kept.results] == list(WAYS)
    assert kept.results[0].values["predicted_peak"] == pytest.approx(kept.results[0].values["peak"], rel=0.02)
    shown = table(kept)
    assert shown in capsys.readouterr().out
    assert sum("median of" in line for line in shown.splitlines()) == len(WAYS)
