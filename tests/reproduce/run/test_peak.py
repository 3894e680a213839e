"""Live bytes: every storage once, from its first sight to its death, on the device it belongs to."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.run.live_bytes import LiveBytes, Watch
from reproduce.run.peak import measure_peak
from reproduce.run.training import Balancer, FakeData, Training
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Setup

FLOAT = 4


def gradient() -> object:
    x = torch.zeros(50, requires_grad=True)
    x.sum().backward()
    return x, x.grad


@pytest.mark.parametrize(
    ("make", "live", "peak"),
    [
        pytest.param(lambda: torch.zeros(100).view(10, 10)[2:4].t(), 100 * FLOAT, 100 * FLOAT, id="a view"),
        pytest.param(lambda: torch.zeros(100) + 1 + 1, 100 * FLOAT, 200 * FLOAT, id="temporary"),
        pytest.param(lambda: torch.zeros(100).add_(1), 100 * FLOAT, 100 * FLOAT, id="in place"),
        pytest.param(lambda: torch.zeros(1).resize_(100), 100 * FLOAT, 100 * FLOAT, id="grows"),
        pytest.param(
            lambda: (torch.zeros(100).max(dim=0, keepdim=True), torch.zeros(98)),
            (98 + 1) * FLOAT + 8, (100 + 1) * FLOAT + 8, id="several at once",
        ),
        # The leaf and both results of exp are alive, the sum is not.
        pytest.param(
            lambda: (torch.zeros(50, requires_grad=True).exp() + 1).exp(), 150 * FLOAT, 200 * FLOAT, id="saved"
        ),
        pytest.param(gradient, 100 * FLOAT, 102 * FLOAT, id="gradient"),  # and the sum and its gradient, for a while
    ],
)  # fmt: skip
def test_known_cases(make: Callable[[], object], live: int, peak: int) -> None:
    counter = LiveBytes(1)
    with Watch(counter, 0):
        kept = make()
    assert (counter.live, counter.peak) == ([live], [peak])
    del kept
    gc.collect()
    assert counter.live == [0]


def test_what_a_thread_makes_belongs_to_its_device() -> None:
    counter = LiveBytes(2)
    kept: list[Tensor] = []

    def work(device: int) -> None:
        with Watch(counter, device):
            for _ in range(300):
                torch.zeros(7) + 1
            kept.append(torch.zeros(10 * (device + 1)))

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.live == [2 * 10 * FLOAT, 2 * 20 * FLOAT]
    assert all(2 * 7 * FLOAT <= peak <= 2 * (2 * 7 + 20) * FLOAT for peak in counter.peak)


def test_outside_tasks_a_tensor_belongs_where_it_was_made_from() -> None:
    counter = LiveBytes(2)
    parameter = torch.zeros(10)
    counter.add([parameter], 1)
    with Watch(counter):
        state = torch.zeros_like(parameter)
        other = torch.zeros(3)
        assert counter.live == [3 * FLOAT, 20 * FLOAT]
        with Watch(counter, 0):
            made = torch.zeros_like(parameter)
        assert counter.live == [13 * FLOAT, 20 * FLOAT], "what a task makes is its device's, whatever it is made from"
    del state, other, made


BASE = replace(EXPERIMENTS["amoebanet-memory"].scale("small").rows[0], size=(3, 16), batch_size=4)
PIPELINE = replace(BASE, partitions=2, chunks=4, balance=(4, 5))
ROWS = {
    "plain": BASE,
    "never": replace(PIPELINE, checkpoint="never"),
    "always": replace(PIPELINE, checkpoint="always"),
    "except_last": replace(PIPELINE, checkpoint="except_last"),
}


class Trained(NamedTuple):
    training: Training
    counter: LiveBytes
    peaks: list[int]


def make(name: str, devices: Devices) -> Training:
    return Training(ROWS[name], devices, FakeData([ROWS[name]], 0), Balancer(devices), 0)


@pytest.fixture(scope="module")
def trained() -> dict[str, Trained]:
    """Run two steps of every row, and keep what is alive afterwards."""
    devices = Devices("cpu", 2, threads=1)
    found = {}
    for name in ROWS:
        counter = LiveBytes(ROWS[name].devices)
        training = make(name, devices)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("reproduce.run.peak.LiveBytes", lambda n, counter=counter: counter)
            found[name] = Trained(training, counter, measure_peak(training, devices, steps=2)["peak_allocated"])
    return found


@pytest.mark.parametrize("name", ROWS)
def test_peak_holds_at_least_the_model(trained: dict[str, Trained], name: str) -> None:
    """Parameters, gradients and RMSprop's state are alive together at the end of the second step's backward."""
    training, _, peaks = trained[name]
    for partition, peak in zip(training.partitions, peaks, strict=True):
        parameters = sum(parameter.nbytes for parameter in partition.parameters())
        # and what layers keep: at least 2 MiB in each partition, at most 40 MiB for each sample
        assert 2 * 2**20 < peak - 3 * parameters < 4 * 40 * 2**20


def test_checkpointing_lowers_the_peak(trained: dict[str, Trained]) -> None:
    peaks = {name: sum(found.peaks) for name, found in trained.items()}
    assert max(peaks["always"], peaks["except_last"]) < min(peaks["never"], peaks["plain"])


@pytest.mark.parametrize("name", ROWS)
def test_after_a_step_only_state_is_alive(trained: dict[str, Trained], name: str) -> None:
    training, counter, _ = trained[name]
    gc.collect()
    state = training.optimizer.state
    own = [0] * len(training.partitions)
    own[0] += training.input.nbytes
    own[-1] += training.target.nbytes
    own[0] += sum(values["step"].nbytes for values in state.values())  # made from no tensor: the first device's
    for j, partition in enumerate(training.partitions):
        kept = [*partition.parameters(), *partition.buffers()]
        kept += [state[parameter]["square_avg"] for parameter in partition.parameters()]
        assert counter.live[j] == sum(tensor.nbytes for tensor in kept) + own[j]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_meta_counts_what_a_real_run_takes(trained: dict[str, Trained], name: str) -> None:
    """Nearly: CPU kernels have buffers that meta has not, or lack some, and workers overlap where meta does not."""
    devices = Devices("meta", 2)
    training = make(name, devices)
    assert all(parameter.is_meta for parameter in training.model.parameters())
    peaks = measure_peak(training, devices, steps=2)["peak_allocated"]
    assert peaks == pytest.approx(trained[name].peaks, rel=0.05 if name == "plain" else 0.35)


def test_what_cpu_devices_hand_on_counts_once_where_it_is_predicted() -> None:
    """Most of all without checkpointing, where graphs on both sides of a cut hold one tensor, and one skip."""
    base = replace(EXPERIMENTS["unet-memory"].scale("small").rows[0], size=(2, 16), batch_size=32)
    n = len(base.build())
    row = replace(base, partitions=2, chunks=1, balance=(n // 2, n - n // 2), checkpoint="never")
    devices = Devices("cpu", 2, threads=1)
    training = Training(row, devices, FakeData([row], 0), Balancer(devices), 0)
    real = sum(measure_peak(training, devices, steps=2)["peak_allocated"])
    setup = Setup(row.batch_size, row.balance or (), 1, "never", optimizer_named("sgd", foreach=False))
    counts = count(row.build(), training.input, device="cpu")
    assert sum(device.peak for device in setup_memory(counts, setup)) == pytest.approx(real, rel=0.01)
