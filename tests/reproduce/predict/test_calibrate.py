"""Calibration: what it writes is a description, and broken ways to ask for it are refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reproduce.machine.devices import Devices
from reproduce.predict.calibrate import calibrate, written
from torchgpipe.plan.hardware import load_hardware
from torchgpipe.plan.operators import Operator

pytestmark = pytest.mark.slow


def test_calibration_is_a_description(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text(written(calibrate(Devices("cpu", 1, threads=1), "here", seconds=0.01)))
    here = load_hardware(path)
    assert (here.devices, here.launch_overlaps, max(here.compute_efficiency.values())) == (1, False, 1)
    assert all("reproduce calibrate" in source or "none" in source for source in here.sources.values())
    for dtype in ("float32", "bfloat16", "float16"):
        assert here.seconds(Operator("matmul", dtype, 1e9, 0)) > here.launch
    assert here.transfer(2**40) == pytest.approx(here.transfer(1), rel=0.5), "CPU devices copy nothing"
    assert {"max_pool2d_with_indices_backward", "gelu", "native_batch_norm"} <= set(here.memory_efficiency)
    assert {"attention", "attention_backward"} <= set(here.compute_efficiency)
    assert set(here.narrow) == {"4", "16", "64"} and set(here.launches) == {"conv", "conv3x3"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: a CPU's libraries have no workspace")
def test_workspaces_are_found_on_a_gpu(tmp_path: Path) -> None:
    """In a process of its own, which has not used cuBLAS before."""
    path = tmp_path / "gpu.json"
    subprocess.run([sys.executable, "-m", "reproduce", "calibrate", "--on", "cuda", "--out", str(path)], check=True)
    assert load_hardware(path).workspace > 0
