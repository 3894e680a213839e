"""Predictions beside measured steps: a real run of every way to train, and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import prediction
from benchmarks.emulation import BALANCER
from benchmarks.prediction import BASE, DEVICES, MODELS, WAYS, main, table
from reproduce.records.record import load
from reproduce.run.peak import measure_peak
from reproduce.run.training import FakeData, Training
from torchgpipe.plan.count import count
from torchgpipe.plan.hardware import load_hardware
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.optimizer import optimizer_named
from torchgpipe.plan.predict import Setup


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


@pytest.mark.parametrize("model", ["MLP", "U-Net (2, 16)"])
def test_what_cpu_devices_hand_on_counts_once(model: str) -> None:
    """Most of all without checkpointing, where graphs on both sides of a cut hold one tensor; of U-Net, skips, too."""
    base = MODELS[model]
    layers = len(base.build())
    balance = (layers // 2, layers - layers // 2)
    row = replace(base, name="naive", partitions=2, chunks=1, checkpoint="never", balance=balance)
    threads = torch.get_num_threads()
    try:
        training = Training(row, DEVICES, FakeData([row], 0), BALANCER, 0)
        real = sum(measure_peak(training, DEVICES, steps=2)["peak_allocated"])
    finally:
        torch.set_num_threads(threads)
    setup = Setup(row.batch_size, balance, 1, "never", optimizer_named("sgd", foreach=False))
    counts = count(row.build(), training.input, device="cpu")
    assert sum(device.peak for device in setup_memory(counts, setup)) == pytest.approx(real, rel=0.01)
