"""Live bytes: every storage once, from its first sight to its death, on the device it belongs to."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from reproduce.devices import Devices
from reproduce.experiments import EXPERIMENTS, Row
from reproduce.memory import LiveBytes, measure_peak
from reproduce.training import Balancer, FakeData, Training

Case = Callable[[], Iterator[object]]
FLOAT = 4


def one() -> Iterator[object]:
    x = torch.zeros(100)
    yield x


def view() -> Iterator[object]:
    x = torch.zeros(100)
    yield x.view(10, 10)[2:4].t()


def slice_keeps_the_whole_storage() -> Iterator[object]:
    x = torch.zeros(100)[:1]
    yield x


def temporary() -> Iterator[object]:
    x = torch.zeros(100)
    x = x + 1
    x = x + 1
    yield x


def in_place() -> Iterator[object]:
    x = torch.zeros(100)
    x.add_(1)
    x.mul_(2)
    yield x


def grows() -> Iterator[object]:
    x = torch.zeros(1)
    x.resize_(100)
    yield x


def several_at_once() -> Iterator[object]:
    yield torch.zeros(100).max(dim=0, keepdim=True), torch.zeros(98)


def saved_for_backward() -> Iterator[object]:
    x = torch.zeros(50, requires_grad=True)
    yield (x.exp() + 1).exp()  # x and both results of exp are alive, the sum is not


def gradient() -> Iterator[object]:
    x = torch.zeros(50, requires_grad=True)
    x.sum().backward()
    yield x, x.grad


@pytest.mark.parametrize(
    ("case", "live", "peak"),
    [
        (one, 100 * FLOAT, 100 * FLOAT),
        (view, 100 * FLOAT, 100 * FLOAT),
        (slice_keeps_the_whole_storage, 100 * FLOAT, 100 * FLOAT),
        (temporary, 100 * FLOAT, 200 * FLOAT),
        (in_place, 100 * FLOAT, 100 * FLOAT),
        (grows, 100 * FLOAT, 100 * FLOAT),
        (several_at_once, (98 + 1) * FLOAT + 8, (100 + 1) * FLOAT + 8),
        (saved_for_backward, 150 * FLOAT, 200 * FLOAT),
        (gradient, 100 * FLOAT, None),
    ],
)
def test_known_cases(case: Case, live: int, peak: int | None) -> None:
    counter = LiveBytes(1)
    with counter.watch(0):
        steps = case()
        kept = next(steps)
        del steps
    assert counter.live == [live]
    assert peak is None or counter.peak == [peak]
    del kept
    gc.collect()
    assert counter.live == [0]


def test_what_a_thread_makes_belongs_to_its_device() -> None:
    counter = LiveBytes(3)
    kept: list[Tensor] = []

    def work(device: int) -> None:
        with counter.watch(device):
            kept.append(torch.zeros(10 * (device + 1)))

    threads = [threading.Thread(target=work, args=(device,)) for device in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.live == [10 * FLOAT, 20 * FLOAT, 30 * FLOAT]


def test_outside_tasks_a_tensor_belongs_where_it_was_made_from() -> None:
    counter = LiveBytes(2)
    parameter = torch.zeros(10)
    counter.add([parameter], 1)
    with counter.watch():
        state = torch.zeros_like(parameter)
        other = torch.zeros(3)
    assert counter.live == [3 * FLOAT, 20 * FLOAT]
    del state, other


def test_counts_are_right_after_many_threads() -> None:
    counter = LiveBytes(2)

    def work(device: int) -> None:
        with counter.watch(device):
            for _ in range(300):
                torch.zeros(7) + 1

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert counter.live == [0, 0]
    assert all(2 * 7 * FLOAT <= peak <= 2 * 2 * 7 * FLOAT for peak in counter.peak)


BASE = replace(EXPERIMENTS["amoebanet-memory"].scale("small").rows[0], size=(3, 16), batch_size=4)
PIPELINE = replace(BASE, partitions=2, chunks=4, balance=(4, 5))


def train(row: Row) -> tuple[Training, list[int]]:
    devices = Devices("cpu", 2, threads=1)
    training = Training(row, devices, FakeData([row], 0), Balancer(devices), 0)
    return training, measure_peak(training, devices, steps=2).allocated


def state(partition: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*partition.parameters(), *partition.buffers()))


@pytest.mark.parametrize(
    "row",
    [BASE] + [replace(PIPELINE, checkpoint=checkpoint) for checkpoint in ("never", "always", "except_last")],
    ids=lambda row: str(row.checkpoint),
)
def test_peak_holds_at_least_the_model(row: Row) -> None:
    """Parameters, gradients and RMSprop's state are alive together at the end of backward's second step."""
    training, peaks = train(row)
    assert len(peaks) == row.devices
    for partition, peak in zip(training.partitions, peaks, strict=True):
        parameters = sum(parameter.nbytes for parameter in partition.parameters())
        assert peak > 3 * parameters
        assert peak < 3 * parameters + 4 * 40 * 2**20, "no more than 40 MiB per sample beside it"


def test_checkpointing_lowers_the_peak() -> None:
    peaks = {mode: sum(train(replace(PIPELINE, checkpoint=mode))[1]) for mode in ("never", "always", "except_last")}
    assert max(peaks["always"], peaks["except_last"]) < peaks["never"]


def test_after_a_step_only_state_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    counters: list[LiveBytes] = []
    monkeypatch.setattr("reproduce.memory.LiveBytes", lambda n: counters.append(LiveBytes(n)) or counters[0])
    training, _ = train(replace(PIPELINE, checkpoint="except_last"))
    gc.collect()
    optimizer = training.optimizer.state
    own = [training.input.nbytes, training.target.nbytes]
    own[0] += sum(values["step"].nbytes for values in optimizer.values())  # made from no tensor: the first device's
    for j, partition in enumerate(training.partitions):
        averages = sum(optimizer[parameter]["square_avg"].nbytes for parameter in partition.parameters())
        assert counters[0].live[j] == state(partition) + averages + own[j]
