"""Calibration: what it writes is a description, and broken ways to ask for it are refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reproduce.machine.devices import Devices
from reproduce.predict.calibrate import calibrate, written
from torchgpipe.plan.hardware import Hardware, load_hardware
from torchgpipe.plan.operators import Operator

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Hardware:
    path = tmp_path_factory.mktemp("calibrated") / "here.json"
    path.write_text(written(calibrate(Devices("cpu", 1, threads=1), "here", seconds=0.01)))
    assert json.loads(path.read_text())["devices"]["value"] == 1
    return load_hardware(path)


def test_calibration_is_a_description(calibrated: Hardware) -> None:
    assert not calibrated.launch_overlaps
    assert max(calibrated.compute_efficiency.values()) == 1
    assert all("reproduce calibrate" in source or "none" in source for source in calibrated.sources.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_type_has_a_rate(calibrated: Hardware, dtype: str) -> None:
    assert calibrated.seconds(Operator("matmul", dtype, 1e9, 0)) > calibrated.launch
    assert f"peak.{dtype}" in calibrated.sources


def test_cpu_devices_copy_nothing(calibrated: Hardware) -> None:
    assert calibrated.transfer(2**40) < calibrated.launch
    assert "nothing is copied" in calibrated.sources["link_bandwidth"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: a CPU's libraries have no workspace")
def test_workspaces_are_found_on_a_gpu(tmp_path: Path) -> None:
    """In a process of its own, which has not used cuBLAS before."""
    path = tmp_path / "gpu.json"
    subprocess.run([sys.executable, "-m", "reproduce", "calibrate", "--on", "cuda", "--out", str(path)], check=True)
    assert load_hardware(path).workspace > 0
