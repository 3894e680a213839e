"""On CUDA: one GPU plays all devices, and events on its stream time the tasks."""

from __future__ import annotations

import pytest

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.run.emulation import Emulation
from reproduce.run.training import Balancer, FakeData

from .cuda import needs_cuda

pytestmark = needs_cuda


@pytest.mark.parametrize("name", ["n2m1", "n2m4", "n8m32", "checkpoint-only m4"])
def test_tasks_take_what_the_gpu_takes(name: str) -> None:
    row = next(row for row in EXPERIMENTS["amoebanet-speed"].scale("small").rows if row.name == name)
    gpu = Devices("cuda", 1)
    emulation = Emulation(row, gpu, FakeData([row], 0), Balancer(gpu), 0)
    emulation.run()
    runs = [emulation.run() for _ in range(3)]
    for run in runs:
        assert all(seconds > 0 for seconds in run.tasks.values())
        # What lies between tasks belongs to none: a few launches.
        assert 0.7 * run.work < sum(run.tasks.values()) + run.loss + sum(run.updates) < 1.001 * run.work
    step = emulation.step(runs)
    assert step.seconds == pytest.approx(step.work, rel=0.1) if row.devices == 1 else step.seconds < step.work
    assert {device.type for device in emulation.training.devices} == {"cuda"}
