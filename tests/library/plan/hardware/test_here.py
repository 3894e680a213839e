"""What the present machine offers: the cores and the memory that this process may use, not all there are."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from pathlib import Path

import pytest
import torch

from torchgpipe.plan.hardware import here
from torchgpipe.plan.hardware.here import describe_here, sharing

CPU = torch.device("cpu")


def test_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "_main_memory", lambda: 12.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(here, "hand_over", lambda: 0.5)
    found = describe_here(CPU, None, None)
    assert (found.devices, found.memory, found.link_bandwidth, found.transfer(1e9)) == (3, 4.0, math.inf, 0.5)
    assert describe_here(CPU, 2, None).memory == 6.0
    assert describe_here(CPU, 2, 3.0).memory == 3.0


def test_a_lone_device_hands_nothing_over() -> None:
    assert describe_here(CPU, 1, 3.0).transfer(1e9) == 0.0


@pytest.mark.parametrize("others", [1, 3])
def test_what_works_beside_others_takes_longer(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, before, at_work = [0.0], threading.active_count(), threading.Barrier(others + 1)

    def first() -> None:
        beside = threading.active_count() > before
        now[0] += 4.0 if beside else 1.0
        if beside and not at_work.broken:
            at_work.wait(10)
            at_work.abort()

    def other() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            at_work.wait(10)

    monkeypatch.setattr(here, "perf_counter", lambda: now[0])
    assert sharing([first, *[other] * others]) == 3 / others
    assert threading.active_count() == before


def test_a_system_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", refuse)
    assert describe_here(CPU, 1, 5.0).memory == 5.0
    with pytest.raises(ValueError, match="this system does not tell its memory: say memory='16GiB'"):
        describe_here(CPU, 1, None)


@pytest.mark.parametrize(("text", "limited"), [("4096\n", True), ("max\n", False), (str(2**62), False), (None, False)])
def test_memory_is_what_a_container_allows(text: str | None, limited: bool, tmp_path: Path) -> None:
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert here._main_memory(file) == (4096 if limited else machine)
