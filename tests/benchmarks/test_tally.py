"""Tally: small programs, and what is seen of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import benchmarks.tally
import torchgpipe._autograd
import torchgpipe.randomness
import torchgpipe.relay
from benchmarks.tally import tallied
from torchgpipe import GPipe
from torchgpipe.relay import Relay


def in_a_thread(program: Callable[[], object]) -> None:
    thread = threading.Thread(target=program)
    thread.start()
    thread.join()


def backward() -> None:
    torch.ones((), requires_grad=True).mul(2).backward()


@pytest.mark.parametrize("run", [lambda program: program(), in_a_thread], ids=["here", "in a thread"])
def test_operators_and_nodes_of_all_threads(run: Callable[[Callable[[], None]], None]) -> None:
    with tallied() as tally:
        run(backward)
    products = [operator for operator in map(str, tally.operators) if ".mul." in operator]
    assert products == ["aten.mul.Tensor"] * 2  # forward, and its backward
    assert tally.nodes == [2]  # MulBackward, AccumulateGrad
    assert not tally.reads


def test_nodes_of_several_roots_are_counted_once() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    with tallied() as tally:
        torch.autograd.backward([y.sum(), (y * y).sum()])
    assert tally.nodes == [5]  # two sums, the product, the exponential, the leaf


def test_nothing_of_other_threads_or_modules_and_nothing_afterwards() -> None:
    go = threading.Event()

    def other() -> None:
        go.wait()
        backward()
        torch.cpu.synchronize()

    thread = threading.Thread(target=other)
    thread.start()
    with tallied() as tally:
        elsewhere = queue.SimpleQueue[int]()
        elsewhere.put(1)
        assert elsewhere.get() == 1
        go.set()
        thread.join()
    backward()
    in_a_thread(backward)
    assert (tally.operators, tally.nodes, tally.reads, tally.threads) == ([], [], [], [])
    assert tally.waits == ["Thread.join"]


def test_a_tensor_and_its_views_are_one() -> None:
    before = torch.ones(4)
    with tallied() as tally:
        torch.exp_(before)  # seen first now, as what is there
        tally.clear()
        a = before + 1
        b = a.view(2, 2).t()
        before.mul_(2)
        assert tally.alive() == (1, 16)
        del a
        assert tally.alive() == (1, 16)
        c = b + 1
        del b, c
        assert tally.alive() == (0, 0)
        assert tally.peak() == (2, 32)
        tally.clear()
        assert tally.peak() == (0, 0)


def test_a_pipeline_settles() -> None:
    with tallied() as tally:
        model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2, engine="workers")
        for _ in range(20):
            tally.settle()
            tally.clear()
            model(torch.ones(2, 2)).sum().backward()
            tally.settle()
            assert len(tally.threads) == 1
        del model
        assert tally.left() == 0


def test_a_thread_that_neither_ends_nor_waits_for_work(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    with tallied() as tally:
        threading.Thread(target=go.wait, name="stubborn").start()
        with monkeypatch.context() as impatient:
            impatient.setattr(benchmarks.tally, "PATIENCE", 0.2)
            with pytest.raises(RuntimeError, match="thread 'stubborn' neither ends nor waits at a queue"):
                tally.settle()
            assert tally.left() == 1
        go.set()
        assert tally.left() == 0


# A program with a relay and a tensor of three; what it may wait for, and what it reads from a device.
PROGRAMS: dict[str, tuple[Callable[[Relay, Tensor], object], list[str], list[str]]] = {
    "an item": (lambda relay, x: relay.give(0, "item"), ["queue"], []),
    "an item, and the ticket in return": (lambda relay, x: (relay.give(0, 1), relay.take(1)), ["queue"] * 2, []),
    "a lock, and two queues told": (lambda relay, x: relay.stop(Exception()), ["lock", "queue", "queue"], []),
    "a join": (lambda relay, x: in_a_thread(lambda: None), ["Event.wait", "Thread.join"], []),
    "nothing": (lambda relay, x: (relay.check(), x * x), [], []),
    "item": (lambda relay, x: x[0].item(), [], ["aten._local_scalar_dense.default"]),
    "if": (lambda relay, x: bool(x[0] > 0), [], ["aten._local_scalar_dense.default"]),
    "nonzero": (lambda relay, x: x.nonzero(), [], ["aten.nonzero.default"]),
    "repeat": (lambda relay, x: x.repeat_interleave(x.long()), [], ["aten.repeat_interleave.Tensor"]),
    "repeat to a known size": (lambda relay, x: x.repeat_interleave(x.long(), output_size=3), [], []),
    "a device": (lambda relay, x: torch.cpu.synchronize(), [], ["torch.cpu.synchronize"]),
    "cuda": (lambda relay, x: torch.cuda.synchronize(), [], ["torch.cuda.synchronize"]),
}


@pytest.mark.parametrize(("program", "waits", "reads"), PROGRAMS.values(), ids=PROGRAMS)
def test_waits_and_reads(
    program: Callable[[Relay, Tensor], object], waits: list[str], reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # there may be no GPU
    with tallied() as tally:
        relay = Relay(2)
        tally.clear()
        program(relay, torch.ones(3))
        assert (tally.waits, tally.reads) == (waits, reads)


def test_all_is_as_it_was_afterwards() -> None:
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
