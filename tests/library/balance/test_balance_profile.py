"""Profiles: what counts as a layer's time and bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.balance import balance_by_size, balance_by_time, profile

from ...behaviours.parts.layers import Do
from ..layers import Lambda, Pop, Stash
from ..simulated import CLOCK, Clock, Spend

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
KiB = 256  # numbers of float32


X = torch.zeros(2, 2, requires_grad=True)


def test_layers_take_turns_until_the_timeout(clock: Clock) -> None:
    model = nn.Sequential(Spend(1, 2, "a"), Spend(3, 4, "b"))
    balance_by_time(2, model, X, timeout=65.0, device="cpu")
    a, b = ["a forward", "a backward"], ["b forward", "b backward"]
    runs = 1 + profile.RUNS_PER_COPY
    # A round takes 3 + 7 seconds a run. The second ends early, after the first run that b is timed for.
    assert clock.history == runs * a + runs * b + runs * a + 2 * b
    assert clock.now == 66.0


def test_one_disturbed_run_does_not_count(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = iter([False, False, True])
    spend = clock.spend
    monkeypatch.setattr(clock, "spend", lambda s, what: spend(s + 500 * next(disturbed, False), what))
    model = nn.Sequential(*(Spend(1) for _ in range(4)))
    assert balance_by_time(2, model, torch.zeros(1), timeout=1e3, device="cpu") == [2, 2]


# bytes


def expand(numbers: int) -> nn.Module:
    """Return a layer that saves so many numbers per sample for its backward."""
    return Lambda(lambda x: x.repeat(1, numbers).square().mean(1, keepdim=True))


def parameters(size: int) -> nn.Module:
    return Do(lambda self, x: x + self.weight.sum(), weight=nn.Parameter(torch.zeros(size)))


# Layers, a sample that requires grad, and the balance by size over two partitions, with options.
SIZES: dict[str, tuple[list[nn.Module], int, dict[str, Any], list[int]]] = {
    "activations": ([expand(scale * KiB) for scale in range(1, 7)], 64, {"param_scale": 0}, [4, 2]),
    "parameters": ([parameters(scale * KiB) for scale in range(1, 7)], 1, {"param_scale": 100}, [4, 2]),
    # 6 activations of 64 KiB at most against 1 parameter of 32 KiB.
    "both": ([*[expand(KiB)] * 6, parameters(32 * KiB)], 64, {"param_scale": 1.0}, [3, 4]),
    "small micro-batches": ([*[expand(KiB)] * 6, parameters(32 * KiB)], 64, {"param_scale": 1.0, "chunks": 64}, [6, 1]),
    "parameters count much": ([*[expand(KiB)] * 6, parameters(32 * KiB)], 64, {"param_scale": 64.0}, [6, 1]),
}


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("layers, samples, options, balance", SIZES.values(), ids=SIZES)
def test_balance_by_size(
    layers: list[nn.Module], samples: int, options: dict[str, Any], balance: list[int], device: str
) -> None:
    sample = torch.rand(samples, 1, requires_grad=True)
    assert balance_by_size(2, nn.Sequential(*layers), sample, device=device, **options) == balance


# A function of a (4, 8) input, whether the input requires grad, and the saved bytes in units of the input's.
KEPT: dict[str, tuple[nn.Module, bool, float]] = {
    "nothing made": (nn.Identity(), True, 0),
    "a view": (nn.Flatten(), True, 0),
    "in place": (nn.ReLU(inplace=True), True, 0),
    "output": (Lambda(lambda x: x + 1), True, 1),
    "output saved for backward, once": (Lambda(torch.exp), True, 1),
    "input saved, output only handed on": (Lambda(torch.sin), True, 1),
    "input saved twice": (Lambda(lambda x: x * x), True, 1),
    "between": (Lambda(lambda x: (x + 1).exp().sin()), True, 2),
    "between, without gradient": (Lambda(lambda x: (x + 1).exp().sin()), False, 1),
    # Two outputs, and the mean and deviation of every channel; neither weight nor running statistics.
    "no parameters, no buffers": (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), False, 2 + 2 / 4),
    "views of one storage": (Lambda(lambda x: tuple((x + 1).unbind())), True, 1),
    "a part keeps the whole": (Lambda(lambda x: (x + 1)[:1]), True, 1),
    "integers": (Lambda(lambda x: x.argsort()), False, 2),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layer, requires_grad, times", KEPT.values(), ids=KEPT)
def test_kept_bytes(layer: nn.Module, requires_grad: bool, times: float, device: str) -> None:
    sample = torch.rand(4, 8, requires_grad=requires_grad)
    sizes = profile.profile_sizes(nn.Sequential(layer), sample, 1, 0, torch.device(device))
    assert sizes == [times * sample.nbytes]


def test_size_is_that_of_the_first_micro_batch() -> None:
    layers = nn.Sequential(nn.Sigmoid())
    assert profile.profile_sizes(layers, torch.rand(13, 5), 8, 0, torch.device("cpu")) == [2 * 5 * 4]


def test_stashed_tensors_count_where_they_are_made() -> None:
    sample = torch.rand(4, 8)
    layers = nn.Sequential(Stash(lambda x: x + 1), Pop(lambda x, skip: skip))
    assert profile.profile_sizes(layers, sample, 1, 0, torch.device("cpu")) == [sample.nbytes, 0]


# CUDA, as far as it can be tested without a GPU


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record calls in order."""
    calls: list[str] = []

    def note(name: str, answer: Any = None) -> Callable[..., Any]:
        return lambda *args: (calls.append(name), answer)[1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(torch.accelerator, "synchronize", note("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", note("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", note("allocated", 30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", note("peak", 72))
    monkeypatch.setattr(profile, "perf_counter", note("clock", 0.0))
    monkeypatch.setattr(CLOCK, "spend", lambda seconds, what: calls.append(what))
    return calls


def test_clock_is_read_when_the_device_is_idle_and_the_copy_made(calls: list[str]) -> None:
    rehearsal = profile.Rehearsal(nn.Identity(), X, {}, lambda: (calls.append("copy"), Spend(0, 0, "a"))[1])  # type: ignore[func-returns-value]
    read = ["synchronize", "clock"]
    profile.time_run(rehearsal, torch.device("cuda"))
    assert calls == ["copy", *read, "a forward", *read, *read, "a backward", *read]
    calls.clear()
    profile.time_forward(rehearsal, torch.device("cuda"))
    assert calls == [*read, "a forward", *read]


def test_peak_is_that_of_forward_after_a_warm_up(calls: list[str]) -> None:
    rehearsal = profile.Rehearsal(nn.Identity(), X, {}, lambda: Spend(0, 0, "a"))
    assert profile._peak_bytes(rehearsal, torch.device("cuda")) == 72 - 30
    assert calls == ["a forward", "reset", "allocated", "a forward", "peak"]
