"""Test the GPU benchmark that checks the steps of schedules.

It also times the two halves of a backward: the gradients of inputs, and those of weights.
"""

import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import schedules
from benchmarks.gpu.part import Context
from torchgpipe.schedules import make
from torchgpipe.tensors.observe import NOTHING, Task

CPU = torch.device("cpu")


def test_a_dry_run_checks_all_schedules(tmp_path: Path) -> None:
    context = Context("schedules", "tiny", tmp_path, time.monotonic() + 60)

    result = schedules.run(context)

    found = result["schedules"]
    assert [*found] == [*schedules.STAGES]
    for row in found.values():
        assert row["gradients"]
        assert row["order"]
        assert row["kept"] is None
    assert found["GPipe"]["listed"] == schedules.N * schedules.M
    assert found["1F1B"]["listed"] < found["GPipe"]["listed"]
    assert {*result["block"]} == {"forward", "backward", "inputs", "weights"}
    first, kept, block = schedules.lines(result)
    assert first == "6 of 6 schedules did their lists and had the right gradients"
    assert "GPipe 12 (not measured on a CPU)" in kept
    assert block.startswith("GPT block in bfloat16: forward ")


def test_a_wrong_order_and_wrong_gradients_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = schedules.SIZES["tiny"]
    with monkeypatch.context() as patch:
        patch.setattr(schedules, "mse_loss", lambda y, t: (y - t).abs().mean() * torch.rand(()))
        row = schedules.check("1F1B", 1, sizes, CPU)
    assert not row["gradients"]
    assert row["order"]
    monkeypatch.setattr(schedules.Watch, "__call__", lambda watch, task: NOTHING)
    row = schedules.check("1F1B", 1, sizes, CPU)
    assert row["gradients"]
    assert not row["order"]


def test_memory_is_counted_in_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the memory of a step is counted in multiples of what the first forward adds.

    Only the memory after forwards is counted.
    """
    allocated = iter([100, 110, 120, 115])
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: next(allocated))
    watch = schedules.Watch(torch.device("cuda"))
    first, second = Task("forward", 0, 0), Task("forward", 1, 0)
    for task in (first, second, Task("backward", 1, 0), Task("forward", 2, 0)):
        with watch(task):
            pass
    assert watch.most_kept() == 2.0


@pytest.mark.parametrize(("name", "most"), [("GPipe", 6), ("1F1B", 1), ("ZBH1", 1)])
def test_tasks_are_kept_until_their_weights_have_gradients(name: str, most: int) -> None:
    (actions,) = make(name, 1, 6).lists
    assert schedules.most_kept(actions) == most


def test_gradients_are_compared_relative_to_their_size() -> None:
    def with_gradient(*numbers: float) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.zeros(len(numbers)))
        parameter.grad = torch.tensor(numbers)
        return parameter

    small = with_gradient(1e-6, 0.0)
    assert schedules.alike([small], [with_gradient(1.0001e-6, 1e-10)])
    assert not schedules.alike([small], [with_gradient(1e-6, 1e-8)])
    assert not schedules.alike([small], [with_gradient(1e-6, float("nan"))])
