"""Checkpointing: which micro-batches, and what a layer may ask about the pass it runs in."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from torchgpipe.tensors.checkpoint import (
    Mode,
    checkpointed,
    checkpointing,
    is_checkpointing,
    is_recomputing,
    recomputing,
)


def flags() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


@pytest.mark.parametrize("mode, of_one, of_four", [("always", 1, 4), ("except_last", 0, 3), ("never", 0, 0)])
def test_how_many_micro_batches(mode: Mode, of_one: int, of_four: int) -> None:
    assert (checkpointed(mode, 1), checkpointed(mode, 4)) == (of_one, of_four)


@pytest.mark.parametrize("context, inside", [(checkpointing, (True, False)), (recomputing, (False, True))])
def test_flags_are_put_back(context: Any, inside: tuple[bool, bool]) -> None:
    with pytest.raises(ArithmeticError), context():
        with checkpointing(), recomputing():
            assert flags() == (True, True)
        assert flags() == inside
        raise ArithmeticError
    assert flags() == (False, False)


def test_every_thread_has_flags_of_its_own() -> None:
    seen: list[tuple[bool, bool]] = []
    with checkpointing():
        thread = threading.Thread(target=lambda: seen.append(flags()))
        thread.start()
        thread.join(120)
    assert seen == [(False, False)]
