"""Ranks meet, or say who has not come."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from torchgpipe.distributed import RankFailed, connections

from ...start import TORCHRUN, python


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(connections, "NOTICE", 0.1)
    monkeypatch.setattr(connections, "_get_default_store", lambda: store)
    with pytest.raises(RuntimeError, match=r"has waited for 0.2 s .* no sign of rank 1, 2;"):
        connections.Connections([0, 1, 2], 0, None)
    assert capsys.readouterr().err.startswith("rank 0 has waited for 0.1 s for others to make")


def test_a_store_that_ends_and_one_that_another_process_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d: Any = dist
    kept = [c10d.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)]
    store = c10d.TCPStore("127.0.0.1", kept[0].port, 2, wait_for_workers=False, timeout=timedelta(seconds=2))
    monkeypatch.setattr(connections, "_get_default_store", lambda: store)
    c10d.PrefixStore("torchgpipe/(0, 7)/0", store).set("rank 0 is here", "process 5 on elsewhere")
    for said in (
        r"rank 0 is process 5 on elsewhere, and process \d+ on .* says the same: start each rank only once",
        r"an unknown rank ended while rank 0 connected to others \(",
    ):
        with pytest.raises(RankFailed, match=said):
            connections.Connections([0, 7], 0, None)
        kept.clear()


def test_a_rank_says_what_it_waits_for_and_ends() -> None:
    waits = "import time; from torchgpipe import patience\n"
    waits += "patience.NOTICE, patience.LIMIT = 0.1, 0.2\n"
    process = python("-c", f"{waits}with patience.waiting_for('others'): time.sleep(60)")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == "waited 0.1 s for others\ngave up after 0.2 s of waiting for others\n"


def test_torchrun_where_nobody_can_resolve_the_name_of_the_machine(tmp_path: Path) -> None:
    """Without `--local-addr` its processes would wait for ever: their store would be under that name."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket; socket.gethostname = socket.getfqdn = lambda *name: 'a-name.invalid'"
    )
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist; dist.init_process_group('gloo'); print('met')")
    process = python(*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script), first=tmp_path)
    try:
        printed, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and printed.count("met") == 2, said
