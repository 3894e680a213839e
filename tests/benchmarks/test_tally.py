"""Tally: what is not to be seen, and programs that no pipeline runs; the rest is in the committed counts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import benchmarks.tally
import torchgpipe._autograd
import torchgpipe.randomness
import torchgpipe.relay
from benchmarks.tally import tallied


def in_a_thread(program: Callable[[], object]) -> None:
    thread = threading.Thread(target=program)
    thread.start()
    thread.join()


def backward() -> None:
    torch.ones((), requires_grad=True).mul(2).backward()


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


# What a program on a tensor of three reads from a device; `test_counted_step` has the usual kinds, and all waits.
READS: dict[str, tuple[Callable[[Tensor], object], list[str]]] = {
    "a shape that the values decide": (lambda x: x.nonzero(), ["aten.nonzero.default"]),
    "repeat": (lambda x: x.repeat_interleave(x.long()), ["aten.repeat_interleave.Tensor"]),
    "repeat to a known size": (lambda x: x.repeat_interleave(x.long(), output_size=3), []),
    "cuda": (lambda x: torch.cuda.synchronize(), ["torch.cuda.synchronize"]),
}


@pytest.mark.parametrize(("program", "reads"), READS.values(), ids=READS)
def test_reads(program: Callable[[Tensor], object], reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # there may be no GPU
    with tallied() as tally:
        program(torch.ones(3))
        assert tally.reads == reads


def test_all_is_as_it_was_afterwards() -> None:
    def state() -> list[object]:
        return [
            torchgpipe.relay.SimpleQueue, torchgpipe.relay.threading, torchgpipe.randomness.DEFAULT_GENERATOR_LOCK,  # type: ignore[attr-defined]
            torchgpipe._autograd._engine, torch.autograd.Variable._execution_engine, threading.Thread.start,
            threading.Thread.join, threading.Event.wait, torch.cuda.synchronize, torch.cuda.Stream.synchronize,
        ]  # fmt: skip

    before = state()
    with pytest.raises(KeyError), tallied():
        assert not any(a is b for a, b in zip(before, state(), strict=True))
        raise KeyError
    assert all(a is b for a, b in zip(before, state(), strict=True))
