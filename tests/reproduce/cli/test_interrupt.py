"""Interrupts: Ctrl-C counts wherever it strikes, and nothing is left changed."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

import pytest

from reproduce.cli.interrupt import interruptible


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class PressedWhileItDies:
    def __del__(self) -> None:
        press()
        sum(range(1000))  # the signal is noticed here, where Python swallows the exception


def test_strikes_where_the_program_is() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible() as check:
        check()
        press()
        pytest.fail("not reached")


def test_is_remembered_where_python_swallows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with interruptible() as check:
        dying = PressedWhileItDies()
        del dying
        gc.collect()
        with pytest.raises(KeyboardInterrupt):
            check()
    assert capsys.readouterr().err == ""


def test_other_swallowed_exceptions_are_still_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(unraisable.exc_type))

    class Bad:
        def __del__(self) -> None:
            raise ValueError

    with interruptible():
        bad = Bad()
        del bad
        gc.collect()
    assert shown == [ValueError]


def test_leaves_everything_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with pytest.raises(ZeroDivisionError), interruptible():
        assert signal.getsignal(signal.SIGINT) is not before[0]
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_does_nothing_in_other_threads() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with interruptible() as check:
            check()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
