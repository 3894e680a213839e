"""Test tests/ranks.py, which starts the processes for tests over several ranks."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from .. import ranks
from ..ranks import current, end_of


@pytest.mark.ranks(2)
def test_each_rank_prints_to_a_file_of_its_own() -> None:
    rank = current()
    line = f"a line of rank {rank.index} of {dist.get_world_size()}"
    print(line, file=sys.stderr, flush=True)
    dist.all_reduce(torch.zeros(1))  # the other rank has printed, too
    texts = [rank.file.with_name(f"rank-{k}.txt").read_text() for k in range(2)]
    assert [f"a line of rank {k} of 2" in texts[k] for k in range(2)] == [True, True]
    assert line not in texts[1 - rank.index]


def test_a_failure_shows_the_end_of_what_a_rank_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LAST", 10)
    file = tmp_path / "rank-1.txt"
    assert end_of(file) == f"{file} ends with:\n"
    file.write_text("Traceback: the last 9")
    assert end_of(file) == f"{file} ends with:\nthe last 9"
