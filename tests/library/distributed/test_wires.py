"""Ranks meet, or say who has not come."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from torchgpipe.distributed import connections as wires

from ...start import python


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(wires, "NOTICE", 0.1)
    monkeypatch.setattr(wires, "_get_default_store", lambda: store)
    with pytest.raises(RuntimeError, match=r"has waited for 0.2 s .* no sign of rank 1, 2;"):
        wires.Wires([0, 1, 2], 0, None)
    assert capsys.readouterr().err.startswith("rank 0 has waited for 0.1 s for others to make")


def test_a_rank_says_what_it_waits_for_and_ends() -> None:
    waits = "import time; from torchgpipe.distributed.liveness import patience\n"
    waits += "patience.NOTICE, patience.LIMIT = 0.1, 0.2\n"
    process = python("-c", f"{waits}with patience.waiting_for('others'): time.sleep(60)")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == "waited 0.1 s for others\ngave up after 0.2 s of waiting for others\n"
