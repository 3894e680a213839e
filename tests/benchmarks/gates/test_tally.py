"""Tally: what is not to be seen; the rest is in the committed counts."""

from __future__ import annotations

import queue
import threading

import torch

from benchmarks.gates.tally import tallied


def test_nothing_of_other_threads_or_modules_and_nothing_afterwards() -> None:
    go = threading.Event()

    def backward() -> None:
        go.wait()
        torch.ones((), requires_grad=True).mul(2).backward()

    thread = threading.Thread(target=backward)
    thread.start()
    with tallied() as tally:
        queue.SimpleQueue[int]().put(1)
        go.set()
        thread.join()
    backward()
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert (tally.operators, tally.nodes, tally.waits) == ([], [], [])
