"""Ranks meet, or say what they wait for, and who has not come."""

from __future__ import annotations

import time
from datetime import timedelta
from queue import SimpleQueue

import pytest
import torch.distributed as dist

from torchgpipe.distributed import patience, wires


@pytest.mark.parametrize("notice, said", [(0.1, 1), (60.0, 0)])
def test_ranks_that_do_not_come_are_named(
    notice: float, said: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(wires, "_get_default_store", lambda: store)
    monkeypatch.setattr(wires, "NOTICE", notice)
    with pytest.raises(RuntimeError, match=r"has waited for 0.2 s .* no sign of rank 1, 2;"):
        wires.Wires([0, 1, 2], 0, None)
    assert capsys.readouterr().err.count("rank 0 has waited for 0.1 s") == said


def test_who_waits_says_so_and_gives_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(patience, "NOTICE", 0.1)
    monkeypatch.setattr(patience, "LIMIT", 0.2)
    told = SimpleQueue[str]()
    with patience.waiting_for("others", told.put):
        assert told.get(timeout=60) == "waited 0.2 s for others"
    assert capsys.readouterr().err == "waited 0.1 s for others\n"
    with patience.waiting_for("nobody", told.put):
        pass
    time.sleep(0.5)
    assert told.empty()
