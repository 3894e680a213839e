"""Answer the rows for several ranks: `python -m tests.works_with.ranks RANK FOLDER`, in two processes.

Each rank writes FOLDER/RANK.json: by row, engine and mode, `"right"`, or what differs or was raised.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .page import ENGINES, MODES, PAGE, Row, read
from .run import Plain, differences, left_by, names, pipeline

RANKS = 2


def left_in_group(row: Row, kind: Any, rank: int, store: Path) -> dict[str, Any]:
    """Run a row's code in a process group of its own: one that was left in the middle is of no more use."""
    patience = timedelta(seconds=60)  # only a hang takes as long
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=patience)
    try:
        return left_by(row.code, names(kind, rank, mesh=init_device_mesh("cpu", (RANKS,))))
    finally:
        dist.destroy_process_group()


def answers(row: Row, rank: int, folder: Path) -> dict[str, str]:
    plain = left_in_group(row, Plain, rank, folder / f"{row.name} plain")
    found = {}
    for engine in ENGINES:
        for mode in MODES:
            way = f"{engine} {mode}"
            try:
                ours = left_in_group(row, pipeline(engine, mode), rank, folder / f"{row.name} {way}")
            except Exception as error:
                found[way] = f"{type(error).__name__}: {error}"
            else:
                different = differences(ours, plain, rounded=row.rounded)
                found[way] = f"differs: {different}" if different else "right"
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    rows = read(PAGE.read_text(encoding="utf-8"))
    found = {row.name: answers(row, rank, folder) for row in rows if row.ranks}
    (folder / f"{rank}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
