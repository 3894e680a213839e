"""Interrupts: Ctrl-C works wherever it arrives, and handlers are restored."""

import os
import signal
import sys
from collections.abc import Callable

import pytest

from reproduce.cli.interrupt import interruptible


class Dying:
    """An object whose destructor calls a function. Python swallows exceptions there."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()
        sum(range(1000))  # Python handles the signal here


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_strikes_where_the_program_is_and_leaves_everything_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), interruptible() as check:
        check()
        press()
        pytest.fail("not reached")
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_is_remembered_where_python_swallows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other exceptions in destructors are still shown."""
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(unraisable.exc_type))
    with interruptible() as check:
        Dying(lambda: 1 / 0)
        Dying(press)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert shown == [ZeroDivisionError]
