"""Tests that Ctrl-C, SIGTERM and SIGHUP end any command with an error of one line.

This must hold wherever in the program the signal arrives.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import ENDING, Signalled, interruptible

PRESS = partial(signal.raise_signal, signal.SIGINT)
SIGNALS = [
    (signal.SIGINT, 130, "interrupted"),
    (signal.SIGTERM, 143, "ended by SIGTERM"),
    (signal.SIGHUP, 129, "ended by SIGHUP"),
]


class Dying:
    """An object whose destructor calls a function.

    Python prints exceptions that are raised in a destructor, and then ignores them.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()
        sum(range(1000))  # Python handles the signal here


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Give SIGTERM and SIGHUP their default handlers during a test.

    Without this fixture, they may have other handlers, for example under `nohup`.
    """
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code", "told"), SIGNALS)
@pytest.mark.usefixtures("default_signals")
def test_strikes_where_the_program_is_and_leaves_everything_as_it_was(
    number: int, code: int, told: str
) -> None:
    before = [*map(signal.getsignal, ENDING), sys.unraisablehook]
    with pytest.raises(Signalled, match=f"^{told}$") as caught, interruptible() as check:
        check()
        signal.raise_signal(number)
        pytest.fail("not reached")
    assert caught.value.exit_code == code
    assert [*map(signal.getsignal, ENDING), sys.unraisablehook] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("default_signals")
def test_an_ignored_signal_stays_ignored(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    with interruptible() as check:
        signal.raise_signal(number)
        check()
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize(("number", "code", "told"), SIGNALS)
@pytest.mark.usefixtures("default_signals")
def test_a_signal_ends_any_command_with_one_line(
    number: int, code: int, told: str, tmp_path: Path, monkeypatch: Any, command: Any
) -> None:
    """Check that a signal ends the command `compare` while it reads its first record."""

    def read(name: str) -> Path:
        signal.raise_signal(number)
        return tmp_path / name

    before = [*map(signal.getsignal, ENDING)]
    monkeypatch.setattr("reproduce.numbers.sources.find_record", read)

    out, err = command("compare", "a", "b", code=code)

    assert (out, err) == ("", f"reproduce: {told}\n")
    assert [*map(signal.getsignal, ENDING)] == before


def test_is_remembered_where_python_swallows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that Ctrl-C still ends the program if it arrives while a destructor runs.

    Python prints an exception of a destructor, and goes on. The program must do the same, but it
    must raise the `KeyboardInterrupt` of Ctrl-C later.
    """
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(unraisable.exc_type))
    with interruptible() as check:
        Dying(lambda: 1 / 0)
        Dying(PRESS)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert shown == [ZeroDivisionError]
