"""The relay: programs at once, one hands to the next; the first error stops all. And the threads that run them."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial

import pytest

from torchgpipe.relay import Relay, Stopped, Workers

PATIENCE = 120  # seconds; only a hang takes as long


class Boom(Exception):
    pass


def alive() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("gpipe-partition")}


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Two threads, so that three programs run at once."""
    workers = Workers(2)
    yield workers
    workers.close()


class TestRelay:
    def test_items_arrive_in_order(self) -> None:
        relay = Relay(3)
        relay.give(0, 1)
        relay.give(1, "other link")
        assert relay.take(1) == 1
        relay.give(0, 2)

        assert [relay.take(1), relay.take(2)] == [2, "other link"]

    def test_none_is_far_ahead(self) -> None:
        relay = Relay(2)
        given: list[int] = []

        def program() -> None:
            for item in range(5):
                relay.admit(0)
                relay.give(0, item)
                given.append(item)

        thread = threading.Thread(target=relay.attempt, args=(program,))
        thread.start()
        for item in range(5):
            assert relay.take(1) == item
            assert len(given) <= item + 1 + relay.LEAD
        thread.join(PATIENCE)

        assert given == [0, 1, 2, 3, 4] and relay.error is None

    def test_an_item_is_announced_before_it_is_there(self) -> None:
        relay = Relay(2)
        told: list[object] = []

        def program() -> None:
            relay.expect(1)
            told.append("announced")
            told.append(relay.take(1))

        thread = threading.Thread(target=relay.attempt, args=(program,))
        thread.start()
        thread.join(0.05)
        before = list(told)
        relay.announce(0)
        thread.join(0.05)
        between = list(told)
        relay.give(0, "item")
        thread.join(PATIENCE)

        assert before == []
        assert between in ([], ["announced"])
        assert told == ["announced", "item"]

    def test_stop_wakes_who_is_ahead(self) -> None:
        relay = Relay(2)
        for _ in range(relay.LEAD):
            relay.admit(0)
        woken = threading.Event()

        def wait() -> None:
            with pytest.raises(Stopped):
                relay.admit(0)
            woken.set()

        thread = threading.Thread(target=wait)
        thread.start()
        relay.stop(Boom())

        assert woken.wait(PATIENCE)
        thread.join(PATIENCE)

    def test_stop_wakes_every_program(self) -> None:
        relay = Relay(4)
        woken: list[int] = []

        def wait(position: int) -> None:
            with pytest.raises(Stopped):
                relay.take(position)
            woken.append(position)

        threads = [threading.Thread(target=wait, args=(position,)) for position in (1, 2, 3)]
        for thread in threads:
            thread.start()
        relay.stop(Boom())
        for thread in threads:
            thread.join(PATIENCE)

        assert sorted(woken) == [1, 2, 3]

    def test_no_task_starts_after_a_stop(self) -> None:
        relay = Relay(2)
        relay.check()

        relay.stop(Boom())

        with pytest.raises(Stopped):
            relay.check()

    def test_the_first_error_counts(self) -> None:
        relay = Relay(2)
        first = Boom("first")

        relay.stop(first)
        relay.stop(Boom("second"))

        assert relay.error is first

    def test_stop_can_be_repeated(self) -> None:
        """An interrupt may come in the middle of a stop; the next one has to reach the programs still."""
        relay = Relay(2)
        relay.stop(Boom())
        with pytest.raises(Stopped):
            relay.take(1)

        relay.stop(KeyboardInterrupt())

        assert not relay._links[0].empty()

    @pytest.mark.parametrize("error", [Boom(), KeyboardInterrupt(), SystemExit(1), GeneratorExit()], ids=repr)
    def test_attempt_keeps_the_error(self, error: BaseException) -> None:
        relay = Relay(2)

        def program() -> None:
            raise error

        relay.attempt(program)

        assert relay.stopped
        assert relay.error is error

    def test_being_stopped_is_no_error(self) -> None:
        relay = Relay(2)

        def program() -> None:
            raise Stopped

        relay.attempt(program)

        assert not relay.stopped
        assert relay.error is None


class TestWorkers:
    def test_each_program_has_its_thread_and_the_last_the_callers(self, workers: Workers) -> None:
        threads: dict[int, threading.Thread] = {}
        before = alive()

        def program(position: int) -> None:
            seen = threads.setdefault(position, threading.current_thread())
            assert seen is threading.current_thread()

        for _ in range(3):
            workers.run(Relay(3), [partial(program, position) for position in range(3)])

        assert set(threads) == {0, 1, 2}
        assert threads[2] is threading.current_thread()
        assert {threads[0], threads[1]} == alive() - before

    def test_programs_run_at_once(self, workers: Workers) -> None:
        together = threading.Barrier(3)
        workers.run(Relay(3), [lambda: together.wait(PATIENCE) and None] * 3)

    def test_no_thread_before_the_first_run(self) -> None:
        before = alive()
        Workers(2).close()
        assert alive() <= before

    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_an_error_of_any_program_is_raised_once(self, workers: Workers, position: int) -> None:
        error = Boom()
        ended: list[int] = []
        relay = Relay(3)

        def program(own: int) -> None:
            try:
                if own == position:
                    raise error
                while True:
                    relay.check()
                    time.sleep(0.001)
            finally:
                ended.append(own)

        with pytest.raises(Boom) as caught:
            workers.run(relay, [partial(program, own) for own in range(3)])

        assert caught.value is error
        assert caught.value.__context__ is None
        assert sorted(ended) == [0, 1, 2]
        assert relay.error is None
        workers.run(Relay(3), [lambda: None] * 3)

    def test_two_callers_do_not_get_in_each_others_way(self, workers: Workers) -> None:
        done: list[int] = []

        def call(caller: int) -> None:
            for _ in range(20):
                relay = Relay(3)

                def middle(relay: Relay = relay) -> None:
                    relay.give(1, relay.take(1) + 1)

                def last(relay: Relay = relay) -> None:
                    done.append(relay.take(2) - 1)

                workers.run(relay, [partial(relay.give, 0, caller), middle, last])

        callers = [threading.Thread(target=call, args=(caller,), daemon=True) for caller in range(3)]
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join(PATIENCE)

        assert sorted(done) == sorted([0, 1, 2] * 20)

    def test_close_ends_the_threads(self) -> None:
        before = alive()
        workers = Workers(2)
        workers.run(Relay(3), [lambda: None] * 3)
        threads = alive() - before
        assert len(threads) == 2

        workers.close()

        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def test_run_after_close(self) -> None:
        """The graph of an output outlives its pipeline, and still has to go backward; no thread stays."""
        before = alive()
        workers = Workers(2)
        workers.run(Relay(3), [lambda: None] * 3)
        workers.close()
        ran: list[int] = []

        caller = threading.Thread(
            target=lambda: workers.run(Relay(3), [partial(ran.append, j) for j in range(3)]), daemon=True
        )
        caller.start()
        caller.join(PATIENCE)

        assert sorted(ran) == [0, 1, 2]
        for thread in alive() - before:
            thread.join(PATIENCE)
        assert alive() <= before

    def test_a_thread_that_did_not_start_is_started_by_the_next_run(
        self, workers: Workers, monkeypatch: pytest.MonkeyPatch
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
        start(caller)
        caller.join(PATIENCE)
        assert sorted(ran) == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    workers = Workers(1)
    ran: list[int] = []

    def run() -> None:
        relay = Relay(2)
        workers.run(relay, [lambda: relay.give(0, os.getpid()), lambda: ran.append(relay.take(1))])

    run()
    with warnings.catch_warnings():
        # Forking beside threads is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(PATIENCE)
            run()
        finally:
            os._exit(0 if ran[1:] == [os.getpid()] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    workers.close()
