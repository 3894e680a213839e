"""Ranks meet, or say who has not come."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from torchgpipe.distributed import wires


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(wires, "_get_default_store", lambda: store)
    with pytest.raises(RuntimeError, match=r"has waited for 0.2 s .* no sign of rank 1, 2;"):
        wires.Wires([0, 1, 2], 0, None)
