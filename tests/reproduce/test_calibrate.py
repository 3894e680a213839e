"""Calibration: what it writes is a description, and broken ways to ask for it are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

from reproduce.calibrate import calibrate, written
from reproduce.devices import Devices
from torchgpipe.plan.hardware import load_hardware


def test_calibration_is_a_description(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text(written(calibrate(Devices("cpu", 1, threads=1), "here", seconds=0.01)))
    hardware = load_hardware(path)
    assert not hardware.launch_overlaps
    assert max(hardware.compute_efficiency.values()) == 1
    assert all("reproduce calibrate" in source or "none" in source for source in hardware.sources.values())
    assert json.loads(path.read_text())["devices"]["value"] == 1
