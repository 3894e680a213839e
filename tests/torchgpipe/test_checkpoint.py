"""Checkpointing: which micro-batches, and what a layer may ask about the pass it runs in."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from torchgpipe.checkpoint import (
    Mode,
    checkpointed,
    checkpointing,
    is_checkpointing,
    is_recomputing,
    recomputing,
)


def flags() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


@pytest.mark.parametrize(
    "mode, m, expected",
    [
        ("always", 1, 1),
        ("always", 4, 4),
        ("except_last", 1, 0),
        ("except_last", 4, 3),
        ("never", 1, 0),
        ("never", 4, 0),
    ],
)
def test_how_many_micro_batches(mode: Mode, m: int, expected: int) -> None:
    assert checkpointed(mode, m) == expected


@pytest.mark.parametrize(
    "contexts, expected",
    [
        ([], (False, False)),
        ([checkpointing], (True, False)),
        ([recomputing], (False, True)),
        ([checkpointing, checkpointing], (True, False)),
        ([checkpointing, recomputing], (True, True)),
    ],
    ids=["outside", "first pass", "second pass", "nested", "one in the other"],
)
def test_flags(contexts: list[Any], expected: tuple[bool, bool]) -> None:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        assert flags() == expected
    assert flags() == (False, False)


@pytest.mark.parametrize("context, inside", [(checkpointing, (True, False)), (recomputing, (False, True))])
def test_flags_are_put_back(context: Any, inside: tuple[bool, bool]) -> None:
    with pytest.raises(ArithmeticError), context():
        raise ArithmeticError
    assert flags() == (False, False)
    with context():
        with context():
            pass
        assert flags() == inside


def test_every_thread_has_flags_of_its_own() -> None:
    seen: list[tuple[bool, bool]] = []
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        seen.append(flags())
        with recomputing():
            entered.set()
            leave.wait(120)
            seen.append(flags())

    with checkpointing():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(120)
        assert flags() == (True, False)
        leave.set()
        thread.join(120)
    assert seen == [(False, False), (False, True)]
