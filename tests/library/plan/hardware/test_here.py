"""Test the hardware description of this machine, and the measured times of layers."""

import contextlib
import math
import os
import threading
import warnings
from pathlib import Path
from time import perf_counter
from unittest.mock import Mock

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.nn import Identity, Module, Sequential

from torchgpipe.balance import profile
from torchgpipe.balance.profile import profile_times
from torchgpipe.plan.hardware import here, others, timing
from torchgpipe.plan.hardware.here import describe_here, sharing
from torchgpipe.plan.hardware.timing import time_alone, time_step

from ...layers import Pop, Stash
from ...simulated import CLOCK, Spend, spend

CPU = torch.device("cpu")


def test_what_is_here(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(here, "_main_memory", lambda: 12.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(here, "hand_over", lambda: 0.5)
    monkeypatch.setattr(profile, "perf_counter", perf_counter)
    found = describe_here(CPU, None, None)
    assert found.devices == 3
    assert found.memory == 4.0
    assert found.link_bandwidth == math.inf
    assert found.transfer(1e9) == 0.5
    assert describe_here(CPU, 2, None).memory == 6.0
    assert describe_here(CPU, 2, 3.0).memory == 3.0
    alone = describe_here(CPU, 1, 3.0)
    assert alone.transfer(1e9) == 0.0, "a lone device hands nothing over"


@pytest.mark.parametrize("beside_it", [1, 3])
def test_what_works_beside_others_takes_longer(beside_it: int, monkeypatch: MonkeyPatch) -> None:
    before = threading.active_count()
    at_work = threading.Barrier(beside_it + 1)
    now = 0.0

    def first() -> None:
        nonlocal now
        beside = threading.active_count() > before
        now += 4.0 if beside else 1.0
        if beside and not at_work.broken:
            at_work.wait(10)
            at_work.abort()

    def other() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            at_work.wait(10)

    monkeypatch.setattr(profile, "perf_counter", lambda: now)
    works = [first] + [other] * beside_it
    assert sharing(works) == 3 / beside_it
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("ticks", "seconds", "said"),
    [(100, 5.0, "used 20% of the cores while sharing was measured"), (40, 5.0, ""), (100, 0.5, "")],
)
def test_warns_if_other_programs_use_the_cores(
    ticks: int, seconds: float, said: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Check that a measurement warns if other programs use the core of this process.

    The other programs use it for `ticks` ticks of 10 ms. Other cores do not count.
    """
    now = iter([0.0, seconds])
    monkeypatch.setattr(others, "STAT", tmp_path / "stat")
    monkeypatch.setattr(others, "perf_counter", lambda: next(now))
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    own = os.times()
    monkeypatch.setattr(os, "times", lambda: own)
    lines = "cpu  9 9 9 9 9 9 9 9\ncpu0 {0} 0 0 0 0 0 0 0\ncpu1 {1} 0 {1} 500 7 0 0 9\n"
    others.STAT.write_text(lines.format(0, 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with others.warn_if_disturbed("sharing"):
            others.STAT.write_text(lines.format(500, ticks // 2))
    assert len(caught) == bool(said)
    assert said in "".join([str(each.message) for each in caught])


def test_a_system_that_does_not_tell_who_uses_the_cores(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "STAT", tmp_path / "missing")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with others.warn_if_disturbed("sharing"):
            pass
    assert not caught


def test_a_system_that_does_not_tell_its_memory(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "perf_counter", perf_counter)
    not_known = Mock(side_effect=ValueError("unrecognized configuration name"))
    monkeypatch.setattr("os.sysconf", not_known)
    assert describe_here(CPU, 1, 5.0).memory == 5.0
    refusal = "this system does not tell how much memory it has: .* such as memory='16GiB'"
    with pytest.raises(ValueError, match=refusal):
        describe_here(CPU, 1, None)


@pytest.mark.parametrize(
    ("text", "limited"), [("4096\n", True), ("max\n", False), (str(2**62), False), (None, False)]
)
def test_memory_is_what_a_container_allows(text: str | None, limited: bool, tmp_path: Path) -> None:
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert here._main_memory(file) == (4096 if limited else machine)


pytestmark = pytest.mark.usefixtures("clock")


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.ones(1)


def in_place(forward: float, backward: float) -> Spend:
    return Spend(forward, backward, before=lambda x: x.mul_(2))


def frozen(forward: float, backward: float) -> Spend:
    return Spend(forward, backward).requires_grad_(False)


STASH, POP = Sequential(Stash(), Spend(1, 2)), Sequential(Pop(), Spend(7, 4))
FIRST_OF_TWO = Spend(3, 5, before=lambda pair: pair[0])
TWO_TENSORS: list[Module] = [Spend(2, 1), Spend(1, 2, after=pair), FIRST_OF_TWO]
FIRST_FROZEN: list[Module] = [frozen(1, 2), frozen(2, 3), Spend(3, 5), Spend(7, 4)]
# Each case has three lists: the layers, and the seconds that must be measured for each layer's
# forward and for each layer's backward. The seconds of backward are those for a sample that
# requires no gradient.
CASES: dict[str, tuple[list[Module], list[float], list[float]]] = {
    "plain": ([Spend(1, 2), Spend(3, 5), Spend(7, 4)], [1, 3, 7], [2, 5, 4]),
    "a skip": ([Spend(2, 1), STASH, Spend(3, 5), POP], [2, 1, 3, 7], [1, 2, 5, 4]),
    "two tensors": (TWO_TENSORS, [2, 1, 3], [1, 2, 5]),
    "the first ones frozen": (FIRST_FROZEN, [1, 2, 3, 7], [0, 0, 5, 4]),
    "one between frozen": ([Spend(1, 2), frozen(2, 3), Spend(3, 5)], [1, 2, 3], [2, 3, 5]),
    "in place": ([Spend(1, 2), in_place(3, 5), Spend(7, 4)], [1, 3, 7], [2, 5, 4]),
    "in place at first": ([in_place(3, 5), Spend(7, 4)], [3, 7], [5, 4]),
    "all frozen": ([frozen(1, 2), frozen(2, 3)], [1, 2], [0, 0]),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(("layers", "forward", "backward"), CASES.values(), ids=CASES)
def test_each_layer_has_its_own_seconds(
    layers: list[Module], forward: list[float], backward: list[float], needs_grad: bool
) -> None:
    model = Sequential(*layers)
    x = torch.ones(3, 2, requires_grad=needs_grad)
    if needs_grad:  # then frozen layers have a backward, too
        backward = [layer.seconds[1] for layer in model.modules() if isinstance(layer, Spend)]

    measurements = [time_step(model, x, CPU), *time_alone(model, x, CPU, runs=2)]

    for found in measurements:
        assert found == (forward, forward, backward)
    total = [f + b for f, b in zip(forward, backward, strict=True)]
    for timeout in (0.0, 60.0):
        assert profile_times(model, x, timeout, CPU) == total


class Cold(Spend):
    """A layer of which each copy takes longer in its first run than in all later runs."""

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds
        self.seconds = (1, 2)
        return spend(x * self.weight, *seconds)


def test_the_first_run_of_a_copy_does_not_count() -> None:
    model = Sequential(Cold(100, 200))
    x = torch.ones(3, 2)
    assert time_alone(model, x, CPU, runs=2) == [([1], [1], [2])] * 2
    assert profile_times(model, x, 1e4, CPU) == [1 + 2]


def test_no_backward_takes_less_than_nothing(monkeypatch: MonkeyPatch) -> None:
    """Check that the backward of an identity does not get a negative time.

    An identity returns its input itself, so the input and the output are one tensor. Their
    gradients can be noticed in either order, and the difference of the two times can be negative.
    """

    def ticking() -> float:
        CLOCK.now += 1 / 1024
        return CLOCK.now

    monkeypatch.setattr(timing, "perf_counter", ticking)
    model = Sequential(Spend(1, 2), Identity(), Spend(3, 5))
    found = time_step(model, torch.ones(3, 2), CPU)
    assert found.backward == pytest.approx([2, 0, 5], abs=0.01)
    assert min(found.backward) >= 0
