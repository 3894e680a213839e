"""Every row of rows/training.py with every engine and mode, as a user trains: with criteria, optimizers and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.others.ours import Layers, Threads

from ..plain import piped
from .compare import differences
from .pipe import Pipe, Training
from .rows.training import ROWS


def left(row: Training, pipe: type[Pipe], folder: Path) -> Any:
    """Return what a row leaves."""
    folder.mkdir()
    found = row.action(pipe(row, folder))
    return found.found() if isinstance(found, Pipe) else found


# As benchmarks/conformance.py says, too, with the reason.
TOGETHER = [row for row in ROWS if not row.unlike]


@pytest.mark.parametrize("row", TOGETHER, ids=lambda row: row.name)
def test_training(row: Training, engine: str, checkpoint: str, tmp_path: Path) -> None:
    class Piped(Threads):
        def piped(self, layers: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
            mode = {"always": "always"}.get(options["checkpoint"], checkpoint)
            return piped(layers, balance, **options | {"engine": engine, "checkpoint": mode})

    if refusal := row.refused.get(engine):
        with pytest.raises((RuntimeError, ValueError), match=refusal):
            left(row, Piped, tmp_path / "ours")
        return
    ours = left(row, Piped, tmp_path / "ours")
    if engine == "ranks" and not ours:
        return  # another rank has seen it
    plain = left(row, Layers, tmp_path / "plain")
    assert not any(x is False for x in plain.values()), "the plain layers do not do it either"
    assert differences(ours, plain, row.tolerance) == []
