"""Waits: small programs, and where they may wait for another thread, or would wait for a device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.tally import tallied
from torchgpipe.relay import Relay


def start_and_join() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


# A program, and what it may wait for.
WAITS: dict[str, tuple[Callable[[Relay], object], list[str]]] = {
    "an item": (lambda relay: relay.give(0, "item"), ["queue"]),
    "an item, and the ticket in return": (lambda relay: (relay.give(0, 1), relay.take(1)), ["queue", "queue"]),
    "a lock, and two queues told": (lambda relay: relay.stop(Exception()), ["lock", "queue", "queue"]),
    "a join": (lambda relay: start_and_join(), ["Event.wait", "Thread.join"]),
    "nothing": (lambda relay: relay.check(), []),
}


@pytest.mark.parametrize(("program", "expected"), WAITS.values(), ids=WAITS)
def test_waits_for_threads(program: Callable[[Relay], object], expected: list[str]) -> None:
    with tallied() as tally:
        relay = Relay(2)
        tally.clear()
        program(relay)
        assert tally.waits == expected


READS: dict[str, tuple[Callable[[Tensor], object], list[str]]] = {
    "item": (lambda x: x[0].item(), ["aten._local_scalar_dense.default"]),
    "if": (lambda x: bool(x[0] > 0), ["aten._local_scalar_dense.default"]),
    "nonzero": (lambda x: x.nonzero(), ["aten.nonzero.default"]),
    "repeat": (lambda x: x.repeat_interleave(x.long()), ["aten.repeat_interleave.Tensor"]),
    "repeat to a known size": (lambda x: x.repeat_interleave(x.long(), output_size=3), []),
    "a device": (lambda x: torch.cpu.synchronize(), ["torch.cpu.synchronize"]),
    "cuda": (lambda x: torch.cuda.synchronize(), ["torch.cuda.synchronize"]),
    "a product": (lambda x: x * x, []),
}


@pytest.mark.parametrize(("program", "expected"), READS.values(), ids=READS)
def test_reads(program: Callable[[Tensor], object], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # there may be no GPU
    with tallied() as tally:
        program(torch.ones(3))
    assert tally.reads == expected


def test_all_is_as_it_was_afterwards() -> None:
    import torchgpipe._autograd
    import torchgpipe.randomness
    import torchgpipe.relay

    def state() -> list[object]:
        return [
            torchgpipe.relay.SimpleQueue, torchgpipe.relay.threading, torchgpipe.randomness.DEFAULT_GENERATOR_LOCK,
            torchgpipe._autograd._engine, torch.autograd.Variable._execution_engine, threading.Thread.start,
            threading.Thread.join, threading.Event.wait, torch.cuda.synchronize, torch.cuda.Stream.synchronize,
        ]  # fmt: skip

    before = state()
    with pytest.raises(KeyError), tallied():
        assert not any(a is b for a, b in zip(before, state(), strict=True))
        raise KeyError
    assert all(a is b for a, b in zip(before, state(), strict=True))


def test_a_queue_of_another_module_is_its_own() -> None:
    with tallied() as tally:
        elsewhere = queue.SimpleQueue[int]()
        elsewhere.put(1)
        assert (elsewhere.get(), tally.waits) == (1, [])
