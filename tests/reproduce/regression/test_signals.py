"""Signals: what ends a program ends it in order, and never between two steps that belong together."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType

import pytest

from reproduce.regression.signals import terminable, undivided

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class Came(Exception):
    """Tell which signal came."""


@pytest.fixture(params=ENDING, ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> int:
    """Let a signal raise."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Came(number)

    given: int = request.param
    before = signal.signal(given, handle)
    request.addfinalizer(lambda: signal.signal(given, before))
    return given


def test_put_off_to_the_end(number: int) -> None:
    done = []
    with pytest.raises(Came, match=str(number)):
        with undivided():
            signal.raise_signal(number)
            done.append("whole")
        done.append("after")  # pragma: no cover
    assert done == ["whole"]
    with pytest.raises(Came):
        signal.raise_signal(number)


def test_put_off_where_the_context_fails(number: int) -> None:
    with pytest.raises(Came) as raised, undivided():
        signal.raise_signal(number)
        raise ValueError("no process")
    assert isinstance(raised.value.__context__, ValueError)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], indirect=True)
def test_terminable(number: int) -> None:
    with pytest.raises(SystemExit) as raised, terminable():
        signal.raise_signal(number)
    assert raised.value.code == 128 + number
    with pytest.raises(Came):
        signal.raise_signal(number)


@pytest.mark.parametrize("context", [terminable, undivided])
def test_what_is_ignored_stays_so(context: type[AbstractContextManager[None]]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with context():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("context", [terminable, undivided])
def test_other_threads_leave_signals_alone(context: type[AbstractContextManager[None]]) -> None:
    handlers = [signal.getsignal(each) for each in ENDING]
    seen = []

    def use() -> None:
        with context():
            seen.extend(signal.getsignal(each) for each in ENDING)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == handlers
