"""Live bytes: every storage counts once, from when it is first seen until it is freed, on its device."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.run.live_bytes import LiveBytes, LiveBytesMode
from reproduce.run.peak import measure_peak
from reproduce.run.training import Balancer, FakeData, Training

FLOAT = 4


def gradient() -> object:
    x = torch.zeros(50, requires_grad=True)
    x.sum().backward()
    return x, x.grad


KNOWN: dict[str, tuple[Callable[[], object], int, int]] = {
    "a view": (lambda: torch.zeros(100).view(10, 10)[2:4].t(), 100 * FLOAT, 100 * FLOAT),
    "temporary": (lambda: torch.zeros(100) + 1 + 1, 100 * FLOAT, 200 * FLOAT),
    "in place": (lambda: torch.zeros(100).add_(1), 100 * FLOAT, 100 * FLOAT),
    "grows": (lambda: torch.zeros(1).resize_(100), 100 * FLOAT, 100 * FLOAT),
    "several at once": (lambda: (torch.zeros(100).max(dim=0, keepdim=True), torch.zeros(98)),
                        (98 + 1) * FLOAT + 8, (100 + 1) * FLOAT + 8),
    # The leaf and both results of exp are alive, the sum is not.
    "saved": (lambda: (torch.zeros(50, requires_grad=True).exp() + 1).exp(), 150 * FLOAT, 200 * FLOAT),
    "gradient": (gradient, 100 * FLOAT, 102 * FLOAT),  # plus, at the peak, the sum and its gradient
}  # fmt: skip


@pytest.mark.parametrize(("make", "live", "peak"), KNOWN.values(), ids=KNOWN)
def test_known_cases(make: Callable[[], object], live: int, peak: int) -> None:
    counter = LiveBytes(1)
    with LiveBytesMode(counter, 0):
        kept = make()
    assert (counter.live, counter.peak) == ([live], [peak])
    del kept
    gc.collect()
    assert counter.live == [0]


def test_outside_tasks_a_tensor_belongs_where_it_was_made_from() -> None:
    counter = LiveBytes(2)
    parameter = torch.zeros(10)
    counter.add([parameter], 1)
    with LiveBytesMode(counter):
        state = torch.zeros_like(parameter)
        other = torch.zeros(3)
        assert counter.live == [3 * FLOAT, 20 * FLOAT]
        with LiveBytesMode(counter, 0):
            made = torch.zeros_like(parameter)
        assert counter.live == [13 * FLOAT, 20 * FLOAT], "what a task makes is its device's, whatever it is made from"
    del state, other, made


PLAIN = replace(EXPERIMENTS["amoebanet-memory"].scale("small").rows[0], size=(3, 16), batch_size=4)


def test_a_training_has_its_state_and_at_its_peak_its_gradients_and_what_layers_keep() -> None:
    devices, peaks = Devices("cpu", 2, threads=1), {}
    pipeline = replace(PLAIN, partitions=2, chunks=4, balance=(4, 5))
    for row in (PLAIN, *(replace(pipeline, checkpoint=mode) for mode in ("never", "always", "except_last"))):
        counter = LiveBytes(row.devices)
        training = Training(row, devices, FakeData([row], 0), Balancer(devices), 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("reproduce.run.peak.LiveBytes", lambda n, counter=counter: counter)
            found = measure_peak(training, devices, steps=2)["peak_allocated"]
        peaks[row.checkpoint] = sum(found)
        gc.collect()
        state: Any = training.optimizer.state
        own = [0] * row.devices
        own[0] += training.input.nbytes
        own[-1] += training.target.nbytes
        own[0] += sum(values["step"].nbytes for values in state.values())  # of no tensor: on the first device
        for j, partition in enumerate(training.partitions):
            parameters = [*partition.parameters()]
            kept = [*parameters, *partition.buffers(), *(state[each]["square_avg"] for each in parameters)]
            assert counter.live[j] == sum(tensor.nbytes for tensor in kept) + own[j]
            # Parameters, gradients and optimizer state, and 2 to 40 MiB of activations per sample.
            assert 2 * 2**20 < found[j] - 3 * sum(each.nbytes for each in parameters) < 4 * 40 * 2**20
    assert max(peaks["always"], peaks["except_last"]) < min(peaks["never"], peaks[None])
