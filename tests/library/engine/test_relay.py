"""The relay: programs at once, one hands to the next; a stop wakes all that wait. And the threads that run them.

What becomes of errors is in tests/failures; that threads end with their pipeline, in tests/library/test_leaks.py; what
a forked process does, in tests/works_with.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from torchgpipe.engine.pool import Workers
from torchgpipe.engine.relay import Queues, Relay, Stopped

PATIENCE = 120  # seconds; only a hang takes as long


class Boom(Exception):
    pass


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Two threads, so that three programs run at once."""
    workers = Workers(2)
    yield workers
    workers.close()


def test_items_arrive_in_order_and_none_is_far_ahead() -> None:
    relay = Relay(2)
    given: list[int] = []

    def program() -> None:
        for item in range(5):
            relay.links[0].admit()
            relay.links[0].give(item)
            given.append(item)

    thread = threading.Thread(target=relay.attempt, args=(program,))
    thread.start()
    for item in range(5):
        assert relay.links[1].take() == item
        assert len(given) <= item + 1 + relay.LEAD
    thread.join(PATIENCE)

    assert given == [0, 1, 2, 3, 4] and relay.error is None


# What a program of three may wait for.
WAITS: dict[str, Callable[[Relay], object]] = {
    "the next to follow": lambda relay: [*map(Queues.admit, relay.links[:1] * (1 + relay.LEAD))],
    "an item": lambda relay: relay.links[1].take(),
    "the last one's item": lambda relay: relay.links[2].take(),
    "an announcement": lambda relay: relay.links[1].expect(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_stop_wakes_who_waits(wait: Callable[[Relay], object]) -> None:
    """Also a second one: an interrupt may come in the middle of a stop, and the next one has to reach all."""
    relay, first = Relay(3), Boom("first")
    stopped: list[Boom] = []

    def program() -> None:
        try:
            wait(relay)
        except Stopped:
            stopped.append(error)
        finally:
            woken.set()

    for error in (first, Boom("second")):
        woken = threading.Event()
        thread = threading.Thread(target=program, daemon=True)
        thread.start()
        relay.stop(error)
        assert woken.wait(PATIENCE)
        assert stopped[-1:] == [error]
        assert relay.error is first
        with pytest.raises(Stopped):
            relay.links[0].check()


def test_an_error_is_not_kept(workers: Workers) -> None:
    class Held:
        pass

    def program() -> None:
        held.append(weakref.ref(value := Held()))
        raise Boom(value)

    held: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with pytest.raises(Boom):
            workers.run(Relay(3), [lambda: None, program, lambda: None])
        assert held[0]() is None
    finally:
        gc.enable()


class Slow(SimpleQueue[Any]):
    """Callers overtake each other between what they give to two workers."""

    def put(self, *item: Any) -> None:
        super().put(*item)
        time.sleep(random.uniform(0, 5e-3))


def test_two_callers_do_not_get_in_each_others_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers get the programs of one caller before those of another, or they would wait for each other."""
    monkeypatch.setattr("torchgpipe.engine.pool.SimpleQueue", Slow)
    workers = Workers(2)
    done: list[int] = []

    def call(caller: int) -> None:
        for _ in range(5):
            relay = Relay(3)
            workers.run(relay, [partial(first, relay, caller), partial(middle, relay), partial(last, relay)])

    def first(relay: Relay, caller: int) -> None:
        for _ in range(3):
            relay.links[0].admit()
            relay.links[0].give(caller)

    def middle(relay: Relay) -> None:
        for _ in range(3):
            item = relay.links[1].take()
            relay.links[1].admit()
            relay.links[1].give(item)

    def last(relay: Relay) -> None:
        done.extend(relay.links[2].take() for _ in range(3))

    callers = [threading.Thread(target=call, args=(caller,), daemon=True) for caller in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(PATIENCE)

    assert sorted(done) == sorted([*range(4)] * 3 * 5)
    workers.close()


def test_a_thread_that_did_not_start_is_started_by_the_next_run(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    left = iter([start])

    def fails_the_second_time(thread: threading.Thread) -> None:
        real = next(left, None)
        if real is None:
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails_the_second_time)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            workers.run(Relay(3), [lambda: None] * 3)

    ran: list[int] = []
    caller = threading.Thread(
        target=lambda: workers.run(Relay(3), [partial(ran.append, j) for j in range(3)]), daemon=True
    )
    caller.start()
    caller.join(PATIENCE)
    assert sorted(ran) == [0, 1, 2]
