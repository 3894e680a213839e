"""Ranks meet, or say who has not come; and what is left of gloo when they part."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from torchgpipe import idle
from torchgpipe.distributed import wires


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(wires, "_get_default_store", lambda: store)
    with pytest.raises(RuntimeError, match=r"has waited for 0.2 s .* no sign of rank 1, 2;"):
        wires.Wires([0, 1, 2], 0, None)


def test_a_thread_of_gloo_that_stays_does_not_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays where a wait for sending does not end, which is played here: on one of two ranks."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(wires, "_get_default_store", lambda: store)
    monkeypatch.setattr(wires, "GRACE", 60)  # seconds for threads to end
    monkeypatch.setattr(idle, "_left_out", {})
    with ThreadPoolExecutor() as ranks:
        first, second = ranks.map(lambda rank: wires.Wires([0, 1], rank, None), range(2))
    end = threading.Event()
    first.sender("control", 1).thread = stays = threading.Thread(target=end.wait)
    stays.start()
    second.close()
    assert not idle._left_out
    monkeypatch.setattr(wires, "GRACE", 0.1)
    first.close()
    end.set()
    assert {Path(f"/proc/self/task/{thread}/comm").read_text() for thread in idle._left_out} == {"gloo_tcp_loop\n"}
