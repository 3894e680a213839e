"""The replay against traces of real steps: the order of tasks exactly, times loosely; and what calibrate writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reproduce.calibrate import calibrate, written
from reproduce.devices import Devices
from reproduce.validate import cases, orders, profile, replayed, trace
from torchgpipe.plan.hardware import load_hardware
from torchgpipe.plan.predict import Setup


def model() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize(("balance", "chunks"), [((8,), 4), ((4, 4), 2), ((3, 5), 4), ((2, 3, 3), 3)])
def test_the_replay_has_the_order_of_a_real_step(balance: tuple[int, ...], chunks: int, checkpoint: Any) -> None:
    setup = Setup(12, balance, chunks, checkpoint)
    real = trace(model(), setup, torch.rand(12, 64))
    timeline = replayed(profile(model(), torch.rand(setup.sizes[0], 64)), setup)
    expected = orders([(e.kind, e.micro_batch, e.partition, e.start) for e in timeline.events])
    assert orders([(task.kind, task.micro_batch, task.partition, start) for task, start, _ in real]) == expected
    # Loosely: the real step takes the time of its tasks, and none before what it depends on.
    ends = {(task.kind, task.micro_batch, task.partition): end for task, _, end in real}
    for task, start, _ in real:
        if task.kind == "forward" and task.partition > 0:
            assert start >= ends["forward", task.micro_batch, task.partition - 1]
        if task.kind == "backward" and task.partition < len(balance) - 1:
            assert start >= ends["backward", task.micro_batch, task.partition + 1]
    assert timeline.seconds > 0


def test_at_least_twenty_configurations_of_both_models() -> None:
    found = cases()
    assert len(found) >= 20
    assert len({case.name for case in found}) == len(found)
    assert {case.name.split()[0] for case in found} == {"AmoebaNet-D", "U-Net"}
    assert {case.partitions for case in found} == {1, 2}


def test_calibration_is_a_description(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text(written(calibrate(Devices("cpu", 1, threads=1), "here", seconds=0.01)))
    hardware = load_hardware(path)
    assert not hardware.launch_overlaps
    assert max(hardware.compute_efficiency.values()) == 1
    assert all("reproduce calibrate" in source or "none" in source for source in hardware.sources.values())
    assert json.loads(path.read_text())["devices"]["value"] == 1
