"""Tally: small programs, and what is seen of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import benchmarks.tally
from benchmarks.tally import Tally, tallied
from torchgpipe import GPipe


def in_a_thread(program: Callable[[], object]) -> None:
    thread = threading.Thread(target=program)
    thread.start()
    thread.join()


def backward() -> None:
    torch.ones((), requires_grad=True).mul(2).backward()


def names(tally: Tally) -> list[str]:
    return [str(operator) for operator in tally.operators]


# `mul`'s backward multiplies, and so does its forward; `backward` starts from a one, and steals the gradient.
BACKWARD = ["aten.mul.Tensor", "aten.mul.Tensor"]


@pytest.mark.parametrize("run", [lambda program: program(), in_a_thread], ids=["here", "in a thread"])
def test_operators_and_nodes_of_all_threads(run: Callable[[Callable[[], None]], None]) -> None:
    with tallied() as tally:
        run(backward)
    assert [name for name in names(tally) if ".mul." in name] == BACKWARD
    assert tally.nodes == [2]  # MulBackward, AccumulateGrad
    assert not tally.reads


def test_nodes_of_several_roots_are_counted_once() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    with tallied() as tally:
        torch.autograd.backward([y.sum(), (y * y).sum()])
    assert tally.nodes == [5]  # two sums, the product, the exponential, the leaf


def test_nothing_of_other_threads_and_nothing_afterwards() -> None:
    go, done = threading.Event(), threading.Event()

    def other() -> None:
        go.wait()
        backward()
        torch.cpu.synchronize()
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with tallied() as tally:
        go.set()
        thread.join()
    backward()
    in_a_thread(backward)
    assert done.is_set()
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
